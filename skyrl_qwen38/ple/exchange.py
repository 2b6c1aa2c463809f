"""The collectives of a sharded lookup, and nothing else: sizes, input_dist, (the owner's lookup), output_dist.

A lookup is three collectives on every rank of the group, whatever its data and even without a token: one exchange of
sizes (one for all lookups of a step, where they are planned), one of row numbers, one of rows. A single rank makes
none. What a rank owns itself never enters a collective. Nothing is kept between calls, so several lookups may be under
way at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_qwen38.ple.agreement import RankFailure, global_rank, raise_together, rank_in
from skyrl_qwen38.ple.routing import Requests

_SIZES_A_ROUND = 32  # lookups whose sizes one collective carries
_FAILED = -1


class Call(IntEnum):
    """What a rank calls; all ranks of a group must call the same."""

    START = 1
    PLAN = 2
    LOOKUP = 3


@dataclass(frozen=True)
class Sizes:
    """How many rows one lookup moves.

    Attributes:
        asked: rows that this rank asks of each rank.
        wanted: rows that each rank asks of this one.
        unique_keys: distinct n-gram keys that this rank asks for.
    """

    asked: list[int]
    wanted: list[int]
    unique_keys: int


class PendingRows:
    """Rows on their way."""

    def __init__(self, work: dist.Work | None, sent: Tensor, peers: Callable[[], AbstractContextManager]):
        self._work = work
        self._sent = sent  # the collective reads it until it is done
        self._peers = peers

    def wait(self) -> None:
        """Waits for the rows; on a GPU the current stream does, not the host."""
        if self._work is not None:
            with self._peers():
                self._work.wait()
        self._work = self._sent = None


class Exchange:
    """The verbs over one process group (None: the default group).

    Args:
        rank, world_size: this process in the group, and its size; a world of 1 communicates nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world_size: int):
        self._group, self._rank, self._world_size = group, rank, world_size

    def sizes(
        self, call: Call, requests: Sequence[Requests], device: torch.device, error: Exception | None = None
    ) -> list[Sizes] | None:
        """Tells every rank how much it will be asked, and whether all ranks make the same call.

        One collective for up to 32 lookups (more in further rounds), and one wait of the host.

        Args:
            error: what failed on this rank before. The rank takes part, which tells its peers.

        Returns:
            The sizes in the requests' order, or None where a rank refuses its ids; then all ranks have None, and the
            caller says why in `raise_together`.

        Raises:
            RankFailure: ranks call different things, or for different numbers of lookups; or an error was given on
                one. Raised on all.
        """
        sizes: list[Sizes] = []
        for begin in range(0, max(len(requests), 1), _SIZES_A_ROUND):
            part = requests[begin : begin + _SIZES_A_ROUND]
            message = torch.zeros(self._world_size, 2 + _SIZES_A_ROUND, dtype=torch.int64, device=device)
            message[:, 0] = call
            message[:, 1] = _FAILED if error is not None else len(requests)
            for i, request in enumerate(part):
                message[:, 2 + i] = request.counts
                message[:, 1].masked_fill_(request.invalid, _FAILED)
            theirs = message
            if self._world_size > 1:
                theirs = torch.empty_like(message)
                with self._peers():
                    dist.all_to_all_single(theirs, message, group=self._group)
            keys = [request.unique_keys for request in part]
            # One copy to the host for all of it: on a GPU this is the wait.
            ours, theirs, keys = _to_host(message, theirs, torch.stack(keys) if keys else message.new_empty(0))
            self._compare(call, [row[:2] for row in theirs])
            if any(row[1] == _FAILED for row in theirs):  # the failing rank tells itself too: all are here, or none
                return None
            sizes += [
                Sizes([row[2 + i] for row in ours], [row[2 + i] for row in theirs], keys[i]) for i in range(len(part))
            ]
        return sizes

    def input_dist(self, requests: Requests, sizes: Sizes, wanted: Tensor) -> Tensor:
        """Sends the other ranks' requests to them.

        Args:
            wanted: receives the local rows that they ask of this one (those of rank 0 first), [sum of the others'].

        Returns:
            The local rows that this rank asks of itself.
        """
        before = sum(sizes.asked[: self._rank])
        after = before + sizes.asked[self._rank]
        own = requests.local_rows[before:after]
        if self._world_size > 1:
            theirs = torch.cat([requests.local_rows[:before], requests.local_rows[after : sum(sizes.asked)]])
            splits = self._without_own(sizes.wanted), self._without_own(sizes.asked)
            with self._peers():
                dist.all_to_all_single(wanted, theirs, *splits, group=self._group)
        return own

    def output_dist(self, sizes: Sizes, rows: Tensor, received: Tensor) -> "PendingRows":
        """Sends the looked-up rows (uint8 [sum of the others' wanted, row bytes]) back; does not wait for them.

        Args:
            received: uint8 [sum of what was asked of others, row bytes], filled when the answer was waited for.
        """
        work = None
        if self._world_size > 1:
            splits = self._without_own(sizes.asked), self._without_own(sizes.wanted)
            with self._peers():
                work = dist.all_to_all_single(received, rows, *splits, group=self._group, async_op=True)
        return PendingRows(work, rows, self._peers)

    def raise_together(self, error: Exception | None) -> None:
        """As `agreement.raise_together`, over this exchange's group."""
        if self._world_size > 1:
            raise_together(self._group, error)
        elif error is not None:
            raise RankFailure({rank_in(None): str(error) or repr(error)}) from error

    @contextmanager
    def _peers(self) -> Iterator[None]:
        """Says what a collective that fails was for."""
        try:
            yield
        except RuntimeError as error:
            cause = str(error).strip().partition("\n")[0]
            own = global_rank(self._group, self._rank)
            raise RankFailure(
                {own: f"a peer left the n-gram table's exchange, or is too late for it ({cause})"}
            ) from error

    def _without_own(self, counts: list[int]) -> list[int]:
        return [0 if rank == self._rank else count for rank, count in enumerate(counts)]

    def _compare(self, own: Call, calls: list[list[int]]) -> None:
        counts = {count for _, count in calls if count != _FAILED}
        if len(counts) > 1 or any(call != own for call, _ in calls):
            lookups = [f"{count} lookups" if count != _FAILED else "a refused lookup" for _, count in calls]
            raise RankFailure(
                {
                    global_rank(self._group, rank): f"calls the n-gram table's {Call(call).name.lower()} for "
                    f"{lookups[rank]}, where rank {global_rank(self._group, self._rank)} calls "
                    f"{own.name.lower()} for {lookups[self._rank]}"
                    for rank, (call, _) in enumerate(calls)
                }
            )


def _to_host(*tensors: Tensor) -> list:
    """The values of int64 tensors as nested lists, by one copy."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).tolist() for part, tensor in zip(parts, tensors, strict=True)]
