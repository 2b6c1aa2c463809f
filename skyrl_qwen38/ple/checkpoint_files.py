"""The safetensors files of a checkpoint, in a folder or on the Hugging Face hub, read by header and by byte range.

A safetensors file is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, and
the tensors' bytes; offsets count from the end of the header. Of a hub repository only what is asked for is fetched:
headers and small tensors by HTTP range requests, whole files once a node (huggingface_hub locks them).
"""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff
from safetensors import SafetensorError, safe_open

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound
_FIRST_BYTES = 100_000  # holds most headers, so that one request suffices


class TableSourceError(ValueError):
    """A checkpoint whose table cannot be read; the sentence names the file and the tensor."""


@dataclass(frozen=True)
class TensorPlace:
    """Bytes [start, stop) of a file, with the dtype in safetensors' spelling."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class CheckpointFiles(ABC):
    """The files of one checkpoint. Names are plain file names; the index vouches for nothing beyond that.

    Attributes:
        name: what a message calls the checkpoint.
        revision: the commit of a hub repository, "" of a folder.
        remote: a file may have to be fetched.
    """

    name: str
    revision: str = ""
    remote: bool = False

    @abstractmethod
    def index(self) -> str | None:
        """The text of the index, or None where there is none."""

    @abstractmethod
    def names(self) -> list[str]:
        """The safetensors files of a checkpoint without an index."""

    @abstractmethod
    def has(self, file: str) -> bool:
        """Whether the file is there, or can be fetched."""

    @abstractmethod
    def path(self, file: str, tensor: str | None = None) -> Path:
        """The file on this machine, fetched if need be; `tensor` is what it is needed for.

        Raises:
            TableSourceError: it is missing, damaged or outside the checkpoint.
        """

    @abstractmethod
    def header(self, file: str, tensor: str) -> dict[str, TensorPlace]:
        """Where the tensors of a file lie; `tensor` is what it is needed for.

        Raises:
            TableSourceError: as `path`.
        """

    @abstractmethod
    def read(self, file: str, start: int, stop: int) -> bytes:
        """A few bytes of a file."""

    def places(self, file: str, tensors: Iterable[str]) -> dict[str, TensorPlace]:
        """Where these tensors lie.

        Raises:
            TableSourceError: as `header`, or the file does not hold one of them.
        """
        wanted = list(tensors)
        held = self.header(file, wanted[0])
        for tensor in wanted:
            if tensor not in held:
                raise TableSourceError(
                    f"{self.name}/{file} does not hold {tensor}, where the index places it: fetch both again"
                )
        return {tensor: held[tensor] for tensor in wanted}


class LocalFiles(CheckpointFiles):
    """A checkpoint folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = str(folder)
        self._headers: dict[str, dict[str, TensorPlace]] = {}

    def index(self) -> str | None:
        path = self.folder / INDEX_NAME
        return path.read_text(encoding="utf-8") if path.exists() else None

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.safetensors"))

    def has(self, file: str) -> bool:
        return (self.folder / file).exists()

    def path(self, file: str, tensor: str | None = None) -> Path:
        path = self._inside(file, tensor)
        if not path.is_file():
            raise TableSourceError(f"{path} is missing{f', and with it {tensor}' if tensor else ''}: fetch it again")
        return path

    def header(self, file: str, tensor: str | None = None) -> dict[str, TensorPlace]:
        if file not in self._headers:
            path = self.path(file, tensor)
            try:
                # The library compares the header with the file's length, and tensors with each other.
                with safe_open(path, framework="pt"), path.open("rb") as stream:
                    length = int.from_bytes(stream.read(8), "little")
                    self._headers[file] = _parse_header(stream.read(length), 8 + length)
            except (SafetensorError, OSError, ValueError) as error:
                what = f"cannot be read for {tensor}" if tensor else "is not a readable safetensors file"
                raise TableSourceError(f"{path} {what} ({error}): fetch it again") from error
        return self._headers[file]

    def read(self, file: str, start: int, stop: int) -> bytes:
        with self.path(file).open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)

    def _inside(self, file: str, tensor: str | None) -> Path:
        """The path of a file whose links stay in the folder (or in the hub cache's blobs beside it)."""
        root, target = self.folder.resolve(), (self.folder / file).resolve()
        allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
        if target.parent not in allowed:
            subject = f"{tensor} is placed in {file}, which" if tensor else file
            raise TableSourceError(
                f"{self.folder}: {subject} is a link to {target}, outside the checkpoint: put the file there"
            )
        return self.folder / file


