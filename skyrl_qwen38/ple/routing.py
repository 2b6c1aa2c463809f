"""Which rows a rank asks each owner for, and where each answer goes. Pure functions of ids; nothing is sent.

Keys are made unique before rows, because a token has ngram_size - 1 keys and heads_per_ngram times as many rows.
Different keys seldom ask for one row: rows are looked through for duplicates only where the birthday problem promises
enough of them, which each rank decides for itself, because no collective depends on it. Everything stays in the order
of first occurrence: then answers are spread over the tokens by reading them in sequence, which matters more to the
memory than the order in which an owner gathers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_qwen38.ple.hashing import NgramHasher
from skyrl_qwen38.ple.partition import RowPartition

_NO_KEY = (1 << 63) - 1  # above every key: hashing keeps them below 5.9e18
_INT32_MAX = (1 << 31) - 1
# U keys in a head of S rows leave a part of about U / 2S of their rows to others; below this, looking costs more.
_WORTHWHILE_DUPLICATES = 0.1


@dataclass(frozen=True)
class Requests:
    """The rows that one rank asks for, grouped by the rank that owns them.

    Attributes:
        local_rows: integers [>= R], numbered from the owner's first row; those of rank 0 first. What lies beyond the
            first R = sum(counts) is filler: on a GPU R is not known until the host is told.
        counts: int64 [EP], how many of them each rank owns, on the ids' device.
        places: int32, shaped like the row ids that were asked for: which answer belongs there, where the other ranks'
            answers come first (those of rank 0 before all) and the rank's own last.
        keys: the n-gram keys that were asked for; 0 where the caller had row ids.
        unique_keys: int64 scalar on the ids' device: how many of them differ, as far as was looked.
        invalid: bool scalar on the ids' device: the ids are refused, and nothing above means anything.
    """

    local_rows: Tensor
    counts: Tensor
    places: Tensor
    keys: int
    unique_keys: Tensor
    invalid: Tensor


def route_keys(keys: Tensor, hasher: NgramHasher, partition: RowPartition, rank: int, invalid: Tensor) -> Requests:
    """The requests of n-gram keys.

    Args:
        keys: int64 [..., ngram_size - 1].
        invalid: bool scalar, passed on.

    Returns:
        Requests whose `places` are [..., K].
    """
    flat = keys.reshape(-1, keys.shape[-1])
    rows, inverses, unique_keys = [], [], []
    for order in range(flat.shape[1]):
        unique, inverse = flat[:, order].contiguous(), None
        if _host_may_not_look(unique) or _repeats(unique):
            unique, inverse = distinct(unique, _NO_KEY)
        filler = unique == _NO_KEY
        rows_of_key = hasher.rows_of_keys(unique, order)
        if _host_may_not_look(unique):
            rows_of_key.masked_fill_(filler.unsqueeze(-1), partition.num_rows)
        rows.append(rows_of_key.to(_row_dtype(partition)))  # [U, heads]
        inverses.append(inverse)
        unique_keys.append(len(unique) - filler.sum())
    asked = torch.cat([part.flatten() for part in rows])
    if max(map(len, rows)) >= 2 * _WORTHWHILE_DUPLICATES * hasher.smallest_head:
        asked, number = distinct(asked, partition.num_rows)
        local_rows, counts, slots = group_by_owner(asked, partition, rank)
        slots = slots.index_select(0, number)
    else:
        local_rows, counts, slots = group_by_owner(asked, partition, rank)
    places = []  # of each order [T, heads]
    for part, inverse in zip(slots.split([part.numel() for part in rows]), inverses, strict=True):
        of_key = part.view(-1, hasher.heads_per_ngram)
        places.append(of_key if inverse is None else of_key.index_select(0, inverse))
    shape = (*keys.shape[:-1], hasher.num_heads)
    return Requests(local_rows, counts, torch.cat(places, dim=-1).view(shape), keys.numel(), sum(unique_keys), invalid)


def route_rows(row_ids: Tensor, partition: RowPartition, rank: int) -> Requests:
    """The requests of row ids (integers of any shape), refused where one is outside the table."""
    outside = (row_ids < 0) | (row_ids >= partition.num_rows)
    inside = row_ids.masked_fill(outside, 0).to(_row_dtype(partition)).flatten()
    asked, number = distinct(inside, partition.num_rows)
    local_rows, counts, slots = group_by_owner(asked, partition, rank)
    places = slots.index_select(0, number).view(row_ids.shape)
    none = torch.zeros((), dtype=torch.int64, device=row_ids.device)
    return Requests(local_rows, counts, places, 0, none, outside.any())


def distinct(values: Tensor, filler: int) -> tuple[Tensor, Tensor]:
    """Distinct values in the order of their first occurrence, and the number of each value among them.

    Args:
        values: integers [n], all below `filler` (or filler themselves).

    Returns:
        The distinct values, on a GPU with `filler` behind them up to n, because the host would have to wait for their
        number; and int64 [n].
    """
    in_order, source = values.sort(stable=True)
    begins = torch.ones_like(in_order, dtype=torch.bool)
    begins[1:] = in_order[1:] != in_order[:-1]
    group = begins.cumsum(0) - 1
    # The sort is stable: a group begins with its first occurrence. One term a group, so nothing is added up.
    first = torch.zeros_like(source).scatter_add_(0, group, source.masked_fill(~begins, 0))
    leader = torch.empty_like(source).scatter_(0, source, first.index_select(0, group))
    number = (leader == torch.arange(len(values), device=values.device)).cumsum(0) - 1
    inverse = number.index_select(0, leader)
    unique = torch.full_like(values, filler).scatter_(0, inverse, values)
    if len(values) and not _host_may_not_look(values):
        unique = unique[: int(number[-1]) + 1]
    return unique, inverse


def group_by_owner(rows: Tensor, partition: RowPartition, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [R] (N counts as filler) grouped by owner, each group in the rows' order.

    Returns:
        The rows as numbered by their owners, filler last; int64 [EP], how many each owner has; and int32 [R], which
        answer is each row's (see `Requests.places`).
    """
    # Memory is touched as little as can be: at this size a fresh temporary costs more than what is done to it.
    world_size = partition.world_size
    owners = partition.owner(rows).clamp_(max=world_size)  # the filler's is no rank's
    owners, order = owners.to(torch.uint8 if world_size < 255 else torch.int32).sort(stable=True)
    bounds = torch.searchsorted(owners, torch.arange(world_size + 2, device=rows.device, dtype=owners.dtype))
    counts = bounds.diff()
    boundaries = partition.boundaries_on(rows.device).to(rows.dtype)
    local_rows = rows.index_select(0, order).sub_(boundaries.repeat_interleave(counts, output_size=len(rows)))
    # The same dtype on all ranks, and half the bytes on the wire where it is int32.
    largest = -(-partition.num_rows // world_size)
    local_rows = local_rows.to(torch.int32 if largest <= _INT32_MAX else torch.int64)
    slots = answer_slots(counts, world_size, rank, len(rows))
    return local_rows, counts[:-1], torch.empty_like(slots).scatter_(0, order, slots)


def answer_slots(counts: Tensor, world_size: int, rank: int, total: int) -> Tensor:
    """int32 [total]: where the answers to requests, grouped by owner, are put: the rank's own behind all others'.

    Args:
        counts: int64 [>= EP], of each owner and perhaps of filler behind them; they sum to `total`.
    """
    others = counts.clone()
    others[rank] = 0
    starts = others.cumsum(0) - others
    starts[rank] = others[:world_size].sum()
    shift = (starts - (counts.cumsum(0) - counts)).int()
    slots = torch.arange(total, device=counts.device, dtype=torch.int32)
    return slots.add_(shift.repeat_interleave(counts, output_size=total))


def _host_may_not_look(tensor: Tensor) -> bool:
    """Whether sizes must not depend on values, because the host would have to wait for them."""
    return tensor.is_cuda


def _repeats(keys: Tensor) -> bool:
    """Whether enough of these keys are repeated to make them unique: looks at all occurrences of a 16th of them."""
    part = keys[(keys >> 11) & 15 == 0] if len(keys) > 1024 else keys
    return len(torch.unique(part)) < (1 - _WORTHWHILE_DUPLICATES) * len(part)


def _row_dtype(partition: RowPartition) -> torch.dtype:
    return torch.int32 if partition.num_rows <= _INT32_MAX else torch.int64
