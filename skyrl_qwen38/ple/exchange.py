"""The collectives of a sharded lookup, and nothing else: input_dist, (the owner's lookup), output_dist.

A lookup is three collectives on every rank of the group, whatever its data and even without a token: one exchange of
sizes, one of row numbers, one of rows. A single rank makes none. What a lookup needs to find its way back travels in
a frozen `ExchangeContext`; nothing is kept between calls, so several lookups may be under way at once.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_qwen38.ple.agreement import raise_together, world_size_of


@dataclass(frozen=True)
class Requests:
    """The rows that one rank asks for, grouped by the rank that owns them.

    Attributes:
        local_rows: integers [R], numbered from the owner's first row; those of rank 0 first.
        counts: how many of them each rank owns.
        places: int64, shaped like the row ids that were asked for: which of the R answers belongs there.
    """

    local_rows: Tensor
    counts: list[int]
    places: Tensor


@dataclass(frozen=True)
class ExchangeContext:
    """What brings the rows back to the positions that asked.

    Attributes:
        asked: rows that this rank asks of each rank.
        wanted: rows that each rank asks of this one.
        places: as in `Requests`.
    """

    asked: list[int]
    wanted: list[int]
    places: Tensor


class PendingRows:
    """Rows on their way. `wait` may be called again, as activation recompute does: it returns the same tensor."""

    def __init__(self, received: Tensor, work: dist.Work | None, sent: Tensor, places: Tensor):
        self._received = received
        self._work = work
        self._sent = sent  # the collective reads it until it is done
        self._places = places
        self._rows: Tensor | None = None

    def wait(self) -> Tensor:
        """[*places.shape, D]: a row for every position that asked."""
        if self._rows is None:
            if self._work is not None:
                self._work.wait()
            rows = self._received.index_select(0, self._places.flatten())
            self._rows = rows.view(*self._places.shape, rows.shape[1])
            self._received = self._sent = self._work = None
        return self._rows


class Exchange:
    """The three verbs over one process group (None: the default group, or a single process)."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        self._world_size = world_size_of(group)

    def input_dist(self, requests: Requests, error: Exception | None = None) -> tuple[ExchangeContext, Tensor]:
        """Sends each request to its owner.

        Args:
            requests: what this rank asks for; empty ones, with one count per rank, where it asks for nothing.
            error: what failed on this rank before the exchange. The rank takes part in the size exchange, which
                tells its peers.

        Returns:
            The way back, and the local rows that all ranks ask of this one (those of rank 0 first).

        Raises:
            RankFailure: an error was given on at least one rank; raised on all.
        """
        if self._world_size == 1:
            raise_together(self._group, error)
            return ExchangeContext(requests.counts, requests.counts, requests.places), requests.local_rows

        device = requests.local_rows.device
        sizes = torch.tensor([[count, error is not None] for count in requests.counts], device=device)
        their_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(their_sizes, sizes, group=self._group)
        wanted, failed = their_sizes.t().tolist()
        if any(failed):  # the failing rank tells itself too, so all ranks are here or none is
            raise_together(self._group, error)

        local_rows = requests.local_rows.new_empty(sum(wanted))
        dist.all_to_all_single(local_rows, requests.local_rows, wanted, requests.counts, group=self._group)
        return ExchangeContext(requests.counts, wanted, requests.places), local_rows

    def output_dist(self, context: ExchangeContext, rows: Tensor) -> PendingRows:
        """Sends the looked-up rows [sum(wanted), D] back by the mirrored split, and does not wait for them."""
        if self._world_size == 1:
            return PendingRows(rows, None, rows, context.places)
        received = rows.new_empty(sum(context.asked), rows.shape[1])
        # As bytes: back ends differ in the dtypes that they know, and nothing is computed on the way.
        work = dist.all_to_all_single(
            received.view(torch.uint8),
            rows.view(torch.uint8),
            context.asked,
            context.wanted,
            group=self._group,
            async_op=True,
        )
        return PendingRows(received, work, rows, context.places)
