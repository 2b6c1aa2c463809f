"""Memory that the processes of one user on one node share: filled by the first, attached by the others.

A policy and its reference model are processes of their own on the same ranks, and hold the same frozen rows. The
memory is a memfd, which has no name in a file system: the kernel frees it with its last holder, however that ends, so
nothing is left behind. A small file says which process holds what; the others reach it through /proc.
"""

import ctypes
import hashlib
import json
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

_LOG = logging.getLogger(__name__)


def shared_memory(identity: str, nbytes: int, fill: Callable[[Tensor], None]) -> tuple[Tensor, bool]:
    """uint8 [nbytes] that all of this user's processes on this node with the same identity share, read-only by custom.

    Args:
        identity: says what the bytes are; the same identity must mean the same bytes.
        nbytes: exact size; nothing is rounded up to a power of two.
        fill: writes the bytes; called in the first process only, while the others wait. What it raises is raised here.

    Returns:
        The memory, and whether it was there already.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8), False
    if not hasattr(os, "memfd_create"):  # only Linux has it
        memory = _tensor(mmap.mmap(-1, nbytes))
        fill(memory)
        return memory, False
    name = hashlib.sha256(f"{identity} {nbytes}".encode()).hexdigest()[:32]
    folder = _user_folder()
    record = folder / f"{name}.json"
    with FileLock(folder / f"{name}.lock", mode=0o600):
        held = _attach(record, name, nbytes)
        if held is not None:
            return _tensor(held), True
        descriptor = os.memfd_create(_memfd_name(name), os.MFD_CLOEXEC)
        os.truncate(descriptor, nbytes)
        block = mmap.mmap(descriptor, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        # The descriptor stays open as long as the memory is in use here: others attach through it.
        memory = _tensor(block, on_free=lambda: os.close(descriptor))
        fill(memory)
        temporary = record.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"pid": os.getpid(), "descriptor": descriptor}))
        temporary.replace(record)
        return memory, False


def _attach(record: Path, name: str, nbytes: int) -> mmap.mmap | None:
    """The memory that the record tells of, if its holder still lives and it is that memory."""
    try:
        held = json.loads(record.read_text())
        path = f"/proc/{int(held['pid'])}/fd/{int(held['descriptor'])}"
        # A number may have passed to another process or file since.
        if not os.readlink(path).startswith(f"/memfd:{_memfd_name(name)}"):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("memory of another process cannot be shared and is loaded again: %s", error)
        return None
    try:
        return mmap.mmap(descriptor, nbytes) if os.fstat(descriptor).st_size == nbytes else None
    finally:
        os.close(descriptor)  # the mapping has its own


def _tensor(block: mmap.mmap, on_free: Callable[[], None] | None = None) -> Tensor:
    owner = (ctypes.c_char * len(block)).from_buffer(block)
    if on_free is not None:
        weakref.finalize(owner, on_free).atexit = False
    return torch.frombuffer(owner, dtype=torch.uint8)


def _memfd_name(name: str) -> str:
    return f"skyrl-qwen38-{name}"


def _user_folder() -> Path:
    """A folder of this user alone.

    Raises:
        PermissionError: the name is taken by another user.
    """
    folder = Path(tempfile.gettempdir()) / f"skyrl-qwen38-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder that this user alone may enter, to share the n-gram table in: remove it, or "
            "set TMPDIR"
        )
    return folder
