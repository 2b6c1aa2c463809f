"""The row-sharded table on a CUDA device: rows bit for bit, page-locked memory of exact size, one host wait a step."""

import warnings

import pytest
import torch
import torch.distributed as dist

from skyrl_qwen38.ple import RowShardedTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
STORAGES = ("pinned", "mapped", "node")


def tokens(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 9, (count,), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_rows_equal_the_whole_table(table_checkpoint, tiny_hasher, storage, count):
    folder, whole = table_checkpoint()
    table = RowShardedTable.load(folder, tiny_hasher, storage=storage)
    ids = tokens(count, count)
    rows = table.start(ids).wait()
    assert rows.is_cuda
    assert torch.equal(rows.cpu(), whole[tiny_hasher.row_ids(ids.cpu())])


def test_rows_are_page_locked_and_nothing_is_rounded_up(table_checkpoint, tiny_hasher):
    table = RowShardedTable.load(table_checkpoint()[0], tiny_hasher)
    memory = table._rows._rows
    assert memory.is_pinned()
    assert memory.untyped_storage().nbytes() == tiny_hasher.num_rows * 8


def test_a_planned_step_makes_the_host_wait_once(table_checkpoint, tiny_hasher):
    table = RowShardedTable.load(table_checkpoint()[0], tiny_hasher)
    batches = [(tokens(i, 700), torch.tensor([0, 300, 700], dtype=torch.int32).cuda()) for i in range(4)]
    for batch in batches:  # what is made at the first call
        table.start(*batch).wait()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            table.plan(batches)
            rows = [table.start(*batch).wait() for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "synchroniz" in str(wait.message)]) == 1
    assert len(rows) == 4


def test_refused_ids_are_found_without_a_look_at_them(table_checkpoint, tiny_hasher):
    table = RowShardedTable.load(table_checkpoint()[0], tiny_hasher)
    with pytest.raises(RuntimeError, match="outside the vocabulary of 512"):
        table.start(torch.tensor([1, 512]).cuda())


def nccl_rows(rank: int, world_size: int, folder, hasher, whole) -> None:
    torch.cuda.set_device(rank)
    group = dist.new_group(list(range(world_size)), backend="nccl")
    table = RowShardedTable.load(folder, hasher, group=group)
    ids = tokens(rank, [40, 0, 5000, 7][rank % 4])
    assert torch.equal(table.start(ids).wait().cpu(), whole[hasher.row_ids(ids.cpu())])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_rows_come_over_nccl(ranks, table_checkpoint, tiny_hasher):
    folder, whole = table_checkpoint()
    ranks.run(nccl_rows, folder, tiny_hasher, whole, world_size=min(4, torch.cuda.device_count()))
