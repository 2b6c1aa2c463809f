"""Requests against a plain loop over ids; the GPU's fixed-size form against the CPU's."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from skyrl_qwen38.ple import NgramHasher, RowPartition
from skyrl_qwen38.ple import routing as routing_module
from skyrl_qwen38.ple.routing import route_keys, route_rows, unique_sorted

VALID = torch.zeros((), dtype=torch.bool)


def answers_of(requests, partition: RowPartition) -> torch.Tensor:
    """The global row id that each place would get, if owners answered with their rows' numbers."""
    counts = requests.counts.tolist()
    owners = torch.arange(len(counts)).repeat_interleave(requests.counts)
    rows = requests.local_rows[: sum(counts)] + partition.boundaries[owners]
    return rows[requests.places]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 60), world_size=st.integers(1, 9), ids=st.lists(st.integers(0, 59), max_size=40), fixed=...
)
def test_each_row_is_asked_once_of_its_owner(num_rows: int, world_size: int, ids: list[int], fixed: bool):
    partition = RowPartition(num_rows, world_size)
    row_ids = torch.tensor([row % num_rows for row in ids], dtype=torch.int64)
    with _fixed_size(fixed):
        requests = route_rows(row_ids, partition)
    assert torch.equal(answers_of(requests, partition), row_ids)
    assert requests.counts.sum() == len(set(row_ids.tolist()))
    assert requests.counts.tolist() == [
        sum(start <= row < stop for row in set(row_ids.tolist()))
        for start, stop in (partition.bounds(rank) for rank in range(world_size))
    ]
    assert requests.local_rows.dtype == torch.int32
    assert not requests.invalid


class _fixed_size:
    """The form of `unique_sorted` that a GPU uses, on the CPU."""

    def __init__(self, fixed: bool):
        self.fixed = fixed

    def __enter__(self):
        original = self.original = unique_sorted
        routing_module.unique_sorted = lambda values, filler: original(values, filler, fixed_size=self.fixed)

    def __exit__(self, *_):
        routing_module.unique_sorted = self.original


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16, 40])
@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_keys_ask_for_the_rows_of_their_tokens(tiny_hasher, fixed, world_size, tokens):
    ids = torch.randint(0, 9, (tokens,), generator=torch.Generator().manual_seed(tokens))
    partition = RowPartition(tiny_hasher.num_rows, world_size)
    keys = tiny_hasher.keys(ids)
    with _fixed_size(fixed):
        requests = route_keys(keys, tiny_hasher, partition, VALID)
    row_ids = tiny_hasher.row_ids(ids)
    assert torch.equal(answers_of(requests, partition), row_ids)
    assert requests.counts.sum() == row_ids.unique().numel(), "a row is asked for twice"
    assert requests.keys == 2 * tokens
    assert requests.unique_keys == sum(keys[:, order].unique().numel() for order in range(2))


def test_the_fixed_size_form_hides_its_filler(tiny_hasher):
    """The filler's row ids never reach an owner: counts end before them."""
    values = torch.tensor([5, 3, 5, 9, 3], dtype=torch.int32)
    unique, inverse = unique_sorted(values, 99, fixed_size=True)
    assert unique.tolist() == [3, 5, 9, 99, 99]
    assert inverse.tolist() == [1, 0, 1, 2, 0]


@pytest.mark.parametrize("bad", [-1, 2304, 1 << 40])
def test_rows_outside_the_table_are_invalid(bad):
    partition = RowPartition(2304, 3)
    assert route_rows(torch.tensor([[0, bad, 5]]), partition).invalid


def test_row_numbers_of_more_rows_than_int32_holds():
    """Two ranks of a table of 5e9 rows: local numbers above 2^31 keep their width."""
    partition = RowPartition(5_000_000_000, 2)
    row_ids = torch.tensor([0, 2_499_999_999, 2_500_000_000, 4_999_999_999, 0])
    requests = route_rows(row_ids, partition)
    assert requests.local_rows.dtype == torch.int64
    assert requests.local_rows.tolist() == [0, 2_499_999_999, 0, 2_499_999_999]
    assert requests.counts.tolist() == [2, 2]
    assert torch.equal(answers_of(requests, partition), row_ids)


def test_the_released_hash_has_keys_below_the_filler():
    hasher = NgramHasher(vocab_size=248320, eos_token_id=248044)
    ids = torch.full((3,), 248319)
    assert hasher.keys(ids).max() < routing_module._NO_KEY
