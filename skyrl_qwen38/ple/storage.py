"""Where a rank's rows live: its own part of the table, in host memory."""

from typing import Literal

import torch
from torch import Tensor

from skyrl_qwen38.ple.source import TableSource

Storage = Literal["auto", "pinned"]
_SLICE_BYTES = 32 << 20  # read at a time, so that filling needs little beside the rows themselves


class HostRows:
    """Rows [start, stop) of a table in host memory, page-locked where there is a CUDA device to copy them to.

    One allocation of [stop - start, D] in the table's dtype, filled slice by slice. Never a parameter: the rows are
    frozen, so they are in no optimizer, checkpoint or weight sync.

    Args:
        storage: "pinned" is this class; "auto" is the same for now.

    Raises:
        ValueError: `storage` has another value.
    """

    def __init__(self, source: TableSource, start: int, stop: int, storage: Storage = "auto"):
        if storage not in ("auto", "pinned"):
            raise ValueError(f"the table's storage must be 'auto' or 'pinned', got {storage!r}")
        self._rows = torch.empty(
            stop - start,
            source.row_dim,
            dtype=source.dtype,
            device="cpu",
            pin_memory=torch.cuda.is_available(),
        )
        step = max(1, _SLICE_BYTES // (source.row_dim * source.dtype.itemsize))
        for offset, part in enumerate(self._rows.split(step)):
            source.read_into(part, start + offset * step)

    def gather(self, local_rows: Tensor) -> Tensor:
        """The rows of these local numbers (integers [R], counted from this rank's first row), on their device."""
        numbers = local_rows.cpu()
        if not local_rows.is_cuda:
            return self._rows.index_select(0, numbers)
        staging = torch.empty(len(numbers), self._rows.shape[1], dtype=self._rows.dtype, pin_memory=True)
        torch.index_select(self._rows, 0, numbers, out=staging)
        return staging.to(local_rows.device, non_blocking=True)
