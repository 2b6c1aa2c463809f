"""The table read from checkpoint files, and every refusal of a checkpoint that is not whole."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_qwen38.ple import TableSource, TableSourceError
from tests.conftest import TABLE_MODULE
from tests.hub_server import HubServer

INDEX = "model.safetensors.index.json"
SCALE = f"{TABLE_MODULE}ngram_embedding.weight_scale"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard_name(i: int) -> str:
    return f"{TABLE_MODULE}ngram_embedding.shard_{i}.weight"


@pytest.fixture
def checkpoint(table_checkpoint, tmp_path) -> Path:
    """A folder that the test may damage: shards 0, 1 and 2 in the first file, 3 and 4 in the second."""
    return Path(shutil.copytree(table_checkpoint()[0], tmp_path / "checkpoint"))


def edit_file(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_index(folder: Path, **places: object) -> None:
    """Sets entries of the index's weight_map; None removes one."""
    index = json.loads((folder / INDEX).read_text())
    for name, file in places.items():
        index["weight_map"].pop(name, None)
        if file is not None:
            index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def make_fp8(folder: Path, scale: float = 0.25) -> None:
    """Turns a table into its fp8 release: e4m3 rows and one scale."""

    def convert(tensors):
        shards = {name: rows for name, rows in tensors.items() if "shard" in name}
        tensors |= {name: (rows.float() / scale).to(torch.float8_e4m3fn) for name, rows in shards.items()}

    edit_file(folder / FIRST, convert)
    edit_file(folder / SECOND, lambda t: (convert(t), t.update({SCALE: torch.tensor(scale)})))
    edit_index(folder, **{SCALE: SECOND})


# ---- what is read ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("shards", "files"), [(1, 1), (5, 2), (12, 3), (7, 7)])
def test_rows_equal_the_whole_table(table_checkpoint, dtype, shards, files):
    folder, table = table_checkpoint(dtype=dtype, shards=shards, files=files)
    source = TableSource.open(folder)
    assert (source.num_rows, source.row_dim, source.dtype) == (*table.shape, dtype)
    size = -(-len(table) // shards)
    for start, stop in [(0, 1), (size - 1, size + 1), (3, 3), (len(table) - 1, len(table)), (0, len(table))]:
        stop = min(stop, len(table))
        rows = source.read(start, stop)
        assert rows.dtype == dtype
        assert torch.equal(rows, table[start:stop])


def test_shards_are_in_numeric_order(table_checkpoint):
    """shard_10 comes after shard_9, and not after shard_1."""
    folder, table = table_checkpoint(shards=12, files=1)
    assert torch.equal(TableSource.open(str(folder)).read(0, len(table)), table)


def test_a_table_in_one_tensor_without_an_index(table_checkpoint, tmp_path):
    _, table = table_checkpoint()
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"  # as a text-only checkpoint spells it
    save_file({name: table, "lm_head.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    source = TableSource.open(tmp_path)
    assert torch.equal(source.read(5, 9), table[5:9])
    assert source.buffers() is None


def test_buffers(checkpoint, tiny_hasher):
    buffers = TableSource.open(checkpoint).buffers()
    assert set(buffers) == {"multipliers", "head_sizes", "head_offsets"}
    tiny_hasher.check_buffers(**buffers)


def test_only_the_files_that_hold_the_table_are_needed(checkpoint):
    (checkpoint / "other.safetensors").write_bytes(b"not opened")
    edit_index(checkpoint, **{"lm_head.weight": "other.safetensors", "norm.weight": "absent.safetensors"})
    buffers = {
        f"{TABLE_MODULE}{name}" for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    }
    edit_index(checkpoint, **dict.fromkeys(buffers, "elsewhere.safetensors"))
    source = TableSource.open(checkpoint)
    assert source.num_rows == 2304
    assert source.buffers() is None


def test_the_identity_tells_tables_apart_by_their_rows(table_checkpoint, checkpoint):
    same, other = TableSource.open(table_checkpoint(shards=1, files=1)[0]), TableSource.open(checkpoint)
    before = other.identity()
    assert same.identity() == before
    edit_file(checkpoint / SECOND, lambda t: t[shard_name(4)][-1].add_(1))
    assert TableSource.open(checkpoint).identity() != before


def test_fp8_rows_come_as_they_are_stored_with_their_scale(checkpoint, table_checkpoint):
    make_fp8(checkpoint)
    source = TableSource.open(checkpoint)
    assert source.dtype == torch.float8_e4m3fn
    assert source.scale == 0.25
    expected = (table_checkpoint()[1].float() / 0.25).to(torch.float8_e4m3fn)
    assert torch.equal(source.read(400, 1500).view(torch.uint8), expected[400:1500].view(torch.uint8))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 2305), (5, 4)])
