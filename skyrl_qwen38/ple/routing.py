"""Which rows a rank asks each owner for, and where each answer goes. Pure functions of ids; nothing is sent.

Sorting does all of it at once: it finds the duplicates, groups the rows by owner (owners hold contiguous rows), and
lets owners gather in rising order. Keys are made unique before rows, because a token has ngram_size - 1 keys and
heads_per_ngram times as many rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_qwen38.ple.hashing import NgramHasher
from skyrl_qwen38.ple.partition import RowPartition

_NO_KEY = (1 << 63) - 1  # above every key: hashing keeps them below 5.9e18
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class Requests:
    """The rows that one rank asks for, grouped by the rank that owns them.

    Attributes:
        local_rows: integers [>= R], numbered from the owner's first row; those of rank 0 first. What lies beyond the
            first R = sum(counts) is filler: on a GPU R is not known until the host is told.
        counts: int64 [EP], how many of them each rank owns, on the ids' device.
        places: int64, shaped like the row ids that were asked for: which of the R answers belongs there.
        keys: the n-gram keys that were asked for; 0 where the caller had row ids.
        unique_keys: int64 scalar on the ids' device: how many of them differ.
        invalid: bool scalar on the ids' device: the ids are refused, and nothing above means anything.
    """

    local_rows: Tensor
    counts: Tensor
    places: Tensor
    keys: int
    unique_keys: Tensor
    invalid: Tensor

    @staticmethod
    def nothing(world_size: int, device: torch.device) -> "Requests":
        """The requests of a rank that failed before it had any."""
        none = torch.zeros((), dtype=torch.int64, device=device)
        return Requests(none.new_zeros(0), none.new_zeros(world_size), none.new_zeros(0), 0, none, none == 0)


def route_keys(keys: Tensor, hasher: NgramHasher, partition: RowPartition, invalid: Tensor) -> Requests:
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
        unique, inverse = unique_sorted(flat[:, order].contiguous(), _NO_KEY)
        filler = unique == _NO_KEY
        rows_of_key = hasher.rows_of_keys(unique, order).masked_fill(filler.unsqueeze(-1), partition.num_rows)
        rows.append(rows_of_key.to(_row_dtype(partition)))  # [U, heads]
        inverses.append(inverse)
        unique_keys.append(len(unique) - filler.sum())
    local_rows, counts, numbers = _by_owner(torch.cat([part.flatten() for part in rows]), partition)
    places, begin = [], 0
    for part, inverse in zip(rows, inverses, strict=True):
        of_key = numbers[begin : begin + part.numel()].view_as(part)
        places.append(of_key.index_select(0, inverse))  # [T, heads]
        begin += part.numel()
    shape = (*keys.shape[:-1], hasher.num_heads)
    return Requests(local_rows, counts, torch.cat(places, dim=-1).view(shape), keys.numel(), sum(unique_keys), invalid)


def route_rows(row_ids: Tensor, partition: RowPartition) -> Requests:
    """The requests of row ids (integers of any shape), refused where one is outside the table."""
    outside = (row_ids < 0) | (row_ids >= partition.num_rows)
    inside = row_ids.masked_fill(outside, 0).to(_row_dtype(partition)).flatten()
    local_rows, counts, numbers = _by_owner(inside, partition)
    none = torch.zeros((), dtype=torch.int64, device=row_ids.device)
    return Requests(local_rows, counts, numbers.view(row_ids.shape), 0, none, outside.any())


def unique_sorted(values: Tensor, filler: int, fixed_size: bool | None = None) -> tuple[Tensor, Tensor]:
    """Distinct values in rising order, and the number of each value among them.

    Args:
        values: integers [n], none above `filler`.
        fixed_size: True returns n values, `filler` behind the distinct ones. Their number depends on the data, and on
            a GPU the host would have to wait for it: so that is the default there.

    Returns:
        The distinct values, and int64 [n].
    """
    if not (values.is_cuda if fixed_size is None else fixed_size):
        return torch.unique(values, return_inverse=True)
    in_order, source = values.sort()
    first = torch.ones_like(in_order, dtype=torch.bool)
    first[1:] = in_order[1:] != in_order[:-1]
    number = first.cumsum(0) - 1
    unique = torch.full_like(in_order, filler).scatter_(0, number, in_order)
    return unique, torch.empty_like(number).scatter_(0, source, number)


def _by_owner(rows: Tensor, partition: RowPartition) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct rows numbered from their owner's first, how many each owner has, and each row's number among them."""
    boundaries = partition.boundaries.to(device=rows.device, dtype=rows.dtype)
    unique, numbers = unique_sorted(rows, partition.num_rows)
    counts = torch.searchsorted(unique, boundaries).diff()
    owners = torch.searchsorted(boundaries, unique, right=True) - 1  # the filler's is EP, whose boundary is its own
    local_rows = unique - boundaries[owners]
    # The same dtype on all ranks, and half the bytes on the wire.
    largest = -(-partition.num_rows // partition.world_size)
    return local_rows.to(torch.int32 if largest <= _INT32_MAX else torch.int64), counts, numbers


def _row_dtype(partition: RowPartition) -> torch.dtype:
    return torch.int32 if partition.num_rows <= _INT32_MAX else torch.int64
