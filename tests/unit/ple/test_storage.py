"""A rank's rows in host memory: one allocation, of exactly its rows."""

import pytest
import torch

from skyrl_qwen38.ple import TableSource
from skyrl_qwen38.ple import storage as storage_module
from skyrl_qwen38.ple.storage import HostRows


@pytest.mark.parametrize("slice_bytes", [1, 24, 1 << 20], ids=["a row a slice", "3 rows a slice", "one slice"])
@pytest.mark.parametrize(("start", "stop"), [(0, 2304), (460, 463), (1000, 1500), (7, 7)])
def test_rows_are_those_of_the_table(table_checkpoint, monkeypatch, slice_bytes, start, stop):
    monkeypatch.setattr(storage_module, "_SLICE_BYTES", slice_bytes)
    folder, table = table_checkpoint()
    rows = HostRows(TableSource.open(folder), start, stop)
    numbers = torch.arange(stop - start, dtype=torch.int32).flip(0)
    assert torch.equal(rows.gather(numbers), table[start:stop].flip(0))


def test_one_allocation_of_the_own_rows_on_the_cpu(table_checkpoint, monkeypatch):
    """Nothing of the whole table's size is made on the way, and no read reaches beyond the rank's rows."""
    source = TableSource.open(table_checkpoint()[0])
    made = []
    original = torch.empty

    def spy(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "empty", spy)
    rows = HostRows(source, 768, 1536)
    assert [(tuple(t.shape), t.dtype, t.device.type) for t in made] == [((768, 4), torch.bfloat16, "cpu")]
    assert not rows.gather(torch.tensor([0])).requires_grad


def test_reads_only_its_own_rows(table_checkpoint, monkeypatch):
    source = TableSource.open(table_checkpoint()[0])
    reads = []
    original = source.read_into
    monkeypatch.setattr(source, "read_into", lambda out, start: (reads.append((start, len(out))), original(out, start)))
    monkeypatch.setattr(storage_module, "_SLICE_BYTES", 8 * 300)
    HostRows(source, 768, 1536)
    assert reads == [(768, 300), (1068, 300), (1368, 168)]


def test_an_unknown_storage_is_refused(table_checkpoint):
    with pytest.raises(ValueError, match="'auto' or 'pinned', got 'mapped'"):
        HostRows(TableSource.open(table_checkpoint()[0]), 0, 1, storage="mapped")
