"""Where a rank's rows live: in memory of its own, in the checkpoint's files, or in one copy of the node.

A store holds rows [start, stop) of a table as bytes and gathers them by local number. It is never a parameter: the
rows are frozen, so they are in no optimizer, checkpoint or weight sync.
"""

import socket
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_qwen38.ple.agreement import gather_objects
from skyrl_qwen38.ple.node_memory import shared_memory
from skyrl_qwen38.ple.source import TableSource

Storage = Literal["auto", "pinned", "mapped", "node"]
_GIB = 1 << 30
_USABLE = 0.8  # of a node's free memory; the optimizer's host buffers, Ray and the page cache need some too


class RowStore(ABC):
    """Rows [start, stop) of a table, uint8 [stop - start, row bytes]."""

    rows: int
    row_bytes: int

    def gather(self, local_rows: Tensor, out: Tensor) -> None:
        """Fills `out` (uint8 [R, row bytes], on the device of `local_rows`) with the rows of these local numbers.

        Args:
            local_rows: integers [R], counted from the first row held.
        """
        if local_rows.is_cuda:
            numbers = local_rows.cpu()
            staging = torch.empty(out.shape, dtype=torch.uint8, pin_memory=True)
            self._gather(numbers, staging)
            out.copy_(staging, non_blocking=True)
        else:
            self._gather(local_rows, out)

    @abstractmethod
    def _gather(self, local_rows: Tensor, out: Tensor) -> None:
        """`gather` on the CPU."""


class HostRows(RowStore):
    """Rows in host memory of exactly their size, page-locked where there is a CUDA device.

    Processes of one node that hold the same rows share them: the second loads nothing.

    Attributes:
        shared: another process had loaded them.
    """

    def __init__(self, source: TableSource, start: int, stop: int, show_progress: bool = False):
        self.rows, self.row_bytes = stop - start, source.row_bytes

        def fill(memory: Tensor) -> None:
            source.read_into(memory.view(-1, self.row_bytes), start, show_progress=show_progress)

        identity = f"{source.identity()} rows {start}:{stop}"
        memory, self.shared = shared_memory(identity, self.rows * self.row_bytes, fill)
        self._rows = memory.view(-1, self.row_bytes)
        self._on_device: Tensor | None = None
        if torch.cuda.is_available() and self.rows:
            self._on_device = _map_to_device(self._rows)
            weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self._rows.data_ptr()).atexit = False

    def gather(self, local_rows: Tensor, out: Tensor) -> None:
        if local_rows.is_cuda and self._on_device is not None:
            # The GPU reads page-locked memory over the bus: neither ids nor rows pass through the host's hands, and
            # the host does not wait.
            torch.index_select(self._on_device, 0, local_rows, out=out)
        else:
            super().gather(local_rows, out)

    def _gather(self, local_rows: Tensor, out: Tensor) -> None:
        torch.index_select(self._rows, 0, local_rows, out=out)


class MappedRows(RowStore):
    """Rows left in the checkpoint's own files, mapped read-only: nothing is read before it is asked for.

    The node's page cache holds what was read, once for all ranks.
    """

    def __init__(self, source: TableSource, start: int, stop: int):
        self.rows, self.row_bytes = stop - start, source.row_bytes
        self._parts: list[tuple[int, int, Tensor]] = []  # first and last local row + 1, and their bytes
        files: dict[Path, Tensor] = {}
        for part in source.parts(start, stop):
            if part.path not in files:
                size = part.path.stat().st_size
                files[part.path] = torch.from_file(str(part.path), shared=False, size=size, dtype=torch.uint8)
            nbytes = part.rows * self.row_bytes
            rows = files[part.path][part.offset : part.offset + nbytes].view(part.rows, self.row_bytes)
            self._parts.append((part.first - start, part.first - start + part.rows, rows))

    def _gather(self, local_rows: Tensor, out: Tensor) -> None:
        if len(self._parts) == 1:
            torch.index_select(self._parts[0][2], 0, local_rows, out=out)
            return
        for first, last, rows in self._parts:
            here = ((local_rows >= first) & (local_rows < last)).nonzero().squeeze(-1)
            if len(here):
                out.index_copy_(0, here, rows.index_select(0, local_rows.index_select(0, here) - first))


@dataclass(frozen=True)
class StorageChoice:
    """What all ranks use, and why, in one line."""

    storage: Storage
    why: str


def choose_storage(
    storage: Storage, source: TableSource, own_rows: int, group: dist.ProcessGroup | None
) -> StorageChoice:
    """Settles `auto`, and refuses a node copy that does not fit. Collective over the group.

    Raises:
        ValueError: `storage` is none of the four, or "node" and a node has too little memory; on all ranks alike.
    """
    if storage not in get_args(Storage):
        raise ValueError(f"the table's storage must be one of {', '.join(get_args(Storage))}, got {storage!r}")
    if storage in ("pinned", "mapped"):
        return StorageChoice(storage, "as set")
    here = (socket.gethostname(), own_rows * source.row_bytes, _free_memory())
    nodes: dict[str, list[tuple[str, int, int]]] = {}
    for rank in gather_objects(group, here):
        nodes.setdefault(rank[0], []).append(rank)
    whole = source.num_rows * source.row_bytes
    # The node with the least to spare decides for all.
    tightest, wanted, free = "", 0, 0
    for name, ranks in nodes.items():
        needs = whole if storage == "node" else sum(nbytes for _, nbytes, _ in ranks)
        has = int(min(free for *_, free in ranks) * _USABLE)
        if not tightest or has - needs < free - wanted:
            tightest, wanted, free = name, needs, has
    found = f"{wanted / _GIB:.1f} GiB of rows, {free / _GIB:.1f} GiB usable on node {tightest}"
    if storage == "auto":
        return StorageChoice("pinned", found) if wanted <= free else StorageChoice("mapped", f"{found}: too little")
    if wanted > free:
        raise ValueError(f"the table's storage 'node' does not fit ({found}): set it to 'pinned', 'mapped' or 'auto'")
    return StorageChoice("node", found)


def open_rows(storage: Storage, source: TableSource, start: int, stop: int, show_progress: bool) -> RowStore:
    """The store of rows [start, stop), for a settled choice."""
    if storage == "mapped":
        return MappedRows(source, start, stop)
    return HostRows(source, start, stop, show_progress)


def _free_memory() -> int:
    """Bytes that this node, or the control group that bounds this process, has left."""
    free = psutil.virtual_memory().available
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no control group of that kind, or "max"
            continue
    return max(free, 0)


def _map_to_device(rows: Tensor) -> Tensor:
    """Page-locks host memory, and returns it as a tensor of the current CUDA device on the same bytes.

    Raises:
        RuntimeError: the memory cannot be locked.
    """
    error = torch.cuda.cudart().cudaHostRegister(rows.data_ptr(), rows.numel(), 0)
    if int(error) != 0:
        raise RuntimeError(
            f"{rows.numel() / _GIB:.1f} GiB of the n-gram table cannot be page-locked (CUDA error {int(error)}): raise "
            "`ulimit -l`, or set the table's storage to 'mapped'"
        )

    class _Mapped:
        __cuda_array_interface__ = {  # noqa: RUF012 (a protocol's attribute)
            "shape": tuple(rows.shape),
            "typestr": "|u1",
            "data": (rows.data_ptr(), False),
            "version": 3,
        }
        keeps = rows

    return torch.as_tensor(_Mapped(), device="cuda")
