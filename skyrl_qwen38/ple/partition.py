"""Which rank owns which rows of the table: contiguous ranges as even as they can be, by arithmetic alone."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowPartition:
    """Rows 0 … N-1 over `world_size` ranks: rank k holds [N*k // ep, N*(k+1) // ep).

    Any number of ranks works, more ranks than rows included (some ranks then hold none).

    Raises:
        ValueError: there is no row or no rank, or N * world_size leaves int64.
    """

    num_rows: int
    world_size: int

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.world_size < 1:
            raise ValueError(f"cannot split {self.num_rows} rows over {self.world_size} ranks: both must be at least 1")
        if self.num_rows * self.world_size >= 1 << 63:
            raise ValueError(f"{self.num_rows} rows over {self.world_size} ranks leave the range of int64")

    def bounds(self, rank: int) -> tuple[int, int]:
        """First row of `rank` and the row after its last.

        Raises:
            IndexError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not one of the table's {self.world_size}")
        return self.num_rows * rank // self.world_size, self.num_rows * (rank + 1) // self.world_size

    @property
    def boundaries(self) -> Tensor:
        """int64 [world_size + 1]: `bounds` of all ranks in one."""
        return self.boundaries_on(torch.device("cpu"))

    def boundaries_on(self, device: torch.device) -> Tensor:
        """`boundaries`, made on the device itself, so that the host need not wait for a copy."""
        return torch.arange(self.world_size + 1, device=device) * self.num_rows // self.world_size

    def owner(self, row_ids: Tensor) -> Tensor:
        """The rank of each row, int64, shaped like `row_ids` (integers in [0, N)).

        ((r + 1) * ep - 1) // N. In int64 whatever the ids' dtype: the product does not fit int32.
        """
        ranks = row_ids.long() + 1  # a tensor of our own, so the rest is done in place
        return ranks.mul_(self.world_size).sub_(1).div_(self.num_rows, rounding_mode="floor")