def test_a_range_outside_the_table_is_refused(checkpoint, start, stop):
    with pytest.raises(IndexError, match="2304"):
        TableSource.open(checkpoint).read(start, stop)


# ---- what is refused: each case damages a good checkpoint, and the sentence names file and tensor ----


def lose_file(folder: Path) -> None:
    (folder / SECOND).unlink()


def truncate_file(folder: Path) -> None:
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 100)


def empty_file(folder: Path) -> None:
    os.truncate(folder / SECOND, 0)


def lose_shard_in_index(folder: Path) -> None:
    edit_index(folder, **{shard_name(3): None})


def lose_shard_in_file(folder: Path) -> None:
    edit_file(folder / SECOND, lambda tensors: tensors.pop(shard_name(3)))


def gigantic_shard_number(folder: Path) -> None:
    edit_index(folder, **{shard_name(999_999_999): SECOND})


def shard_number_twice(folder: Path) -> None:
    edit_index(folder, **{f"{TABLE_MODULE}ngram_embedding.shard_03.weight": SECOND})


def change_dtype(folder: Path) -> None:
    edit_file(folder / SECOND, lambda tensors: tensors.update({shard_name(3): tensors[shard_name(3)].float()}))


def change_width(folder: Path) -> None:
    edit_file(folder / SECOND, lambda t: t.update({shard_name(4): t[shard_name(4)][:, :3].contiguous()}))


def shorten_middle_shard(folder: Path) -> None:
    edit_file(folder / FIRST, lambda t: t.update({shard_name(1): t[shard_name(1)][:-1].contiguous()}))


def lengthen_last_shard(folder: Path) -> None:
    edit_file(folder / SECOND, lambda t: t.update({shard_name(4): torch.zeros(900, 4, dtype=torch.bfloat16)}))


def flatten_shard(folder: Path) -> None:
    edit_file(folder / SECOND, lambda t: t.update({shard_name(3): t[shard_name(3)].flatten()}))


def integer_shards(folder: Path) -> None:
    for file in (FIRST, SECOND):
        edit_file(folder / file, lambda t: t.update({k: v.long() for k, v in t.items()}))


def fp8_without_scale(folder: Path) -> None:
    make_fp8(folder)
    edit_file(folder / SECOND, lambda t: t.pop(SCALE))
    edit_index(folder, **{SCALE: None})


def scale_a_row(folder: Path) -> None:
    make_fp8(folder)
    edit_file(folder / SECOND, lambda t: t.update({SCALE: torch.ones(2304)}))


def negative_scale(folder: Path) -> None:
    make_fp8(folder)
    edit_file(folder / SECOND, lambda t: t.update({SCALE: torch.tensor(-0.5)}))


def fp8_shard_among_others(folder: Path) -> None:
    edit_file(folder / FIRST, lambda t: t.update({shard_name(1): t[shard_name(1)].to(torch.float8_e4m3fn)}))


def scale_beside_bf16(folder: Path) -> None:
    edit_index(folder, **{SCALE: SECOND})


def second_table(folder: Path) -> None:
    edit_index(folder, **{shard_name(0).replace("layers.1", "layers.5"): FIRST})


def whole_and_shards(folder: Path) -> None:
    edit_index(folder, **{f"{TABLE_MODULE}ngram_embedding.weight": FIRST})


def no_table(folder: Path) -> None:
    edit_index(folder, **dict.fromkeys(map(shard_name, range(5))))


def lose_buffer(folder: Path) -> None:
    edit_index(folder, **{f"{TABLE_MODULE}ngram_heads_offsets": None})


def float_buffer(folder: Path) -> None:
    name = f"{TABLE_MODULE}layer_multipliers"
    edit_file(folder / SECOND, lambda tensors: tensors.update({name: tensors[name].float()}))


