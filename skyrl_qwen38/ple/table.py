"""The n-gram table split by contiguous rows: any number of ranks, and only the rows that are asked for move."""

import torch
from torch import Tensor

from skyrl_qwen38.ple.exchange import Requests
from skyrl_qwen38.ple.hashing import NgramHasher
from skyrl_qwen38.ple.partition import RowPartition
from skyrl_qwen38.ple.sharded_table import ShardedTable

_INT32_ROWS = 1 << 31


class RowShardedTable(ShardedTable):
    """Rank k of EP ranks holds the rows [N*k // EP, N*(k+1) // EP); each rank asks for each row once a lookup."""

    @classmethod
    def _owned_rows(cls, hasher: NgramHasher, world_size: int, rank: int) -> tuple[int, int]:
        return RowPartition(hasher.num_rows, world_size).bounds(rank)

    def _requests(self, row_ids: Tensor) -> Requests:
        unique, places = torch.unique(row_ids, return_inverse=True)  # rising, so it is grouped by owner already
        if unique.numel() and (unique[0] < 0 or unique[-1] >= self.num_rows):
            wrong = unique[0] if unique[0] < 0 else unique[-1]
            raise ValueError(f"the row id {wrong.item()} is not in the n-gram table of {self.num_rows} rows")
        partition = RowPartition(self.num_rows, self.world_size)
        owners = partition.owner(unique)
        local_rows = unique - partition.boundaries.to(unique.device)[owners]
        if -(-self.num_rows // self.world_size) <= _INT32_ROWS:  # the same on all ranks, and half the bytes
            local_rows = local_rows.int()
        return Requests(local_rows, torch.bincount(owners, minlength=self.world_size).tolist(), places)
