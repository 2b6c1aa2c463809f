"""What the two splits of the frozen n-gram table share: loading, the lookup's three steps, and its accounts."""

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_qwen38.ple.agreement import agree, agree_on, rank_in, world_size_of
from skyrl_qwen38.ple.exchange import Exchange, PendingRows, Requests
from skyrl_qwen38.ple.hashing import NgramHasher
from skyrl_qwen38.ple.source import TableSource
from skyrl_qwen38.ple.storage import HostRows, Storage


class LookupHandle:
    """A lookup under way. The caller keeps it until the rows are needed; activation recompute may close over it."""

    def __init__(self, table: "ShardedTable", pending: PendingRows):
        self._table = table
        self._pending = pending

    def wait(self) -> Tensor:
        """The rows, [*input_ids.shape, K, D] in the table's dtype on the ids' device, without a gradient.

        A second call returns the same tensor and communicates nothing.
        """
        with self._table._timed("output_dist"):
            return self._pending.wait()


class ShardedTable(ABC):
    """A frozen table, split over a process group whose ranks make the same calls in the same order.

    Neither a module nor a parameter, so no optimizer, checkpoint or weight sync sees it. Make one with `load`.

    Attributes:
        num_rows, row_dim, dtype: of the whole table, [N, D].
        hasher: which rows a token asks for.
        rank, world_size: this process in the group, and its size (EP).
    """

    def __init__(
        self,
        source: TableSource,
        rows: HostRows,
        fingerprint: str,
        hasher: NgramHasher,
        group: dist.ProcessGroup | None,
    ):
        self.num_rows, self.row_dim, self.dtype = source.num_rows, source.row_dim, source.dtype
        self.hasher = hasher
        self.rank, self.world_size = rank_in(group), world_size_of(group)
        self._rows = rows
        self._fingerprint = fingerprint
        self._exchange = Exchange(group)
        self._counts = dict.fromkeys(
            ("lookups", "tokens", "rows_asked", "rows_moved", "bytes_sent", "bytes_received"), 0
        )
        self._seconds = dict.fromkeys(("hash", "input_dist", "lookup", "output_dist"), 0.0)

    @classmethod
    def load(
        cls,
        source: TableSource | str | os.PathLike[str],
        hasher: NgramHasher,
        group: dist.ProcessGroup | None = None,
        storage: Storage = "auto",
    ) -> Self:
        """Reads this rank's part of the table into host memory. Collective over the group.

        Args:
            source: the table, or the folder or hub id to open it from. Opened here, a file that only one rank lacks
                stops all of them; opened before, it stops that rank alone.
            hasher: of the model's configuration; the checkpoint's hash buffers must agree with it.
            group: the ranks that the table is split over; None is the default group, or a single process.
            storage: "pinned" holds the rows in page-locked memory (ordinary memory without a GPU); "auto" chooses.

        Raises:
            ValueError: the group's size does not suit this kind of split.
            RankFailure: on some rank the table could not be opened or read, or does not belong to the hasher; or
                ranks hold different tables. Raised on all ranks.
        """
        owned = cls._owned_rows(hasher, world_size_of(group), rank_in(group))

        def open_checked() -> tuple[TableSource, str]:
            table = source if isinstance(source, TableSource) else TableSource.open(source)
            if table.num_rows != hasher.num_rows:
                raise ValueError(
                    f"the checkpoint's n-gram table has {table.num_rows} rows, but its configuration gives "
                    f"{hasher.num_rows}: correct ngram_vocab_size_base or heads_per_ngram there"
                )
            if buffers := table.buffers():
                hasher.check_buffers(**buffers)
            return table, _fingerprint(table, hasher)

        opened, fingerprint = agree(group, open_checked)
        shape = f"{opened.num_rows} rows of {opened.row_dim} in {opened.dtype}"
        agree_on(group, "the n-gram table", f"{shape} (fingerprint {fingerprint})")
        rows = agree(group, lambda: HostRows(opened, *owned, storage))
        return cls(opened, rows, fingerprint, hasher, group)

    def start(
        self, input_ids: Tensor, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> LookupHandle:
        """Hashes the tokens and starts their lookup. Collective over the group, tokens or none.

        Args:
            input_ids: raw tokenizer ids [T] or [B, S]; these, `cu_seqlens` and `attention_mask` are as
                `NgramHasher.row_ids` has them.

        Returns:
            A handle whose `wait` gives the rows [*input_ids.shape, K, D]; they travel in the meantime.

        Raises:
            RankFailure: `NgramHasher.row_ids` refuses the arguments of some rank. Raised on all ranks.
        """

        def row_ids() -> Tensor:
            with self._timed("hash"):
                return self.hasher.row_ids(input_ids, cu_seqlens, attention_mask)

        return self._start(row_ids, input_ids.device)

    def lookup(self, row_ids: Tensor) -> Tensor:
        """The rows [*row_ids.shape, D] of integers [..., K], on their device. Collective over the group.

        Raises:
            RankFailure: a row id of some rank is not in the table. Raised on all ranks.
        """
        return self._start(lambda: row_ids, row_ids.device).wait()

    def stats(self) -> dict[str, int | float]:
        """Sums since `load`, of this rank.

        `lookups`; `tokens`; `rows_asked` (K a token); `rows_moved` (that many rows came to this rank, each once a
        lookup); `bytes_sent` and `bytes_received` (row numbers and rows, without what stays on the rank);
        `hash_seconds`, `input_dist_seconds`, `lookup_seconds`, `output_dist_seconds`.
        """
        return self._counts | {f"{phase}_seconds": seconds for phase, seconds in self._seconds.items()}

    def fingerprint(self) -> str:
        """16 hex digits that tell tables apart: shape, dtype, hash parameters and a sample of the rows.

        The same on every rank, for every split, and however the checkpoint cuts the table into files.
        """
        return self._fingerprint

    @classmethod
    @abstractmethod
    def _owned_rows(cls, hasher: NgramHasher, world_size: int, rank: int) -> tuple[int, int]:
        """First row that a rank holds, and the row after its last."""

    @abstractmethod
    def _requests(self, row_ids: Tensor) -> Requests:
        """Row ids grouped by owner, or a ValueError where one of them is not in the table."""

    def _start(self, make_row_ids: Callable[[], Tensor], device: torch.device) -> LookupHandle:
        error = None
        try:
            row_ids = make_row_ids()
            with self._timed("input_dist"):
                requests = self._requests(row_ids)
        except Exception as caught:  # whatever it is, the peers are told: they would wait for this rank otherwise
            error, nothing = caught, torch.empty(0, dtype=torch.int64, device=device)
            requests = Requests(nothing, [0] * self.world_size, nothing)
        with self._timed("input_dist"):
            context, wanted = self._exchange.input_dist(requests, error)
        with self._timed("lookup"):
            rows = self._rows.gather(wanted)
        with self._timed("output_dist"):
            pending = self._exchange.output_dist(context, rows)
        self._count(row_ids.numel(), wanted.element_size(), context.asked, context.wanted)
        return LookupHandle(self, pending)

    def _count(self, rows_asked: int, number_bytes: int, asked: list[int], wanted: list[int]) -> None:
        row_bytes = self.row_dim * self.dtype.itemsize
        sent_away, came_in = sum(asked) - asked[self.rank], sum(wanted) - wanted[self.rank]
        self._counts["lookups"] += 1
        self._counts["tokens"] += rows_asked // self.hasher.num_heads
        self._counts["rows_asked"] += rows_asked
        self._counts["rows_moved"] += sum(asked)
        self._counts["bytes_sent"] += sent_away * number_bytes + came_in * row_bytes
        self._counts["bytes_received"] += came_in * number_bytes + sent_away * row_bytes

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - begin


def _fingerprint(source: TableSource, hasher: NgramHasher) -> str:
    digest = hashlib.sha256(f"{source.num_rows} {source.row_dim} {source.dtype} {hasher}".encode())
    digest.update(source.sample().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
