"""What a safetensors checkpoint holds, read as untrusted data and without loading a tensor.

A safetensors file is an 8-byte little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``,
and the tensors' bytes; offsets count from the end of the header. ``model.safetensors.index.json`` maps names to
files. Nothing in either is believed before it is checked against the folder and the files' sizes.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The safetensors format's own bound on a header; also kept for the index.
MAX_JSON_BYTES = 100_000_000
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and the tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor's bytes are: ``[start, stop)`` of ``file``, in safetensors' spelling of the dtype."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class CheckpointIndex(Mapping[str, TensorEntry]):
    """Tensor names of a checkpoint folder and where each one lies."""

    def __init__(self, folder: Path, entries: dict[str, TensorEntry]) -> None:
        self.folder = folder
        self._entries = entries

    @classmethod
    def open(cls, path: str | Path) -> "CheckpointIndex":
        """Reads the index and every file's header.

        Raises:
            CheckpointError: no checkpoint there; a file absent, truncated or outside the folder; a tensor absent
                from its file, or with bytes that overlap another's, leave the file, or do not fit dtype and shape.
        """
        folder = Path(path)
        if not (folder / INDEX_NAME).is_file():
            if not (folder / SINGLE_NAME).is_file():
                raise CheckpointError(f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}; name a checkpoint")
            return cls(folder, read_header(folder / SINGLE_NAME))

        weight_map = _read_weight_map(folder / INDEX_NAME)
        headers = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
        entries = {}
        for name, file in weight_map.items():
            if name not in headers[file]:
                raise CheckpointError(f"{folder / file} lacks tensor {name!r}, which {INDEX_NAME} places there")
            entries[name] = headers[file][name]
        return cls(folder, entries)

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, checked against its size.

    Raises:
        CheckpointError: the file is absent or truncated, or its header is malformed.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is absent; download the checkpoint again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            raise CheckpointError(f"{file} is truncated or no safetensors file: {size} bytes, header of {length}")
        header = _parse_json(file, stream.read(length))
    header.pop("__metadata__", None)

    data = 8 + length
    entries = {name: _read_entry(file, name, value, data, size) for name, value in header.items()}
    stop, previous = data, None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < stop:
            raise CheckpointError(f"{file}: bytes of {name!r} overlap those of {previous!r}; the file is damaged")
        stop, previous = entry.stop, name
    return entries


def refuse_remote_code(path: str | Path) -> None:
    """Refuses a checkpoint folder that brings code, for the sake of libraries that would run it.

    Raises:
        CheckpointError: the folder is absent, holds a ``*.py`` file, or one of its ``*config.json`` files has an
            ``auto_map``.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; name a local checkpoint folder")
    for file in sorted(folder.rglob("*.py")):
        raise CheckpointError(f"{file} is code in a checkpoint, and none is run; remove it if you trust the rest")
    for file in sorted(folder.glob("*config.json")):
        if _has_key(_parse_json(file, file.read_bytes()), "auto_map"):
            raise CheckpointError(f"{file} has auto_map, which asks to run code of the checkpoint; remove the key")


def _read_weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{index} is larger than {MAX_JSON_BYTES} bytes; it is no checkpoint index")
    weight_map = _parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map object; download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(f"{index} places tensor {name!r} in {file!r}, which is no file name in this folder")
    return weight_map


def _is_plain_name(name: str) -> bool:
    """Whether ``name`` stays in its folder on any system: one component, neither ``..`` nor a drive."""
    plain = name not in ("", ".", "..") and "\0" not in name
    return plain and PurePosixPath(name).name == name and PureWindowsPath(name).name == name


def _read_entry(file: Path, name: str, value: object, data: int, size: int) -> TensorEntry:
    def fault(what: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor {name!r} {what}; the file is damaged")

    if not isinstance(value, dict):
        raise fault("has no description")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise fault(f"has the unknown dtype {dtype!r}")
    if not _is_counts(shape):
        raise fault(f"has the shape {shape!r}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault(f"has the offsets {offsets!r}")
    start, stop = data + offsets[0], data + offsets[1]
    if stop > size:
        raise fault(f"ends at byte {stop} of a file of {size} bytes")
    wanted = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != wanted:
        raise fault(f"has {stop - start} bytes where {dtype} {shape} needs {wanted}")
    return TensorEntry(file, dtype, tuple(shape), start, stop)


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(count) is int and count >= 0 for count in value)


def _parse_json(file: Path, text: bytes) -> dict:
    def unique(pairs: list[tuple[str, object]]) -> dict:
        seen = dict(pairs)
        if len(seen) != len(pairs):
            raise ValueError("a key occurs twice")
        return seen

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is JSON but no object; download it again")
    return value


def _has_key(value: object, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_has_key(item, key) for item in value.values())
    return isinstance(value, list) and any(_has_key(item, key) for item in value)
