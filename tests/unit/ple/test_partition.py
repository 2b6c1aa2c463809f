"""Ranges and owners of the row partition."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_qwen38.ple import RowPartition


@given(num_rows=st.integers(1, 3_000), world_size=st.integers(1, 70))
def test_ranges_tile_the_table_evenly_and_owners_are_their_inverse(num_rows, world_size):
    partition = RowPartition(num_rows, world_size)
    bounds = [partition.bounds(rank) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_rows
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    assert {stop - start for start, stop in bounds} <= {num_rows // world_size, -(-num_rows // world_size)}
    assert partition.boundaries.tolist() == [0, *(stop for _, stop in bounds)]
    owners = [rank for rank, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
    assert partition.owner(torch.arange(num_rows)).tolist() == owners


@given(num_rows=st.integers(1, 1 << 40), world_size=st.integers(1, 1024), data=st.data())
def test_every_boundary_of_a_large_table_is_exact(num_rows, world_size, data):
    partition = RowPartition(num_rows, world_size)
    rank = data.draw(st.integers(0, world_size - 1))
    start, stop = partition.bounds(rank)
    if start < stop:
        assert partition.owner(torch.tensor([start, stop - 1])).tolist() == [rank, rank]


@pytest.mark.parametrize("world_size", [1, 3, 7, 16, 48])
def test_int32_row_ids_of_the_released_table_find_their_owner(world_size):
    """The product with the number of ranks leaves int32 from 7 ranks on."""
    partition = RowPartition(320_001_536, world_size)
    ids = torch.tensor([0, 160_000_000, 320_001_445, 320_001_535], dtype=torch.int32)
    expected = [next(k for k in range(world_size) if r < partition.bounds(k)[1]) for r in ids.tolist()]
    assert partition.owner(ids).tolist() == expected
    assert partition.owner(ids.view(2, 2)).shape == (2, 2)


@pytest.mark.parametrize(("num_rows", "world_size"), [(0, 1), (5, 0), (-1, 2), (1 << 60, 8)])
def test_impossible_partitions_are_refused(num_rows, world_size):
    with pytest.raises(ValueError, match=str(num_rows)):
        RowPartition(num_rows, world_size)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_the_group_has_no_rows(rank):
    with pytest.raises(IndexError, match=f"rank {rank} "):
        RowPartition(10, 3).bounds(rank)
