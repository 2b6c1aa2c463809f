"""The table read from checkpoint files, and every refusal of a checkpoint that is not whole."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_qwen38.ple import TableSource, TableSourceError
from tests.conftest import TABLE_MODULE

INDEX = "model.safetensors.index.json"
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


def test_a_sample_tells_tables_apart_and_has_both_ends(table_checkpoint):
    folder, table = table_checkpoint()
    sample = TableSource.open(folder).sample()
    assert sample.shape == (64, 4)
    assert torch.equal(sample[[0, -1]], table[[0, -1]])


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


def fp8_shards(folder: Path) -> None:
    def convert(t):
        t.update({k: v.to(torch.float8_e4m3fn) for k, v in t.items() if "shard" in k})

    edit_file(folder / FIRST, convert)
    edit_file(folder / SECOND, convert)


def fp8_scale(folder: Path) -> None:
    edit_index(folder, **{f"{TABLE_MODULE}ngram_embedding.weight_scale": SECOND})


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
        (fp8_shards, [FIRST, shard_name(0), "F8_E4M3", "not supported yet"]),
        (fp8_scale, [INDEX, "weight_scale", "not supported yet"]),
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


@pytest.mark.parametrize("damage", [link_outside, truncate_file, lose_shard_in_file, fp8_shards])
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


# ---- the hub ----


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch):
    """A hub cache as huggingface_hub lays it out (links into blobs), filled by the files that are asked for."""
    import huggingface_hub

    snapshot = tmp_path / "hub" / "models--owner--model" / "snapshots" / "0123abc"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    asked = []

    def download(repo_id, file, revision=None):
        asked.append((repo_id, file, revision))
        if not (checkpoint / file).exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"{file} not found\nmore lines")
        shutil.copy(checkpoint / file, blobs / file)
        (snapshot / file).symlink_to(f"../../blobs/{file}")
        return str(snapshot / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def test_only_the_table_files_of_one_revision_are_downloaded(hub, checkpoint, table_checkpoint):
    edit_index(checkpoint, **{"lm_head.weight": "model-00009-of-00009.safetensors"})
    source = TableSource.open("owner/model")
    assert torch.equal(source.read(0, 2304), table_checkpoint()[1])
    assert hub == [("owner/model", INDEX, None), *(("owner/model", file, "0123abc") for file in (FIRST, SECOND))]


def test_a_hub_file_that_cannot_be_fetched_is_named(hub, checkpoint):
    (checkpoint / SECOND).unlink()
    with pytest.raises(TableSourceError, match=rf"owner/model cannot be fetched from the hub \({SECOND} not found\)"):
        TableSource.open("owner/model")


def test_an_index_from_the_hub_cannot_ask_for_other_paths(hub, checkpoint):
    edit_index(checkpoint, **{shard_name(3): "../secrets.safetensors"})
    with pytest.raises(TableSourceError, match=r"\.\./secrets"):
        TableSource.open("owner/model")
    assert [file for _, file, _ in hub] == [INDEX]
