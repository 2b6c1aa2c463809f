"""What the two splits of the frozen n-gram table share: loading, the lookup's steps, and its accounts."""

import hashlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_qwen38.ple.agreement import agree, agree_on, gather_objects, rank_in, world_size_of
from skyrl_qwen38.ple.exchange import Call, Exchange, Sizes
from skyrl_qwen38.ple.hashing import NgramHasher
from skyrl_qwen38.ple.host_buffers import HostBuffers
from skyrl_qwen38.ple.routing import Requests
from skyrl_qwen38.ple.source import TableSource, sample_rows
from skyrl_qwen38.ple.storage import RowStore, Storage, choose_storage, open_rows

_LOG = logging.getLogger(__name__)


class LookupHandle:
    """A lookup under way. The caller keeps it until the rows are needed; activation recompute may close over it."""

    def __init__(self, finish: Callable[[], Tensor]):
        self._finish: Callable[[], Tensor] | None = finish
        self._rows: Tensor | None = None

    def wait(self) -> Tensor:
        """The rows, [*input_ids.shape, K, D] in the table's dtype on the ids' device, without a gradient.

        A second call returns the same tensor and communicates nothing.
        """
        if self._finish is not None:
            self._rows, self._finish = self._finish(), None
        return self._rows


@dataclass(frozen=True)
class _Planned:
    """A lookup whose sizes are known, and whose rows were not asked for yet."""

    input_ids: Tensor
    requests: Requests
    sizes: Sizes


