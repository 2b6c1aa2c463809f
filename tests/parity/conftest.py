"""Fixtures of the parity tests: ranks that run Megatron on the CPU, tiny checkpoints, and Transformers' answers."""

from pathlib import Path

import pytest
import torch

from tests.parity import checkpoints, megatron_runs, transformers_runs
from tests.ranks import RankPool


@pytest.fixture(scope="session")
def megatron_ranks(ranks: RankPool) -> RankPool:
    """The pool, after all workers have imported Megatron side by side rather than each when a test first needs it."""
    ranks.run(megatron_runs.warm_up, world_size=3, timeout=200)
    return ranks


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make_text_checkpoint(tmp_path_factory.mktemp("qwen4_exp") / "text")


@pytest.fixture(scope="session")
def released_checkpoint(text_checkpoint: Path) -> Path:
    return checkpoints.make_released_checkpoint(text_checkpoint, text_checkpoint.parent / "released")


@pytest.fixture(scope="session")
def documents() -> list[list[int]]:
    """Documents of very different lengths, dense and sparse, one at the dense range's end, some with separators."""
    generator = torch.Generator().manual_seed(11)
    lengths = (7, 1, checkpoints.DENSE_LIMIT, 2, 24, 100, 3)
    made = [torch.randint(3, checkpoints.VOCAB - 4, (length,), generator=generator).tolist() for length in lengths]
    for document, position in ((0, 3), (2, 30), (2, 31), (4, 0), (5, 39)):
        made[document][position] = checkpoints.EOS
    return made


@pytest.fixture(scope="session")
def reference(text_checkpoint: Path, documents: list[list[int]]) -> transformers_runs.Reference:
    return transformers_runs.run(text_checkpoint, documents)
