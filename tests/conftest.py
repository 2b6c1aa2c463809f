"""Fixtures of all tests: a pool of ranks, and tiny checkpoints that hold an n-gram table only."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from skyrl_qwen38.checkpoint.tiny import make_tiny
from skyrl_qwen38.ple import NgramHasher
from tests.ranks import RankPool

TABLE_MODULE = "model.language_model.layers.1.ple.ple_embedding."


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(function, *args, world_size=3)`: see `tests/ranks.py`."""
    # One pool for all tests: what costs seconds is the import of Megatron in each of its workers.
    pool = RankPool({"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"})
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the main job, warmed up: the one start of a minute that all its tests share."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "seed0")


@pytest.fixture(scope="session")
def tiny_hasher() -> NgramHasher:
    """16 heads over 2,304 rows, from a vocabulary of 512."""
    return NgramHasher(vocab_size=512, eos_token_id=2, ngram_vocab_size_base=101)


@pytest.fixture(scope="session")
def table_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, tiny_hasher: NgramHasher
) -> Callable[..., tuple[Path, torch.Tensor]]:
    """Makes a folder with a table as released checkpoints have it, and returns it with the whole table.

    `table_checkpoint(hasher=tiny_hasher, row_dim=4, dtype=torch.bfloat16, shards=5, files=2)`: shard tensors spread
    over `files` safetensors files with an index; the three int64 hash buffers are in the last of them.
    """

    def make(
        hasher: NgramHasher = tiny_hasher,
        row_dim: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        shards: int = 5,
        files: int = 2,
    ) -> tuple[Path, torch.Tensor]:
        folder = tmp_path_factory.mktemp("table")
        table = torch.randn(hasher.num_rows, row_dim, generator=torch.Generator().manual_seed(7)).to(dtype)
        names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
        contents: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
        for i, shard in enumerate(table.chunk(shards)):
            contents[names[i * files // shards]][f"{TABLE_MODULE}ngram_embedding.shard_{i}.weight"] = shard.clone()
        contents[names[-1]] |= {
            f"{TABLE_MODULE}layer_multipliers": hasher.multipliers,
            f"{TABLE_MODULE}ngram_heads_vocab_sizes": hasher.head_sizes,
            f"{TABLE_MODULE}ngram_heads_offsets": hasher.head_offsets,
        }
        for name, tensors in contents.items():
            save_file(tensors, folder / name)
        weight_map = {tensor: name for name, tensors in contents.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder, table

    return make
