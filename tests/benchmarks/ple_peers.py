"""The ways to look rows up that the row-sharded table is measured against; each as its users would write it.

Each peer is built once a process group from the rank's rows and called with the tokens of a micro-batch; hashing is
part of the call for all of them. `wire_bytes` is what such a call sends and receives, what stays on a rank aside; it is
collective and not timed.
"""

from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_qwen38.ple import HeadShardedTable, NgramHasher, RowPartition, RowShardedTable
from skyrl_qwen38.ple.host_buffers import HostBuffers


class Peer(Protocol):
    """One way to look rows up; `setup` happened in its constructor."""

    def __call__(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Rows [T, K, D] of T tokens."""

    def wire_bytes(self, input_ids: Tensor, cu_seqlens: Tensor) -> int:
        """Bytes sent and received by this rank for these tokens."""


class _Table:
    kind: type

    def __init__(self, folder: Path, hasher: NgramHasher, rows: Tensor):
        self.table = self.kind.load(folder, hasher, storage="pinned")

    def __call__(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.table.start(input_ids, cu_seqlens).wait()

    def forget(self) -> None:
        """Gives up the buffers that it keeps between calls, so that a call's whole memory shows."""
        self.table._buffers = HostBuffers()

    def wire_bytes(self, input_ids: Tensor, cu_seqlens: Tensor) -> int:
        before = self.table.stats()
        self(input_ids, cu_seqlens)
        after = self.table.stats()
        return sum(after[name] - before[name] for name in ("bytes_sent", "bytes_received"))


class Ours(_Table):
    """`RowShardedTable`: unique keys, unique rows, one exchange."""

    kind = RowShardedTable


class HeadSplit(_Table):
    """(d) whole heads on a rank: every id goes to its head's owner, duplicates included. EP must divide 16."""

    kind = HeadShardedTable


class _RowShard:
    def __init__(self, folder: Path, hasher: NgramHasher, rows: Tensor):
        self.hasher, self.rows = hasher, rows
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.partition = RowPartition(hasher.num_rows, self.world_size)
        self.first, self.last = self.partition.bounds(self.rank)
        self.row_bytes = rows.shape[1] * rows.element_size()


class AllReduce(_RowShard):
    """(b) masked lookup and all-reduce, as tensor-parallel vocabulary embeddings do: each rank looks up the ids of all
    ranks, with zeros for rows that it does not hold, and the sum is what everybody wanted."""

    def __call__(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        ids = self.hasher.row_ids(input_ids, cu_seqlens, dtype=torch.int32).flatten()
        everyone = ids.new_empty(self.world_size * len(ids))
        dist.all_gather_into_tensor(everyone, ids)
        absent = (everyone < self.first) | (everyone >= self.last)
        found = self.rows.index_select(0, (everyone - self.first).masked_fill_(absent, 0))
        found.masked_fill_(absent.unsqueeze(-1), 0)
        dist.all_reduce(found)
        return found.view(self.world_size, len(input_ids), self.hasher.num_heads, -1)[self.rank]

    def wire_bytes(self, input_ids: Tensor, cu_seqlens: Tensor) -> int:
        ids, others = len(input_ids) * self.hasher.num_heads, self.world_size - 1
        # Sent, and as much received: the ids of all ranks, and the rows of all ranks by a ring, which moves each byte
        # twice less a rank's part.
        return 2 * others * (4 * ids + 2 * ids * self.row_bytes)


class AllToAll(_RowShard):
    """(c) every id to its owner and its row back, duplicates included."""

    def __call__(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        ids = self.hasher.row_ids(input_ids, cu_seqlens)
        flat = ids.flatten()
        owners = self.partition.owner(flat)
        by_owner = torch.argsort(owners, stable=True)
        local = (flat - self.partition.boundaries[owners])[by_owner].int()
        asked = torch.bincount(owners, minlength=self.world_size)
        wanted = torch.empty_like(asked)
        dist.all_to_all_single(wanted, asked)
        asked, wanted = asked.tolist(), wanted.tolist()
        their_ids = local.new_empty(sum(wanted))
        dist.all_to_all_single(their_ids, local, wanted, asked)
        answers = self.rows.index_select(0, their_ids)
        received = answers.new_empty(len(flat), answers.shape[1])
        dist.all_to_all_single(received.view(torch.uint8), answers.view(torch.uint8), asked, wanted)
        rows = torch.empty_like(received)
        rows.index_copy_(0, by_owner, received)
        return rows.view(*ids.shape, -1)

    def wire_bytes(self, input_ids: Tensor, cu_seqlens: Tensor) -> int:
        owners = self.partition.owner(self.hasher.row_ids(input_ids, cu_seqlens).flatten())
        return _ids_moved(owners) * (4 + self.row_bytes)


class TorchRec:
    """(a) TorchRec's row-wise sharded `EmbeddingCollection`.

    The compute kernel is "fused": with "dense", the default where a table is not trained, fbgemm's CPU operator ignores
    `PoolingMode.NONE` and returns a row a bag instead of a row an id, on which the exchange of rows then fails ("Split
    sizes doesn't match total dim 0 size"). fp16, because fbgemm's CPU operators know no bf16; `use_index_dedup` has no
    CPU operator at all.
    """

    def __init__(self, folder: Path, hasher: NgramHasher, rows: Tensor):
        import torchrec
        from fbgemm_gpu.split_embedding_configs import SparseType
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingEnv

        self._kjt = torchrec.KeyedJaggedTensor
        self.hasher, world_size = hasher, dist.get_world_size()
        collection = torchrec.EmbeddingCollection(
            tables=[
                torchrec.EmbeddingConfig(
                    name="ngram",
                    embedding_dim=rows.shape[1],
                    num_embeddings=hasher.num_rows,
                    feature_names=["ngram"],
                    data_type=torchrec.DataType.FP16,
                )
            ],
            device=torch.device("meta"),
        )
        sharder = EmbeddingCollectionSharder(fused_params={"output_dtype": SparseType.FP16})
        plan = construct_module_sharding_plan(
            collection,
            {"ngram": row_wise(compute_kernel="fused")},
            sharder=sharder,
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        self.collection = sharder.shard(collection, plan, env, torch.device("cpu"))
        # Its ranks hold ceil(N / ranks) rows each; the caller hands over those.
        (weight,) = self.collection.parameters()
        weight.data[: len(rows)].copy_(rows)
        self.block = -(-hasher.num_rows // world_size)
        self.row_bytes = 2 * rows.shape[1]

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        ids = self.hasher.row_ids(input_ids, cu_seqlens)
        flat = ids.flatten()
        features = self._kjt(keys=["ngram"], values=flat, lengths=torch.ones(len(flat), dtype=torch.int32))
        rows = self.collection(features).wait()["ngram"].values()
        return rows.view(*ids.shape, -1)

    def wire_bytes(self, input_ids: Tensor, cu_seqlens: Tensor) -> int:
        # Its int64 ids and fp16 rows; it also sends int32 lengths.
        owners = self.hasher.row_ids(input_ids, cu_seqlens).flatten() // self.block
        return _ids_moved(owners) * (8 + 4 + self.row_bytes)


def _ids_moved(owners: Tensor) -> int:
    """How many of these ids leave this rank, and how many come to it from others."""
    asked = torch.bincount(owners, minlength=dist.get_world_size())
    wanted = torch.empty_like(asked)
    dist.all_to_all_single(wanted, asked)
    rank = dist.get_rank()
    return int(asked.sum() - asked[rank] + wanted.sum() - wanted[rank])