def index_of_no_json(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def index_without_map(folder: Path) -> None:
    (folder / INDEX).write_text('{"metadata": {}}')


def index_of_a_list(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ["a"]}')


def point_up(folder: Path) -> None:
    shutil.copy(folder / SECOND, folder.parent / "x.safetensors")
    edit_index(folder, **{shard_name(3): "../x.safetensors"})


def point_to_root(folder: Path) -> None:
    edit_index(folder, **{shard_name(3): "/etc/x.safetensors"})


def point_to_subfolder(folder: Path) -> None:
    edit_index(folder, **{shard_name(3): "sub\\x.safetensors"})


def point_to_pickle(folder: Path) -> None:
    edit_index(folder, **{shard_name(3): "pytorch_model.bin"})


def point_to_number(folder: Path) -> None:
    edit_index(folder, **{shard_name(3): 7})


def link_outside(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / SECOND).rename(outside)
    (folder / SECOND).symlink_to(outside)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lose_file, [SECOND, shard_name(3), "missing"]),
        (truncate_file, [SECOND, shard_name(3), "not fully covered"]),
        (empty_file, [SECOND, shard_name(3), "header too small"]),
        (lose_shard_in_index, [INDEX, shard_name(3), "shard 4"]),
        (lose_shard_in_file, [SECOND, shard_name(3), "does not hold"]),
        (gigantic_shard_number, [INDEX, shard_name(5)]),
        (shard_number_twice, [INDEX, "two ways"]),
        (change_dtype, [SECOND, shard_name(3), "F32", "BF16"]),
        (change_width, [SECOND, shard_name(4), "width 3", "width 4"]),
        (shorten_middle_shard, [FIRST, shard_name(1), "460 rows", "461"]),
        (lengthen_last_shard, [SECOND, shard_name(4), "900 rows", "461"]),
        (flatten_shard, [SECOND, shard_name(3), "[1844]"]),
        (integer_shards, [FIRST, shard_name(0), "I64"]),
        (fp8_without_scale, [SCALE, "without its scale"]),
        (scale_a_row, [SECOND, SCALE, "one positive number"]),
        (negative_scale, [SECOND, SCALE, "-0.5"]),
        (fp8_shard_among_others, [FIRST, shard_name(1), "F8_E4M3", "must agree"]),
        (scale_beside_bf16, [SCALE, "torch.bfloat16"]),
        (second_table, [INDEX, "2 n-gram tables", "layers.1.", "layers.5."]),
        (whole_and_shards, [INDEX, f"{TABLE_MODULE}ngram_embedding.weight", "both"]),
        (no_table, [INDEX, "ngram_embedding.shard_0.weight"]),
        (lose_buffer, ["ngram_heads_offsets"]),
        (float_buffer, [SECOND, "layer_multipliers", "F32"]),
        (index_of_no_json, [INDEX]),
        (index_without_map, [INDEX, "weight_map"]),
        (index_of_a_list, [INDEX]),
        (point_up, [INDEX, shard_name(3), "../x.safetensors"]),
        (point_to_root, [INDEX, shard_name(3), "/etc/x.safetensors"]),
        (point_to_subfolder, [INDEX, shard_name(3), "x.safetensors"]),
        (point_to_pickle, [INDEX, shard_name(3), "pytorch_model.bin"]),
        (point_to_number, [INDEX, shard_name(3), "7"]),
        (link_outside, [SECOND, shard_name(3), "outside.safetensors"]),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(checkpoint, damage, named):
    damage(checkpoint)
    with pytest.raises(TableSourceError) as error:
        TableSource.open(checkpoint)
    for part in named:
        assert part in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("damage", [link_outside, truncate_file, lose_shard_in_file, fp8_without_scale])
def test_the_same_holds_without_an_index(checkpoint, damage):
    damage(checkpoint)
    (checkpoint / INDEX).unlink()
    with pytest.raises(TableSourceError):
        TableSource.open(checkpoint)


def test_a_shard_in_two_files_is_refused(checkpoint):
    (checkpoint / INDEX).unlink()
    shutil.copy(checkpoint / FIRST, checkpoint / "old.safetensors")
    with pytest.raises(TableSourceError, match=r"twice, in model-00001-of-00002\.safetensors and old\.safetensors"):
        TableSource.open(checkpoint)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [1000, 1000], "data_offsets": [0, 4]},  # offsets against shape
        {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 400]},  # past the end of the file
        {"dtype": "BF16", "shape": [1, 2], "data_offsets": [4, 0]},
        {"dtype": "E99", "shape": [1, 2], "data_offsets": [0, 4]},
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, entry):
    name = shard_name(0)
    header = json.dumps({name: entry}).encode()
    (tmp_path / FIRST).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: FIRST}}))
    with pytest.raises(TableSourceError) as error:
        TableSource.open(tmp_path)
    assert FIRST in str(error.value)
    assert name in str(error.value)


