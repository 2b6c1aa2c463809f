"""Fixtures of the parity tests: ranks that run Megatron on the CPU, tiny checkpoints, and Transformers' answers."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity import checkpoints, megatron_runs
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
    """Documents of very different lengths, one at the end of the dense range, with separators inside some."""
    generator = torch.Generator().manual_seed(11)
    lengths = (7, 1, checkpoints.DENSE_LIMIT, 2, 24, 40, 3)
    made = [torch.randint(3, checkpoints.VOCAB - 4, (length,), generator=generator).tolist() for length in lengths]
    for document, position in ((0, 3), (2, 30), (2, 31), (4, 0), (5, 39)):
        made[document][position] = checkpoints.EOS
    return made


@dataclass
class Reference:
    """Transformers on each document alone, in fp32, in a process without any redirection.

    Attributes:
        logprobs: of every document, ``[tokens, V]``.
        loss: sum over documents of the next-token losses.
        gradients: of ``loss``, by name in the text-only layout with packed experts.
    """

    logprobs: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


@pytest.fixture(scope="session")
def reference(text_checkpoint: Path, documents: list[list[int]]) -> Reference:
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    model = Qwen4ExpForCausalLM.from_pretrained(text_checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    logprobs, loss = [], torch.zeros(())
    for document in documents:
        ids = torch.tensor([document])
        scores = model(ids).logits[0].log_softmax(-1)
        logprobs.append(scores.detach())
        loss = loss - scores[:-1].gather(1, ids[0, 1:, None]).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference(logprobs, loss.item(), gradients)
