"""Host memory for the tensors of a lookup, kept for the next one.

What costs in a fresh buffer of tens of MiB is not the allocation but the first touch of each of its pages: for the
rows of 8k tokens it takes longer than copying them. The GPU's allocator keeps its memory for this reason; the
CPU's does not.
"""

import ctypes
import math
import mmap
import weakref

import torch
from torch import Tensor

_SMALLEST = 1 << 20  # below, the C library keeps freed memory by itself
_HUGE_PAGE = 2 << 20
_LARGEST_KEPT_BY_MALLOC = 31 << 20


class HostBuffers:
    """Hands out tensors whose memory returns here when the last tensor on it is gone."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        # The small temporaries of routing stay with the C library. glibc maps those above 128 KiB afresh each time,
        # until a larger block was freed once: then it keeps what is smaller (mallopt(3), M_MMAP_THRESHOLD).
        torch.empty(_LARGEST_KEPT_BY_MALLOC, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor. On any device but the CPU, and for small ones, this is `torch.empty`."""
        nbytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or nbytes < _SMALLEST:
            return torch.empty(*shape, dtype=dtype, device=device)
        block = self._take(nbytes)
        # The tensor keeps this array alive, and this array the block.
        owner = (ctypes.c_char * nbytes).from_buffer(block)
        weakref.finalize(owner, self._free.append, block).atexit = False
        return torch.frombuffer(owner, dtype=dtype, count=math.prod(shape)).view(*shape)

    def _take(self, nbytes: int) -> mmap.mmap:
        """The smallest free block that is large enough and not much larger, or a new one."""
        fitting = [block for block in self._free if nbytes <= len(block) <= 2 * nbytes]
        if fitting:
            block = min(fitting, key=len)
            self._free.remove(block)
            return block
        # Batches differ in size: a new block replaces the free ones that would nearly have done.
        self._free[:] = [block for block in self._free if not nbytes / 2 <= len(block) < nbytes]
        block = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block
