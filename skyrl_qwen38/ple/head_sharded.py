"""The n-gram table split by whole heads: what the patch `ple_row_shard` replaces, and the baseline beside it."""

import torch
from torch import Tensor

from skyrl_qwen38.ple.exchange import Requests
from skyrl_qwen38.ple.hashing import NgramHasher
from skyrl_qwen38.ple.sharded_table import ShardedTable


class HeadShardedTable(ShardedTable):
    """Rank k of EP ranks holds the rows of the heads [K*k / EP, K*(k+1) / EP), so EP must divide K.

    Every rank sends each owner its column of row ids, duplicates included, and gets that column's rows back.
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

    def _requests(self, row_ids: Tensor) -> Requests:
        offsets = self.hasher.head_offsets.to(row_ids.device)  # [K]
        if row_ids.shape[-1:] != offsets.shape:
            raise ValueError(f"row ids of a head-sharded table have {len(offsets)} columns, got {list(row_ids.shape)}")
        rank_in_head = row_ids - offsets
        outside = (rank_in_head < 0) | (rank_in_head >= self.hasher.head_sizes.to(row_ids.device))
        if outside.any():
            raise ValueError(f"the row id {row_ids[outside][0].item()} is not in the rows of its head")
        heads = len(offsets) // self.world_size
        first_rows = offsets[::heads].repeat_interleave(heads)  # [K]: of each head's owner
        by_owner = (row_ids - first_rows).view(-1, self.world_size, heads).transpose(0, 1)  # [EP, T, K/EP]
        tokens = by_owner.shape[1]
        places = torch.arange(row_ids.numel(), device=row_ids.device).view(by_owner.shape)
        return Requests(
            by_owner.reshape(-1),
            [tokens * heads] * self.world_size,
            places.transpose(0, 1).reshape(row_ids.shape),
        )