class HubFiles(CheckpointFiles):
    """A repository of the Hugging Face hub (`HF_ENDPOINT`), at the commit that its main branch has when opened."""

    remote = True

    def __init__(self, repo_id: str):
        self.name = repo_id
        self._headers: dict[str, dict[str, TensorPlace]] = {}
        try:
            first = Path(self._fetch(INDEX_NAME))
        except RemoteEntryNotFoundError:  # a checkpoint of one file has no index
            first = Path(self._fetch(SINGLE_NAME))
        self.revision = first.parent.name
        self._local = LocalFiles(first.parent)

    def index(self) -> str | None:
        return self._local.index()

    def names(self) -> list[str]:
        return [SINGLE_NAME]

    def has(self, file: str) -> bool:
        return True

    def path(self, file: str, tensor: str | None = None) -> Path:
        if not self._local.has(file):
            self._fetch(file)
        return self._local.path(file, tensor)

    def header(self, file: str, tensor: str | None = None) -> dict[str, TensorPlace]:
        if self._is_cached(file):
            return self._local.header(file, tensor)
        if file not in self._headers:
            first, size = self._range(file, 0, _FIRST_BYTES)
            length = int.from_bytes(first[:8], "little")
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise TableSourceError(f"{self.name}/{file} is truncated or no safetensors file: tell its owner")
            text = first[8 : 8 + length]
            if len(text) < length:
                text = self._range(file, 8, 8 + length)[0]
            try:
                self._headers[file] = _parse_header(text, 8 + length)
            except ValueError as error:
                raise TableSourceError(f"{self.name}/{file} has no valid header ({error}): tell its owner") from error
        return self._headers[file]

    def read(self, file: str, start: int, stop: int) -> bytes:
        return self._local.read(file, start, stop) if self._is_cached(file) else self._range(file, start, stop)[0]

    def _is_cached(self, file: str) -> bool:
        return isinstance(try_to_load_from_cache(self.name, file, revision=self.revision), str)

    def _fetch(self, file: str) -> str:
        try:
            return hf_hub_download(self.name, file, revision=self.revision or None)
        except RemoteEntryNotFoundError:
            if self.revision or file != INDEX_NAME:
                raise TableSourceError(f"{self.name} has no file {file}: name another checkpoint") from None
            raise
        except (httpx.HTTPError, HfHubHTTPError, OSError) as error:
            raise self._unreachable(file, error) from error

    def _range(self, file: str, start: int, stop: int) -> tuple[bytes, int]:
        """Bytes [start, stop) as far as the file has them, and the size of the file."""
        headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        try:
            response = http_backoff("GET", hf_hub_url(self.name, file, revision=self.revision), headers=headers)
            hf_raise_for_status(response)
            size = int(response.headers["Content-Range"].rpartition("/")[2])
        except (httpx.HTTPError, HfHubHTTPError, OSError, KeyError, ValueError) as error:
            raise self._unreachable(file, error) from error
        return response.content, size

    def _unreachable(self, file: str, error: Exception) -> TableSourceError:
        cause = str(error).strip().partition("\n")[0]
        return TableSourceError(f"{file} of {self.name}'s table cannot be fetched from the hub ({cause})")


def open_checkpoint(path_or_hub_id: str | os.PathLike[str]) -> CheckpointFiles:
    """The files of a folder, or of a hub repository `owner/name`.

    Raises:
        TableSourceError: it is neither, or the hub cannot be reached.
    """
    if Path(path_or_hub_id).is_dir():
        return LocalFiles(Path(path_or_hub_id))
    if not _HUB_ID.fullmatch(str(path_or_hub_id)):
        raise TableSourceError(f"{path_or_hub_id} is neither a checkpoint folder nor a hub id (owner/name)")
    return HubFiles(str(path_or_hub_id))


def _parse_header(text: bytes, data_start: int) -> dict[str, TensorPlace]:
    """The tensors of a header.

    Raises:
        ValueError: it is not one.
    """
    places = {}
    try:
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                places[name] = TensorPlace(
                    str(entry["dtype"]),
                    tuple(map(int, entry["shape"])),
                    data_start + int(start),
                    data_start + int(stop),
                )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a safetensors header: {error!r}") from error
    return places
