"""The stores of a rank's rows: what they hold, what they leave alone, and which one `auto` takes."""

import multiprocessing
import os

import pytest
import torch

from skyrl_qwen38.ple import TableSource
from skyrl_qwen38.ple import source as source_module
from skyrl_qwen38.ple import storage as storage_module
from skyrl_qwen38.ple.node_memory import shared_memory
from skyrl_qwen38.ple.storage import HostRows, MappedRows, choose_storage

RANGES = [(0, 2304), (460, 463), (1000, 1500), (2303, 2304), (7, 7)]


def gathered(store, numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(len(numbers), store.row_bytes, dtype=torch.uint8)
    store.gather(numbers, out)
    return out.view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [HostRows, MappedRows])
@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_rows_are_those_of_the_table(table_checkpoint, kind, start, stop, dtype):
    folder, table = table_checkpoint(dtype=dtype)
    store = kind(TableSource.open(folder), start, stop)
    numbers = torch.arange(stop - start, dtype=torch.int32).flip(0).repeat(2)
    assert torch.equal(gathered(store, numbers, dtype), table[start:stop].flip(0).repeat(2, 1))


@pytest.mark.parametrize("piece_bytes", [1, 24, 1 << 20], ids=["a byte a read", "3 rows a read", "one read a shard"])
def test_pieces_fit_together(table_checkpoint, monkeypatch, piece_bytes):
    monkeypatch.setattr(source_module, "_PIECE_BYTES", piece_bytes)
    folder, table = table_checkpoint()
    assert torch.equal(TableSource.open(folder).read(450, 470), table[450:470])


def test_only_the_own_bytes_are_read(table_checkpoint, monkeypatch):
    source = TableSource.open(table_checkpoint()[0])
    source.identity()
    read = []
    original = os.preadv

    def spy(descriptor, buffers, offset):
        read.append(sum(map(len, buffers)))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", spy)
    source.read(768, 1536)
    assert sum(read) == 768 * 8


def test_a_mapped_table_reads_nothing_when_it_is_opened(table_checkpoint, monkeypatch):
    source = TableSource.open(table_checkpoint()[0])
    monkeypatch.setattr(os, "preadv", None)
    assert MappedRows(source, 100, 2000).rows == 1900


def test_a_file_that_shrinks_while_it_is_read_is_named(table_checkpoint, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * 100)
    with pytest.raises(OSError, match=r"model\.safetensors ends at byte 100"):
        source_module._read_piece(path, 90, memoryview(bytearray(20)))


# ---- sharing between processes ----


def fill_and_wait(identity: str, value: int, ready, go) -> None:
    memory, shared = shared_memory(identity, 4096, lambda memory: memory.fill_(value))
    ready.put((shared, int(memory[0])))
    go.wait(30)


def test_a_second_process_attaches_to_what_the_first_has_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    context = multiprocessing.get_context("spawn")
    ready, go = context.Queue(), context.Event()
    processes = []
    try:
        for value in (7, 8):  # the second's own value shows if it was not the first's memory
            processes.append(context.Process(target=fill_and_wait, args=("table", value, ready, go), daemon=True))
            processes[-1].start()
            assert ready.get(timeout=60) == (value == 8, 7)
        go.set()
        for process in processes:
            process.join(30)
        memory, shared = shared_memory("table", 4096, lambda memory: memory.fill_(9))
        assert not shared, "the memory outlived its holders"
        assert int(memory[0]) == 9
    finally:
        for process in processes:
            process.kill()


def test_the_same_rows_are_loaded_once_in_a_process(table_checkpoint, monkeypatch):
    folder, table = table_checkpoint()
    first = HostRows(TableSource.open(folder), 10, 500)
    read_into = TableSource.read_into
    monkeypatch.setattr(TableSource, "read_into", lambda source, out, start: read_into(source, out[:1], start))
    second = HostRows(TableSource.open(folder), 10, 500)
    assert (first.shared, second.shared) == (False, True)
    assert torch.equal(gathered(second, torch.tensor([0, 489]), torch.bfloat16), table[[10, 499]])


def test_memory_goes_with_its_last_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    memory, _ = shared_memory("short-lived", 1 << 20, lambda memory: memory.fill_(1))
    assert set(os.listdir("/proc/self/fd")) > before
    part = memory[5:6]
    del memory
    assert part.item() == 1
    del part
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_load_that_fails_leaves_nothing_to_attach_to(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(memory):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        shared_memory("broken", 64, fail)
    memory, shared = shared_memory("broken", 64, lambda memory: memory.fill_(3))
    assert not shared
    assert memory.tolist() == [3] * 64


def test_a_folder_that_others_may_enter_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"skyrl-qwen38-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="this user alone"):
        shared_memory("table", 64, lambda memory: None)


# ---- which storage ----


@pytest.mark.parametrize(
    ("storage", "free", "chosen", "why"),
    [
        ("pinned", 0, "pinned", "as set"),
        ("mapped", 0, "mapped", "as set"),
        ("auto", 1 << 40, "pinned", "usable on node"),
        ("auto", 1000, "mapped", "too little"),
        ("node", 1 << 40, "node", "usable on node"),
    ],
)
def test_the_choice_follows_what_fits(table_checkpoint, monkeypatch, storage, free, chosen, why):
    monkeypatch.setattr(storage_module, "_free_memory", lambda: free)
    choice = choose_storage(storage, TableSource.open(table_checkpoint()[0]), 768, None)
    assert choice.storage == chosen
    assert why in choice.why


def test_a_node_copy_that_does_not_fit_is_refused(table_checkpoint, monkeypatch):
    monkeypatch.setattr(storage_module, "_free_memory", lambda: 18431)
    with pytest.raises(ValueError, match=r"'node' does not fit .*set it to 'pinned', 'mapped' or 'auto'"):
        choose_storage("node", TableSource.open(table_checkpoint()[0]), 768, None)


def test_an_unknown_storage_is_refused(table_checkpoint):
    with pytest.raises(ValueError, match="one of auto, pinned, mapped, node, got 'disk'"):
        choose_storage("disk", TableSource.open(table_checkpoint()[0]), 768, None)
