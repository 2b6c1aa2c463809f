"""The n-gram table split by contiguous rows: any number of ranks, and only the rows that are asked for move."""

import torch
from torch import Tensor

from skyrl_qwen38.ple.hashing import NgramHasher
from skyrl_qwen38.ple.partition import RowPartition
from skyrl_qwen38.ple.routing import Requests, route_keys, route_rows
from skyrl_qwen38.ple.sharded_table import ShardedTable


class RowShardedTable(ShardedTable):
    """Rank k of EP ranks holds the rows [N*k // EP, N*(k+1) // EP); each rank asks for each row once a lookup."""

    @classmethod
    def _owned_rows(cls, hasher: NgramHasher, world_size: int, rank: int) -> tuple[int, int]:
        return RowPartition(hasher.num_rows, world_size).bounds(rank)

    @property
    def _partition(self) -> RowPartition:
        return RowPartition(self.num_rows, self.world_size)

    def _route_keys(self, keys: Tensor, invalid: Tensor) -> Requests:
        return route_keys(keys, self.hasher, self._partition, self.rank, invalid)

    def _route_rows(self, row_ids: Tensor) -> Requests:
        return route_rows(row_ids, self._partition, self.rank)

    def _refused_row(self, row_ids: Tensor) -> Exception | None:
        outside = row_ids[(row_ids < 0) | (row_ids >= self.num_rows)]
        if not torch.numel(outside):
            return None
        return ValueError(f"the row id {outside[0].item()} is not in the n-gram table of {self.num_rows} rows")
