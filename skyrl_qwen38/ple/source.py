"""Where the table's rows are: the shard tensors of a checkpoint, in a local folder or on the Hugging Face hub.

A released checkpoint cuts the table's N rows into tensors `….ngram_embedding.shard_{i}.weight`, shard i holding rows
[i*s, (i+1)*s); a checkpoint that was not cut has one `….ngram_embedding.weight`. Only the files that hold those
tensors are needed. The index is data from elsewhere: what it names is checked before a file is opened.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
_TABLE_TENSOR = re.compile(
    r"(?P<module>(?:.*\.)?ple\.ple_embedding\.)ngram_embedding\.(?:shard_(?P<shard>\d+)\.)?weight"
)
_BUFFERS = MappingProxyType(  # argument of NgramHasher.check_buffers → tensor beside the table
    {
        "multipliers": "layer_multipliers",
        "head_sizes": "ngram_heads_vocab_sizes",
        "head_offsets": "ngram_heads_offsets",
    }
)
_DTYPES = MappingProxyType({"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class TableSourceError(ValueError):
    """A checkpoint whose table cannot be read; the sentence names the file and the tensor."""


@dataclass(frozen=True)
class _Shard:
    """Rows [start, stop) of the table: the whole of one tensor."""

    start: int
    stop: int
    path: Path
    tensor: str


class TableSource:
    """The table's rows in a checkpoint, read by row range. Make one with `open`.

    Attributes:
        num_rows: N, padding rows included.
        row_dim: D.
        dtype: of the rows, as the checkpoint has them.
    """

    def __init__(self, shards: tuple[_Shard, ...], dtype: torch.dtype, row_dim: int, buffers: dict[str, Tensor] | None):
        self.num_rows = shards[-1].stop
        self.row_dim = row_dim
        self.dtype = dtype
        self._shards = shards
        self._buffers = buffers

    @classmethod
    def open(cls, path_or_hub_id: str | os.PathLike[str]) -> "TableSource":
        """Finds and checks the table in a checkpoint folder, or in a hub repository (`owner/name`).

        Reads file headers only, no row. With an index, only the files that hold the table and its buffers are
        opened (and, from the hub, downloaded); without one, every `*.safetensors` of the folder is looked at.

        Raises:
            TableSourceError: there is no table, or more than one; a file or a shard is missing, truncated or outside
                the folder; shards differ in dtype or width, or have wrong row counts; the dtype is not supported.
        """
        folder = Path(path_or_hub_id)
        if not folder.is_dir():
            if not _HUB_ID.fullmatch(str(path_or_hub_id)):
                raise TableSourceError(f"{path_or_hub_id} is neither a checkpoint folder nor a hub id (owner/name)")
            folder = _download(str(path_or_hub_id))
        index = folder / INDEX_NAME
        files = _indexed_files(index) if index.exists() else _scanned_files(folder)
        module, names = _table_tensors(files, index if index.exists() else folder)
        shards, dtype, row_dim = _checked_shards(folder, files, names)
        return cls(shards, dtype, row_dim, _read_buffers(folder, files, module))

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) on the CPU, [stop - start, D] in the table's dtype.

        Raises:
            IndexError: the range is not within the table.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows [{start}, {stop}) are not within the table's {self.num_rows}")
        out = torch.empty(stop - start, self.row_dim, dtype=self.dtype)
        self.read_into(out, start)
        return out

    def read_into(self, out: Tensor, start: int) -> None:
        """Fills `out` [rows, D] with the rows from `start` on, reading no other byte of the checkpoint."""
        stop = start + len(out)
        for shard in self._shards:
            first, last = max(start, shard.start), min(stop, shard.stop)
            if first < last:
                with safe_open(shard.path, framework="pt") as file:
                    rows = file.get_slice(shard.tensor)[first - shard.start : last - shard.start]
                    out[first - start : last - start].copy_(rows)

    def buffers(self) -> dict[str, Tensor] | None:
        """The checkpoint's int64 `multipliers`, `head_sizes` and `head_offsets`, or None where it has none."""
        return self._buffers

    def sample(self) -> Tensor:
        """Up to 64 rows spread evenly over the table, the first and the last among them: tells tables apart."""
        count = min(64, self.num_rows)
        numbers = [i * (self.num_rows - 1) // max(count - 1, 1) for i in range(count)]
        return torch.cat([self.read(number, number + 1) for number in numbers])


def _indexed_files(index: Path) -> dict[str, str]:
    """Tensor → file of the tensors that the table needs, from an index that is not trusted."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wanted = {tensor: file for tensor, file in weight_map.items() if _concerns_table(tensor)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableSourceError(f"{index} is not a safetensors index with a weight_map ({error!r})") from error
    for tensor, file in wanted.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise TableSourceError(
                f"{index} places {tensor} in {file!r}: it must be the plain name of a .safetensors file in that folder"
            )
    return wanted


def _scanned_files(folder: Path) -> dict[str, str]:
    """Tensor → file of the tensors that the table needs, from the headers of all safetensors files."""
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for tensor in filter(_concerns_table, _header_names(folder, path.name)):
            if tensor in files:
                raise TableSourceError(f"{folder} holds {tensor} twice, in {files[tensor]} and {path.name}: remove one")
            files[tensor] = path.name
    return files


def _concerns_table(tensor: str) -> bool:
    return "ple.ple_embedding." in tensor


def _table_tensors(files: Iterable[str], where: Path) -> tuple[str, list[str]]:
    """The name of the module that holds the table, and the table's tensors in row order."""
    found = [match for match in map(_TABLE_TENSOR.fullmatch, files) if match]
    modules = sorted({match["module"] for match in found})
    if not modules:
        raise TableSourceError(f"{where} holds no tensor ….ple.ple_embedding.ngram_embedding.shard_0.weight")
    if len(modules) > 1:
        raise TableSourceError(f"{where} holds {len(modules)} n-gram tables ({', '.join(modules)}): one is supported")
    names = {-1 if match["shard"] is None else int(match["shard"]): match.string for match in found}
    module, numbers = modules[0], sorted(names)
    if len(names) < len(found):
        raise TableSourceError(f"{where} names one shard of {module}ngram_embedding in two ways: remove one of them")
    if numbers[0] == -1 and len(numbers) > 1:
        raise TableSourceError(f"{where} holds {names[-1]} both whole and in shards: remove one of them")
    absent = next((i for i, number in enumerate(numbers) if number not in (i, -1)), None)
    if absent is not None:
        raise TableSourceError(
            f"{where} lacks {module}ngram_embedding.shard_{absent}.weight, though it has shard {numbers[-1]}"
        )
    if f"{module}ngram_embedding.weight_scale" in files:
        raise TableSourceError(
            f"{where} holds {module}ngram_embedding.weight_scale: an fp8 table is not supported yet, use the bf16 one"
        )
    return module, [names[number] for number in numbers]


def _checked_shards(
    folder: Path, files: Mapping[str, str], names: list[str]
) -> tuple[tuple[_Shard, ...], torch.dtype, int]:
    """Every shard with its row range, after comparing the headers of all of them."""
    headers: dict[str, tuple[str, list[int]]] = {}
    for file in dict.fromkeys(files[name] for name in names):
        headers |= _tensor_headers(folder, file, [name for name in names if files[name] == file])
    first_dtype, first_shape = headers[names[0]]
    shards: list[_Shard] = []
    for name in names:
        dtype, shape = headers[name]
        where = f"{folder / files[name]}: {name}"
        if dtype not in _DTYPES:
            hint = "an fp8 table is not supported yet, use the bf16 one" if dtype.startswith("F8") else "use bf16"
            raise TableSourceError(f"{where} has the dtype {dtype}: {hint}")
        if len(shape) != 2 or min(shape) < 1:
            raise TableSourceError(f"{where} has the shape {shape}, but a table is [rows, width], neither of them 0")
        if dtype != first_dtype or shape[1] != first_shape[1]:
            raise TableSourceError(
                f"{where} is {dtype} with width {shape[1]}, but {names[0]} is {first_dtype} with width "
                f"{first_shape[1]}: all shards must agree"
            )
        if shape[0] > first_shape[0] or (shape[0] < first_shape[0] and name != names[-1]):
            raise TableSourceError(
                f"{where} has {shape[0]} rows, but {names[0]} has {first_shape[0]}: only the last shard may have fewer"
            )
        start = shards[-1].stop if shards else 0
        shards.append(_Shard(start, start + shape[0], folder / files[name], name))
    return tuple(shards), _DTYPES[first_dtype], first_shape[1]


def _read_buffers(folder: Path, files: Mapping[str, str], module: str) -> dict[str, Tensor] | None:
    """The hash buffers beside the table. A folder with the table's files alone has none, and needs none."""
    names = {argument: module + tensor for argument, tensor in _BUFFERS.items()}
    present = [name for name in names.values() if name in files and (folder / files[name]).exists()]
    if not present:
        return None
    if missing := sorted(set(names.values()) - set(present)):
        raise TableSourceError(f"{folder} holds {present[0]} but not {missing[0]}: the three hash buffers go together")
    buffers = {}
    for argument, name in names.items():
        dtype, _ = _tensor_headers(folder, files[name], [name])[name]
        if dtype != "I64":
            raise TableSourceError(f"{folder / files[name]}: {name} has the dtype {dtype}, but hash buffers are I64")
        with safe_open(folder / files[name], framework="pt") as file:
            buffers[argument] = file.get_tensor(name)
    return buffers


def _header_names(folder: Path, file: str) -> list[str]:
    path = _inside(folder, file)
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise TableSourceError(f"{path} is not a readable safetensors file ({error}): fetch it again") from error


def _tensor_headers(folder: Path, file: str, names: list[str]) -> dict[str, tuple[str, list[int]]]:
    """Safetensors dtype and shape of each named tensor; the library checks the header against the file's length."""
    path = _inside(folder, file, names[0])
    if not path.is_file():
        raise TableSourceError(f"{path} is missing, and with it {names[0]}: fetch it again")
    headers = {}
    try:
        with safe_open(path, framework="pt") as opened:
            held = set(opened.keys())
            for name in names:
                if name not in held:
                    raise TableSourceError(f"{path} does not hold {name}, where the index places it: fetch both again")
                view = opened.get_slice(name)
                headers[name] = (view.get_dtype(), list(view.get_shape()))
    except (SafetensorError, OSError) as error:
        raise TableSourceError(f"{path} cannot be read for {names[0]} ({error}): fetch it again") from error
    return headers


def _inside(folder: Path, file: str, tensor: str | None = None) -> Path:
    """The path of a file of the checkpoint, whose links stay in its folder (or in the hub cache's blobs beside it)."""
    root, target = folder.resolve(), (folder / file).resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if target.parent not in allowed:
        subject = f"{tensor} is placed in {file}, which" if tensor else file
        raise TableSourceError(f"{folder}: {subject} is a link to {target}, outside the checkpoint: put the file there")
    return folder / file


def _download(repo_id: str) -> Path:
    """The hub cache's folder of a repository, with the index and the files that the table needs, of one revision."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        try:
            first = Path(hf_hub_download(repo_id, INDEX_NAME))
        except EntryNotFoundError:  # a checkpoint of one file has no index
            return Path(hf_hub_download(repo_id, "model.safetensors")).parent
        for file in sorted(set(_indexed_files(first).values())):
            hf_hub_download(repo_id, file, revision=first.parent.name)
    except (HfHubHTTPError, OSError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise TableSourceError(f"the table of {repo_id} cannot be fetched from the hub ({cause})") from error
    return first.parent
