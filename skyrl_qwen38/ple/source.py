"""Where the table's rows are: the shard tensors of a checkpoint, in a local folder or on the Hugging Face hub.

A released checkpoint cuts the table's N rows into tensors `….ngram_embedding.shard_{i}.weight`, shard i holding rows
[i*s, (i+1)*s); a checkpoint that was not cut has one `….ngram_embedding.weight`. An fp8 table has one
`….ngram_embedding.weight_scale` beside them: row = stored row * scale. Only the files that hold those tensors are
needed, and from the hub only those with the rows that are read. The index is data from elsewhere: what it names is
checked before a file is opened.
"""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from tqdm import tqdm

from skyrl_qwen38.ple.checkpoint_files import (
    INDEX_NAME,
    CheckpointFiles,
    TableSourceError,
    TensorPlace,
    open_checkpoint,
)

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
_SCALE = "ngram_embedding.weight_scale"
_DTYPES = MappingProxyType(
    {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
)
_PIECE_BYTES = 8 << 20  # read at a time by one thread, straight into place
_READERS = 4


@dataclass(frozen=True)
class _Shard:
    """Rows [start, stop) of the table: the whole of one tensor."""

    start: int
    stop: int
    file: str
    tensor: str


@dataclass(frozen=True)
class TablePart:
    """`rows` rows of the table from row `first` on: contiguous bytes of a file, from `offset` on."""

    first: int
    rows: int
    path: Path
    offset: int


class TableSource:
    """The table's rows in a checkpoint, read by row range. Make one with `open`.

    Attributes:
        num_rows: N, padding rows included.
        row_dim: D.
        dtype: of the rows, as the checkpoint has them.
        scale: what an fp8 row is multiplied by, else None.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        shards: tuple[_Shard, ...],
        dtype: torch.dtype,
        row_dim: int,
        scale: float | None,
        buffers: dict[str, Tensor] | None,
    ):
        self.num_rows = shards[-1].stop
        self.row_dim = row_dim
        self.dtype = dtype
        self.scale = scale
        self._files = files
        self._shards = shards
        self._buffers = buffers

    @classmethod
    def open(cls, path_or_hub_id: str | os.PathLike[str]) -> "TableSource":
        """Finds and checks the table in a checkpoint folder, or in a hub repository (`owner/name`).

        Reads headers and the small tensors beside the table, no row. With an index, only files that it names for the
        table are looked at; without one, every `*.safetensors` of the folder. Of a hub repository the headers of the
        first and the last shard are; the others are checked when their rows are fetched.

        Raises:
            TableSourceError: there is no table, or more than one; a file or a shard is missing, truncated or outside
                the folder; shards differ in dtype or width, or have wrong row counts; the dtype is not supported.
        """
        checkpoint = open_checkpoint(path_or_hub_id)
        index = checkpoint.index()
        where = checkpoint.name if index is None else f"{checkpoint.name}/{INDEX_NAME}"
        files = _scanned_files(checkpoint) if index is None else _indexed_files(index, where)
        module, names = _table_tensors(files, where)
        shards, dtype, row_dim = _checked_shards(checkpoint, files, names)
        scale = _read_scale(checkpoint, files, module, dtype)
        return cls(checkpoint, shards, dtype, row_dim, scale, _read_buffers(checkpoint, files, module))

    @property
    def row_bytes(self) -> int:
        return self.row_dim * self.dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) on the CPU, [stop - start, D] in the table's dtype (fp8 rows not yet multiplied).

        Raises:
            IndexError: the range is not within the table.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows [{start}, {stop}) are not within the table's {self.num_rows}")
        out = torch.empty(stop - start, self.row_dim, dtype=self.dtype)
        self.read_into(out, start)
        return out

    def read_into(self, out: Tensor, start: int, show_progress: bool = False) -> None:
        """Fills `out` ([rows, D], or [rows, row_bytes] of uint8) with the rows from `start` on.

        Reads no other byte of the checkpoint's files, with several threads, straight into place.

        Raises:
            TableSourceError: a file is missing, damaged, or cannot be fetched.
            OSError: reading fails.
        """
        memory = memoryview(out.detach().view(torch.uint8).numpy()).cast("B") if out.numel() else memoryview(b"")
        with (
            ThreadPoolExecutor(_READERS) as readers,
            tqdm(
                total=len(memory),
                unit="B",
                unit_scale=True,
                desc="n-gram table",
                disable=not show_progress,
                delay=3,
                mininterval=0.5 if sys.stderr.isatty() else 10,  # a log file gets a line now and then
            ) as progress,
        ):
            pieces, begin = [], 0
            for part in self.parts(start, start + len(out)):
                nbytes = part.rows * self.row_bytes
                for done in range(0, nbytes, _PIECE_BYTES):
                    piece = memory[begin + done : begin + min(done + _PIECE_BYTES, nbytes)]
                    pieces.append(readers.submit(_read_piece, part.path, part.offset + done, piece))
                begin += nbytes
            try:
                for piece in pieces:
                    progress.update(piece.result())
            except BaseException:
                readers.shutdown(cancel_futures=True)
                raise

    def parts(self, start: int, stop: int) -> Iterator[TablePart]:
        """The files' stretches that hold the rows [start, stop), in order; hub files are fetched on the way."""
        for shard in self._shards:
            first, last = max(start, shard.start), min(stop, shard.stop)
            if first < last:
                path = self._files.path(shard.file, shard.tensor)
                place = self._files.places(shard.file, [shard.tensor])[shard.tensor]
                if place.shape != (shard.stop - shard.start, self.row_dim) or _DTYPES.get(place.dtype) != self.dtype:
                    raise TableSourceError(
                        f"{path}: {shard.tensor} is {place.dtype} {list(place.shape)}, but the first and the "
                        f"last shard leave it {shard.stop - shard.start} rows of {self.row_dim} in {self.dtype}: fetch "
                        "it again"
                    )
                yield TablePart(first, last - first, path, place.start + (first - shard.start) * self.row_bytes)

    def buffers(self) -> dict[str, Tensor] | None:
        """The checkpoint's int64 `multipliers`, `head_sizes` and `head_offsets`, or None where it has none."""
        return self._buffers

    def identity(self) -> str:
        """Tells tables apart before their rows are read: of the hub the repository and commit, else a sample of rows.

        Equal on all ranks that read equal files, and the same in all processes of a node.
        """
        digest = hashlib.sha256(f"{self.num_rows} {self.row_dim} {self.dtype} {self.scale}".encode())
        if self._files.remote:
            digest.update(f"{self._files.name}@{self._files.revision}".encode())
        else:
            for number in sample_rows(self.num_rows):
                digest.update(self.read(number, number + 1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def sample_rows(num_rows: int) -> list[int]:
    """Up to 64 row numbers spread evenly over a table, the first and the last among them."""
    count = min(64, num_rows)
    return [i * (num_rows - 1) // max(count - 1, 1) for i in range(count)]


def _read_piece(path: Path, offset: int, into: memoryview) -> int:
    """Fills `into` from a file; its length."""
    done = 0
    with path.open("rb", buffering=0) as stream:
        while done < len(into):
            count = os.preadv(stream.fileno(), [into[done:]], offset + done)
            if count == 0:
                raise OSError(f"{path} ends at byte {offset + done}, while it is read: fetch it again")
            done += count
    return done


def _indexed_files(index: str, where: str) -> dict[str, str]:
    """Tensor → file of the tensors that the table needs, from an index that is not trusted."""
    try:
        weight_map = json.loads(index)["weight_map"]
        wanted = {tensor: file for tensor, file in weight_map.items() if _concerns_table(tensor)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableSourceError(f"{where} is not a safetensors index with a weight_map ({error!r})") from error
    for tensor, file in wanted.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise TableSourceError(
                f"{where} places {tensor} in {file!r}: it must be the plain name of a .safetensors file in that folder"
            )
    return wanted


def _scanned_files(checkpoint: CheckpointFiles) -> dict[str, str]:
    """Tensor → file of the tensors that the table needs, from the headers of all safetensors files."""
    files: dict[str, str] = {}
    for file in checkpoint.names():
        for tensor in filter(_concerns_table, checkpoint.header(file)):
            if tensor in files:
                raise TableSourceError(
                    f"{checkpoint.name} holds {tensor} twice, in {files[tensor]} and {file}: remove one"
                )
            files[tensor] = file
    return files


def _concerns_table(tensor: str) -> bool:
    return "ple.ple_embedding." in tensor


def _table_tensors(files: Iterable[str], where: str) -> tuple[str, list[str]]:
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
    return module, [names[number] for number in numbers]


def _checked_shards(
    checkpoint: CheckpointFiles, files: Mapping[str, str], names: list[str]
) -> tuple[tuple[_Shard, ...], torch.dtype, int]:
    """Every shard with its row range, after comparing the headers of all of them (on the hub: of the two ends)."""
    looked_at = [names[0], names[-1]] if checkpoint.remote else names
    places: dict[str, TensorPlace] = {}
    for file in dict.fromkeys(files[name] for name in looked_at):
        places |= checkpoint.places(file, [name for name in dict.fromkeys(looked_at) if files[name] == file])
    first = places[names[0]]
    shards: list[_Shard] = []
    for name in names:
        place = places.get(name, first)
        where = f"{checkpoint.name}/{files[name]}: {name}"
        if place.dtype not in _DTYPES:
            raise TableSourceError(
                f"{where} has the dtype {place.dtype}, but a table is one of {', '.join(_DTYPES)}: convert it"
            )
        if len(place.shape) != 2 or min(place.shape) < 1:
            raise TableSourceError(
                f"{where} has the shape {list(place.shape)}, but a table is [rows, width], neither of them 0"
            )
        if place.dtype != first.dtype or place.shape[1] != first.shape[1]:
            raise TableSourceError(
                f"{where} is {place.dtype} with width {place.shape[1]}, but {names[0]} is {first.dtype} with width "
                f"{first.shape[1]}: all shards must agree"
            )
        rows, most = place.shape[0], first.shape[0]
        if rows > most or (rows < most and name != names[-1]):
            raise TableSourceError(
                f"{where} has {rows} rows, but {names[0]} has {most}: only the last shard may have fewer"
            )
        start = shards[-1].stop if shards else 0
        shards.append(_Shard(start, start + rows, files[name], name))
    return tuple(shards), _DTYPES[first.dtype], first.shape[1]


def _read_scale(checkpoint: CheckpointFiles, files: Mapping[str, str], module: str, dtype: torch.dtype) -> float | None:
    """The factor of an fp8 table's rows."""
    name = module + _SCALE
    if dtype != torch.float8_e4m3fn:
        if name in files:
            raise TableSourceError(
                f"{checkpoint.name} holds {name} beside a table in {dtype}, which needs none: remove the tensor, or "
                "fetch the fp8 shards it belongs to"
            )
        return None
    if name not in files:
        raise TableSourceError(f"{checkpoint.name} holds an fp8 table without its scale, {name}: fetch it again")
    where = f"{checkpoint.name}/{files[name]}: {name}"
    scale = _small_tensor(checkpoint, files[name], name, {"F32": torch.float32, "BF16": torch.bfloat16})
    if scale.numel() != 1 or not 0 < scale.item() < math.inf:
        raise TableSourceError(f"{where} is {scale.tolist()}, but the scale of a table is one positive number")
    return scale.item()


def _read_buffers(checkpoint: CheckpointFiles, files: Mapping[str, str], module: str) -> dict[str, Tensor] | None:
    """The hash buffers beside the table. A folder with the table's files alone has none, and needs none."""
    names = {argument: module + tensor for argument, tensor in _BUFFERS.items()}
    present = [name for name in names.values() if name in files and checkpoint.has(files[name])]
    if not present:
        return None
    if missing := sorted(set(names.values()) - set(present)):
        raise TableSourceError(
            f"{checkpoint.name} holds {present[0]} but not {missing[0]}: the three hash buffers go together"
        )
    return {
        argument: _small_tensor(checkpoint, files[name], name, {"I64": torch.int64}) for argument, name in names.items()
    }


def _small_tensor(
    checkpoint: CheckpointFiles, file: str, name: str, dtypes: Mapping[str, torch.dtype], most_bytes: int = 1 << 16
) -> Tensor:
    """A tensor beside the table, read by its byte range; it must have one of the dtypes."""
    place = checkpoint.places(file, [name])[name]
    where = f"{checkpoint.name}/{file}: {name}"
    if place.dtype not in dtypes:
        raise TableSourceError(f"{where} has the dtype {place.dtype}, but it must be {' or '.join(dtypes)}")
    if place.stop - place.start > most_bytes:
        raise TableSourceError(f"{where} has {place.stop - place.start} bytes, which is absurd: fetch it again")
    data = bytearray(checkpoint.read(file, place.start, place.stop))
    return torch.frombuffer(data, dtype=dtypes[place.dtype]).view(place.shape)
