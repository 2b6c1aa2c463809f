"""`CheckpointIndex` believes nothing that a checkpoint says about itself before checking it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from skyrl_qwen38.checkpoint.index import CheckpointError, CheckpointIndex, refuse_remote_code

INDEX = "model.safetensors.index.json"
FILE = "model-00001-of-00001.safetensors"


def write_file(path: Path, header: dict | bytes, data: int = 16, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data))


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def tensor(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_entries_are_where_safetensors_wrote_the_tensors(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([7, -1]), "c": torch.ones(3, dtype=torch.bfloat16)}
    save_file({"a": tensors["a"]}, tmp_path / "one.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    index = CheckpointIndex.open(tmp_path)
    assert set(index) == {"a", "b", "c"}
    assert {name: (entry.dtype, entry.shape) for name, entry in index.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I64", (2,)),
        "c": ("BF16", (3,)),
    }
    for name, entry in index.items():
        read = torch.frombuffer(bytearray(entry.file.read_bytes()[entry.start : entry.stop]), dtype=tensors[name].dtype)
        assert torch.equal(read.view(entry.shape), tensors[name])
        assert entry.nbytes == tensors[name].nbytes


def test_a_single_file_needs_no_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(CheckpointIndex.open(tmp_path)) == ["a"]


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "", "a\\b.safetensors", "C:x", 7],
)
def test_file_names_that_leave_the_folder(tmp_path, name):
    (tmp_path / "checkpoint").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    write_index(tmp_path / "checkpoint", {"w": name})
    with pytest.raises(CheckpointError, match=r"index\.json places tensor 'w' in .* no file name in this folder"):
        CheckpointIndex.open(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": tensor(offsets=[8, 32], shape=[6])}, r"tensor 'w' ends at byte \d+ of a file of \d+ bytes"),
        ({"v": tensor(offsets=[0, 8]), "w": tensor(offsets=[4, 12])}, "bytes of 'w' overlap those of 'v'"),
        ({"w": tensor(shape=[3])}, r"'w' has 8 bytes where F32 \[3\] needs 12"),
        ({"w": tensor(offsets=[8, 0])}, r"'w' has the offsets \[8, 0\]"),
        ({"w": tensor(offsets=[-8, 0])}, r"'w' has the offsets \[-8, 0\]"),
        ({"w": tensor(offsets=[0])}, r"'w' has the offsets \[0\]"),
        ({"w": tensor(shape=[-2])}, r"'w' has the shape \[-2\]"),
        ({"w": tensor(shape=[True, 2])}, r"'w' has the shape \[True, 2\]"),
        ({"w": tensor(shape="2")}, "'w' has the shape '2'"),
        ({"w": tensor(shape=[2**40, 2**40])}, "'w' has 8 bytes where"),
        ({"w": tensor(dtype="F31")}, "'w' has the unknown dtype 'F31'"),
        ({"w": tensor(dtype=["F32"])}, "'w' has the unknown dtype"),
        ({"w": None}, "'w' has no description"),
        ({"v": tensor()}, rf"lacks tensor 'w', which {INDEX} places there"),
        (b'{"w": ', "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (b'{"w": {}, "w": {}}', "a key occurs twice"),
        (b"[]", "JSON but no object"),
    ],
)
def test_headers_that_lie(tmp_path, header, message):
    write_file(tmp_path / FILE, header)
    write_index(tmp_path, {"w": FILE})
    with pytest.raises(CheckpointError, match=message) as refusal:
        CheckpointIndex.open(tmp_path)
    assert FILE in str(refusal.value)


@pytest.mark.parametrize("length", [10**6, 2**63])
def test_a_header_longer_than_its_file(tmp_path, length):
    write_file(tmp_path / FILE, {"w": tensor()}, length=length)
    write_index(tmp_path, {"w": FILE})
    with pytest.raises(CheckpointError, match=f"{FILE} is truncated"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_truncated_file(tmp_path, keep):
    save_file({"w": torch.ones(4)}, tmp_path / FILE)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:keep])
    write_index(tmp_path, {"w": FILE})
    with pytest.raises(CheckpointError, match=rf"{FILE}.*(is truncated|ends at byte)"):
        CheckpointIndex.open(tmp_path)


def test_an_absent_file(tmp_path):
    write_index(tmp_path, {"w": FILE})
    with pytest.raises(CheckpointError, match=f"{FILE} is absent"):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize(("weight_map", "message"), [(None, "no weight_map"), (["w"], "no weight_map")])
def test_an_index_that_maps_nothing(tmp_path, weight_map, message):
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        CheckpointIndex.open(tmp_path)


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_no_checkpoint(tmp_path, folder):
    with pytest.raises(CheckpointError, match="neither"):
        CheckpointIndex.open(tmp_path / folder)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", '{"auto_map": {}}', r"/config\.json has auto_map"),
        ("config.json", '{"text_config": [{"auto_map": {}}]}', r"/config\.json has auto_map"),
        ("tokenizer_config.json", '{"auto_map": {}}', r"tokenizer_config\.json has auto_map"),
        ("preprocessor_config.json", '{"auto_map": {}}', r"preprocessor_config\.json has auto_map"),
        ("modeling.py", "", r"modeling\.py is code"),
        ("config.json", "{", "not readable as JSON"),
    ],
)
def test_checkpoints_that_bring_code(tmp_path, file, text, message):
    (tmp_path / "tokenizer.json").write_text("{}")
    refuse_remote_code(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        refuse_remote_code(tmp_path)


def test_code_in_a_folder_below(tmp_path):
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "tokenization.py").touch()
    with pytest.raises(CheckpointError, match=r"custom/tokenization\.py is code"):
        refuse_remote_code(tmp_path)