class ShardedTable(ABC):
    """A frozen table, split over a process group whose ranks make the same calls in the same order.

    Neither a module nor a parameter, so no optimizer, checkpoint or weight sync sees it. Make one with `load`.

    Attributes:
        num_rows, row_dim: of the whole table, [N, D].
        dtype: of the rows that a lookup returns; an fp8 table travels in fp8 and is returned in bf16.
        hasher: which rows a token asks for.
        rank, world_size: this process in the group, and its size (EP).
        storage: where the rows are, and why there.
    """

    def __init__(
        self,
        source: TableSource,
        rows: RowStore,
        storage: str,
        fingerprint: str,
        hasher: NgramHasher,
        group: dist.ProcessGroup | None,
        ranks: tuple[int, int],
    ):
        self.num_rows, self.row_dim = source.num_rows, source.row_dim
        self.dtype = source.dtype if source.scale is None else torch.bfloat16
        self.hasher = hasher
        self.rank, self.world_size = ranks
        self.storage = storage
        self._stored_dtype, self._scale = source.dtype, source.scale
        self._rows = rows
        self._fingerprint = fingerprint
        self._exchange = Exchange(group, rank=self.rank, world_size=self.world_size)
        self._buffers = HostBuffers()
        self._planned: deque[_Planned] = deque()
        self._side_stream: torch.cuda.Stream | None = None
        names = ("lookups", "tokens", "keys", "unique_keys", "row_ids", "unique_rows", "bytes_sent", "bytes_received")
        self._counts = dict.fromkeys(names, 0)
        self._seconds = dict.fromkeys(("hash", "sizes", "input_dist", "lookup", "output_dist"), 0.0)

    @classmethod
    def load(
        cls,
        source: TableSource | str | os.PathLike[str],
        hasher: NgramHasher,
        group: dist.ProcessGroup | None = None,
        storage: Storage = "auto",
    ) -> Self:
        """Makes this rank's part of the table ready. Collective over the group.

        Args:
            source: the table, or the folder or hub id to open it from. Opened here, a file that only one rank lacks
                stops all of them; opened before, it stops that rank alone.
            hasher: of the model's configuration; the checkpoint's hash buffers must agree with it.
            group: the ranks that the table is split over; None is the default group, or a single process. The lookups
                use a group of their own over these ranks, with the same time limit, so that their order cannot mix with
                that of other collectives.
            storage: "pinned" holds the rank's rows in page-locked memory (ordinary memory without a GPU), once for
                all processes of the node that hold the same; "mapped" leaves them in the checkpoint's files; "node"
                holds the whole table once a node, and lookups communicate nothing; "auto" is "pinned" where that
                fits every node, else "mapped".

        Raises:
            ValueError: the group's size does not suit this kind of split.
            RankFailure: on some rank the table could not be opened or read, does not fit, or does not belong to the
                hasher; or ranks hold different tables. Raised on all ranks.
        """
        world_size, rank = world_size_of(group), rank_in(group)
        owned = cls._owned_rows(hasher, world_size, rank)

        def open_checked() -> TableSource:
            table = source if isinstance(source, TableSource) else TableSource.open(source)
            if table.num_rows != hasher.num_rows:
                raise ValueError(
                    f"the checkpoint's n-gram table has {table.num_rows} rows, but its configuration gives "
                    f"{hasher.num_rows}: correct ngram_vocab_size_base or heads_per_ngram there"
                )
            if buffers := table.buffers():
                hasher.check_buffers(**buffers)
            return table

        opened, identity = agree(group, lambda: (table := open_checked(), table.identity()))
        shape = f"{opened.num_rows} rows of {opened.row_dim} in {opened.dtype}"
        agree_on(group, "the n-gram table", f"{shape} (identity {identity}, hash {hasher})")
        choice = choose_storage(storage, opened, owned[1] - owned[0], group)
        held = (0, opened.num_rows) if choice.storage == "node" else owned
        rows = agree(group, lambda: open_rows(choice.storage, opened, *held, show_progress=rank == 0))
        if rank == 0:
            _LOG.info("n-gram table of %s: %s storage (%s)", shape, choice.storage, choice.why)
        fingerprint = _fingerprint(opened, hasher, rows, held, group)
        if choice.storage == "node":
            return cls(opened, rows, choice.storage, fingerprint, hasher, None, (0, 1))
        return cls(opened, rows, choice.storage, fingerprint, hasher, _own_group(group), (rank, world_size))

    def plan(self, batches: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Hashes all micro-batches of a step and exchanges the sizes of their lookups in one collective.

        The next `start` calls must be for these micro-batches, in this order; each then has two collectives, and on a
        GPU the host waits in none of them.

        Args:
            batches: `input_ids` and `cu_seqlens` (or None) of each micro-batch, as `start` takes them. All ranks give
                the same number.

        Raises:
            RankFailure: ids are refused on some rank, the numbers differ, or a planned lookup was never started.
                Raised on all ranks.
        """
        forgotten = len(self._planned)
        self._planned.clear()

        def requests() -> list[Requests]:
            if forgotten:
                raise RuntimeError(f"{forgotten} planned lookups were never started before the next plan")
            return [self._hash(input_ids, cu_seqlens) for input_ids, cu_seqlens in batches]

        device = batches[0][0].device if batches else torch.device("cpu")
        known = self._sizes(Call.PLAN, requests, device, lambda: [self._refusal(*batch) for batch in batches])
        self._planned.extend(_Planned(input_ids, *each) for (input_ids, _), each in zip(batches, known, strict=True))

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
            ValueError: lookups are planned, and the next of them is for other tokens (on a GPU: of another shape).
        """
        if self._planned:
            planned = self._planned.popleft()
            if planned.input_ids.shape != input_ids.shape or not (
                input_ids.is_cuda or torch.equal(planned.input_ids, input_ids)
            ):
                raise ValueError(
                    f"rank {self.rank} starts a lookup of {list(input_ids.shape)} tokens where it planned another of "
                    f"{list(planned.input_ids.shape)}: start micro-batches in the order of the plan"
                )
            return self._start(planned.requests, planned.sizes)
        arguments = (input_ids, cu_seqlens, attention_mask)
        ((requests, sizes),) = self._sizes(
            Call.START, lambda: [self._hash(*arguments)], input_ids.device, lambda: [self._refusal(*arguments)]
        )
        return self._start(requests, sizes)

    def lookup(self, row_ids: Tensor) -> Tensor:
        """The rows [*row_ids.shape, D] of integers [..., K], on their device. Collective over the group.

        Raises:
            RankFailure: a row id of some rank is not in the table. Raised on all ranks.
        """
        ((requests, sizes),) = self._sizes(
            Call.LOOKUP,
            lambda: [self._route_rows(row_ids)],
            row_ids.device,
            lambda: [self._refused_row(row_ids)],
        )
        return self._start(requests, sizes).wait()

    def stats(self) -> dict[str, int | float]:
        """Sums since `load`, of this rank.

        `lookups`; `tokens`; `keys` (n-gram keys of the tokens) and `unique_keys`; `row_ids` (K a token) and
        `unique_rows` (each came to this rank once a lookup); `bytes_sent` and `bytes_received` (row numbers and rows;
        not what stays on the rank); `hash_seconds`, `sizes_seconds`, `input_dist_seconds`, `lookup_seconds`,
        `output_dist_seconds` of the host.
        """
        return self._counts | {f"{phase}_seconds": seconds for phase, seconds in self._seconds.items()}

    def fingerprint(self) -> str:
        """16 hex digits that tell tables apart: shape, dtype, hash parameters and a sample of the rows.

        The same on every rank, for every split and storage, and however the checkpoint cuts the table into files.
        """
        return self._fingerprint

    @classmethod
    @abstractmethod
    def _owned_rows(cls, hasher: NgramHasher, world_size: int, rank: int) -> tuple[int, int]:
        """First row that a rank holds, and the row after its last."""

    @abstractmethod
    def _route_keys(self, keys: Tensor, invalid: Tensor) -> Requests:
        """The requests of n-gram keys [*, ngram_size - 1]."""

    @abstractmethod
    def _route_rows(self, row_ids: Tensor) -> Requests:
        """The requests of row ids [*, K]; `invalid` tells whether one of them is not in the table."""

    @abstractmethod
    def _refused_row(self, row_ids: Tensor) -> Exception | None:
        """What is wrong with row ids that `_route_rows` found invalid."""

    def _hash(
        self, input_ids: Tensor, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Requests:
        with self._timed("hash"), self._on_side_stream(input_ids.device, input_ids, cu_seqlens, attention_mask):
            return self._route_keys(*self.hasher.keys_unchecked(input_ids, cu_seqlens, attention_mask))

    def _refusal(
        self, input_ids: Tensor, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Exception | None:
        """What the hash says to these arguments."""
        try:
            self.hasher.keys(input_ids, cu_seqlens, attention_mask)
        except ValueError as error:
            return error
        return None

    def _sizes(
        self,
        call: Call,
        make_requests: Callable[[], list[Requests]],
        device: torch.device,
        refusals: Callable[[], list[Exception | None]],
    ) -> list[tuple[Requests, Sizes]]:
        """Requests with their sizes; where some rank's are invalid, all ranks raise what `refusals` says there."""
        error, requests = None, []
        try:
            requests = make_requests()
        except Exception as caught:  # whatever it is, the peers are told: they would wait for this rank otherwise
            error = caught
        with self._timed("sizes"), self._on_side_stream(device):
            sizes = self._exchange.sizes(call, requests, device, error)
        if sizes is None:
            self._exchange.raise_together(error or next((refusal for refusal in refusals() if refusal), None))
        return list(zip(requests, sizes, strict=True))

    def _start(self, requests: Requests, sizes: Sizes) -> LookupHandle:
        device, row_bytes, places = requests.local_rows.device, self._rows.row_bytes, requests.places
        own, away = sizes.asked[self.rank], sum(sizes.asked) - sizes.asked[self.rank]
        came_in = sum(sizes.wanted) - sizes.wanted[self.rank]
        empty = self._buffers.empty
        with self._on_side_stream(device):
            with self._timed("input_dist"):
                wanted = empty(came_in, dtype=requests.local_rows.dtype, device=device)
                own_rows = self._exchange.input_dist(requests, sizes, wanted)
            with self._timed("lookup"):
                answers = empty(came_in, row_bytes, dtype=torch.uint8, device=device)
                self._rows.gather(wanted, answers)
            # Others' rows first, the rank's own behind them: those need no collective, and are gathered while it runs.
            received = empty(away + own, row_bytes, dtype=torch.uint8, device=device)
            with self._timed("output_dist"):
                pending = self._exchange.output_dist(sizes, answers, received[:away])
            with self._timed("lookup"):
                self._rows.gather(own_rows, received[away:])
            done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._count(requests, sizes)

        def finish() -> Tensor:
            with self._timed("output_dist"):
                pending.wait()
                if done is not None:
                    current = torch.cuda.current_stream(device)
                    current.wait_event(done)
                    received.record_stream(current)
                    places.record_stream(current)
                out = empty(places.numel(), self.row_dim, dtype=self.dtype, device=device)
                torch.index_select(self._dequantised(received), 0, places.flatten(), out=out)
                return out.view(*places.shape, self.row_dim)

        return LookupHandle(finish)

    def _dequantised(self, received: Tensor) -> Tensor:
        """Rows [R, D] in `dtype`, of bytes as they are stored."""
        rows = received.view(self._stored_dtype)
        # One rounding, of the exact product: an e4m3 value has 4 significant bits and the scale 24.
        return rows if self._scale is None else (rows.float() * self._scale).to(self.dtype)

    def _count(self, requests: Requests, sizes: Sizes) -> None:
        row_bytes, number_bytes = self._rows.row_bytes, requests.local_rows.element_size()
        sent_away = sum(sizes.asked) - sizes.asked[self.rank]
        came_in = sum(sizes.wanted) - sizes.wanted[self.rank]
        for name, amount in {
            "lookups": 1,
            "tokens": requests.places.numel() // self.hasher.num_heads,
            "keys": requests.keys,
            "unique_keys": sizes.unique_keys,
            "row_ids": requests.places.numel(),
            "unique_rows": sum(sizes.asked),
            "bytes_sent": sent_away * number_bytes + came_in * row_bytes,
            "bytes_received": came_in * number_bytes + sent_away * row_bytes,
        }.items():
            self._counts[name] += amount

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - begin

    @contextmanager
    def _on_side_stream(self, device: torch.device, *inputs: Tensor | None) -> Iterator[None]:
        """On a GPU, work inside goes to a stream of its own, behind what the current one was given so far."""
        if device.type != "cuda":
            yield
            return
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(device)
        self._side_stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in inputs:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(self._side_stream)
        with torch.cuda.stream(self._side_stream):
            yield


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group over the same ranks, with the same time limit, that nothing else uses. Collective over them alone."""
    if world_size_of(group) == 1:
        return group
    like = group if group is not None else dist.group.WORLD
    backend = dist.get_backend(like)
    device = torch.device("cpu" if backend == dist.Backend.GLOO else "cuda")
    return dist.new_group(
        dist.get_process_group_ranks(like),
        timeout=like._get_backend(device).options._timeout,
        backend=backend,
        use_local_synchronization=True,
        group_desc="ple_table",
    )


def _fingerprint(
    source: TableSource, hasher: NgramHasher, rows: RowStore, held: tuple[int, int], group: dist.ProcessGroup | None
) -> str:
    """Digest of rows spread over all heads, each read where it is held. One collective."""
    mine = [number for number in sample_rows(int(hasher.head_sizes.sum())) if held[0] <= number < held[1]]
    out = torch.empty(len(mine), source.row_bytes, dtype=torch.uint8)
    rows.gather(torch.tensor(mine, dtype=torch.int64) - held[0], out)
    sampled = dict(zip(mine, (row.numpy().tobytes() for row in out), strict=True))
    found = {number: row for part in gather_objects(group, sampled) for number, row in part.items()}
    digest = hashlib.sha256(f"{source.num_rows} {source.row_dim} {source.dtype} {source.scale} {hasher}".encode())
    for number in sorted(found):
        digest.update(found[number])
    return digest.hexdigest()[:16]