def test_neither_a_folder_nor_a_hub_id(tmp_path):
    with pytest.raises(TableSourceError, match="neither a checkpoint folder nor a hub id"):
        TableSource.open(tmp_path / "absent")


# ---- the hub: a server that speaks its protocol, and processes that fetch from it ----


@pytest.fixture
def hub(checkpoint) -> Iterator[HubServer]:
    """Serves `checkpoint` as owner/model."""
    server = HubServer(checkpoint)
    yield server
    server.close()


READ = """
import sys, torch
from skyrl_qwen38.ple import TableSource, TableSourceError
start, stop, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    source = TableSource.open("owner/model")
    torch.save({"rows": source.read(start, stop), "buffers": source.buffers(), "identity": source.identity()}, out)
except TableSourceError as error:
    sys.exit(str(error))
"""


def fetching(hub: HubServer, home: Path, start: int, stop: int, out: Path) -> subprocess.Popen:
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", READ, str(start), str(stop), str(out)],
        env=environment | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def failure(process: subprocess.Popen) -> str:
    _, text = process.communicate(timeout=60)
    assert process.returncode == 1
    return text.strip()


def test_only_the_files_with_the_own_rows_are_fetched(hub, checkpoint, table_checkpoint, tmp_path, tiny_hasher):
    """Rows 0 … 767 lie in the first file; the hash buffers in the second come by their byte range."""
    edit_index(checkpoint, **{"lm_head.weight": "model-00009-of-00009.safetensors"})
    process = fetching(hub, tmp_path / "home", 0, 768, tmp_path / "out.pt")
    assert process.wait(timeout=60) == 0, process.stderr.read()
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(found["rows"], table_checkpoint()[1][:768])
    tiny_hasher.check_buffers(**found["buffers"])
    assert hub.fetched() == [FIRST, INDEX]
    assert {file for _, file, _ in hub.requests} == {FIRST, SECOND, INDEX}


def test_processes_of_a_node_fetch_each_file_once(hub, table_checkpoint, tmp_path):
    outs = [tmp_path / f"{rank}.pt" for rank in range(3)]
    bounds = [(rank * 768, (rank + 1) * 768) for rank in range(3)]
    processes = [fetching(hub, tmp_path / "home", *rows, out) for rows, out in zip(bounds, outs, strict=True)]
    for process in processes:
        assert process.wait(timeout=90) == 0, process.stderr.read()
    found = [torch.load(out, weights_only=True) for out in outs]
    assert torch.equal(torch.cat([part["rows"] for part in found]), table_checkpoint()[1])
    assert len({part["identity"] for part in found}) == 1
    assert hub.fetched() == [FIRST, SECOND, INDEX]


@pytest.mark.parametrize(
    ("damage", "start", "named"),
    [
        (lose_file, 0, SECOND),
        (lambda folder: edit_index(folder, **{shard_name(3): "../secrets.safetensors"}), 0, "../secrets"),
        (lambda folder: (folder / INDEX).unlink(), 0, "owner/model has no file model.safetensors"),
        (truncate_file, 2000, f"{SECOND} cannot be read for {shard_name(4)}"),
    ],
)
def test_what_the_hub_has_wrong_is_named(hub, checkpoint, tmp_path, damage, start, named):
    damage(checkpoint)
    sentence = failure(fetching(hub, tmp_path / "home", start, 2304, tmp_path / "out.pt"))
    assert named in sentence
    assert len(sentence.splitlines()) == 1


def test_a_shard_that_breaks_the_row_count_is_found_when_its_file_comes(hub, checkpoint, tmp_path):
    """Of a hub repository only the first and the last shard are looked at before."""
    edit_file(checkpoint / FIRST, lambda t: t.update({shard_name(1): t[shard_name(1)][:-1].clone()}))
    sentence = failure(fetching(hub, tmp_path / "home", 0, 768, tmp_path / "out.pt"))
    assert f"{shard_name(1)} is BF16 [460, 4]" in sentence
    assert "461 rows of 4" in sentence


@pytest.mark.full  # huggingface_hub tries again for half a minute
def test_a_server_that_does_not_answer_is_named(hub, tmp_path):
    hub.close()
    sentence = failure(fetching(hub, tmp_path / "home", 0, 768, tmp_path / "out.pt"))
    assert f"{INDEX} of owner/model's table cannot be fetched from the hub (" in sentence
