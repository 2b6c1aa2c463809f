"""The n-gram table split by whole heads: what the patch `ple_row_shard` replaces, and the baseline beside it."""

import torch
from torch import Tensor

from skyrl_qwen38.ple.hashing import NgramHasher
from skyrl_qwen38.ple.routing import Requests, answer_slots
from skyrl_qwen38.ple.sharded_table import ShardedTable


class HeadShardedTable(ShardedTable):
    """Rank k of EP ranks holds the rows of the heads [K*k / EP, K*(k+1) / EP), so EP must divide K.

    Every rank sends each owner its columns of row ids, duplicates included, and gets those columns' rows back.
    """

    @classmethod
    def _owned_rows(cls, hasher: NgramHasher, world_size: int, rank: int) -> tuple[int, int]:
        if hasher.num_heads % world_size:
            raise ValueError(
                f"the head-sharded n-gram table needs an EP size that divides its {hasher.num_heads} heads, got "
                f"EP={world_size}: enable the patch ple_row_shard or change the EP size"
            )
        firsts = [*hasher.head_offsets.tolist(), int(hasher.head_sizes.sum())]
        heads = hasher.num_heads // world_size
        return firsts[rank * heads], firsts[(rank + 1) * heads]

    def _route_keys(self, keys: Tensor, invalid: Tensor) -> Requests:
        rows = [self.hasher.rows_of_keys(keys[..., order], order) for order in range(keys.shape[-1])]
        return self._by_head(torch.cat(rows, dim=-1), invalid)

    def _route_rows(self, row_ids: Tensor) -> Requests:
        if row_ids.shape[-1:] != (self.hasher.num_heads,):
            raise ValueError(
                f"row ids of a head-sharded table have {self.hasher.num_heads} columns, got {list(row_ids.shape)}"
            )
        return self._by_head(row_ids, self._outside_head(row_ids).any())

    def _refused_row(self, row_ids: Tensor) -> Exception | None:
        outside = row_ids[self._outside_head(row_ids)]
        return ValueError(f"the row id {outside[0].item()} is not in the rows of its head") if outside.numel() else None

    def _outside_head(self, row_ids: Tensor) -> Tensor:
        rank_in_head = row_ids - self.hasher.head_offsets.to(row_ids.device)
        return (rank_in_head < 0) | (rank_in_head >= self.hasher.head_sizes.to(row_ids.device))

    def _by_head(self, row_ids: Tensor, invalid: Tensor) -> Requests:
        heads = self.hasher.num_heads // self.world_size
        # Rows are counted from the owner's first, the first of its first head.
        first_rows = self.hasher.head_offsets[::heads].to(row_ids.device).view(self.world_size, 1, 1)
        by_owner = row_ids.view(-1, self.world_size, heads).transpose(0, 1) - first_rows  # [EP, T, K/EP]
        counts = torch.full((self.world_size,), by_owner.shape[1] * heads, device=row_ids.device)
        slots = answer_slots(counts, self.world_size, self.rank, row_ids.numel()).view(by_owner.shape)
        return Requests(
            by_owner.reshape(-1).int(),
            counts,
            slots.transpose(0, 1).reshape(row_ids.shape),
            0,
            torch.zeros((), dtype=torch.int64, device=row_ids.device),
            invalid,
        )
