"""The table that the provider builds, with the patch and without, from a checkpoint's own bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

IDS = torch.tensor([[5, 9, 2, 300, 411, 2, 7, 7, 7, 511, 0, 1]])


def _built_table(rank: int, world_size: int, checkpoint: Path, hasher: Any, patched: bool) -> tuple[str, torch.Tensor]:
    from skyrl_qwen38 import cpu

    cpu.install()
    from importlib import import_module

    from skyrl_qwen38 import patching
    from skyrl_qwen38.config import Qwen38Config

    row_shard = import_module("skyrl_qwen38.patches.ple_row_shard")
    provider = import_module("skyrl_qwen38.qwen4_exp.provider")
    original = provider.build_ple_table
    patching.apply([row_shard.PATCH], "trainer", {"ple_row_shard": patched}, Qwen38Config())
    try:
        table = provider.build_ple_table(str(checkpoint), hasher, dist.group.WORLD)
        return type(table).__name__, table.start(IDS).wait()
    finally:
        patching.undo("ple_row_shard")
        assert provider.build_ple_table is original


@pytest.mark.parametrize(
    ("patched", "world_size", "kind"),
    [(True, 2, "RowShardedTable"), (True, 3, "RowShardedTable"), (False, 2, "HeadShardedTable")],
)
def test_the_provider_builds_the_table_that_the_flag_says(
    ranks, table_checkpoint, tiny_hasher, patched, world_size, kind
):
    checkpoint, table = table_checkpoint()
    expected = table[tiny_hasher.row_ids(IDS)]
    for name, rows in ranks.run(_built_table, checkpoint, tiny_hasher, patched, world_size=world_size, timeout=200):
        assert name == kind
        assert torch.equal(rows, expected)


def test_the_head_split_refuses_three_ranks(ranks, table_checkpoint, tiny_hasher):
    checkpoint, _ = table_checkpoint()
    with pytest.raises(AssertionError, match="16"):
        ranks.run(_built_table, checkpoint, tiny_hasher, False, world_size=3, timeout=200)


def test_the_storage_setting_reaches_the_table(monkeypatch):
    from importlib import import_module

    import skyrl_qwen38.ple
    from skyrl_qwen38 import patching
    from skyrl_qwen38.config import Config

    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        skyrl_qwen38.ple.RowShardedTable,
        "load",
        lambda source, hasher, group, storage: asked.update(source=source, group=group, storage=storage),
    )
    patch = import_module("skyrl_qwen38.patches.ple_row_shard").PATCH

    class Recorder(patching.Changes):
        def replace(self, dotted: str, replacement: Any) -> None:
            replacement("folder", None, "the group")

    settings = Config.from_cli_overrides(["trainer.qwen38.ple.storage=pinned"]).trainer.qwen38
    patch.apply(Recorder("ple_row_shard"), settings)
    assert asked == {"source": "folder", "group": "the group", "storage": "pinned"}
