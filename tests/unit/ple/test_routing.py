"""Requests against a plain loop over ids; the GPU's fixed-size form against the CPU's."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from skyrl_qwen38.ple import NgramHasher, RowPartition
from skyrl_qwen38.ple import routing as routing_module
from skyrl_qwen38.ple.routing import distinct, route_keys, route_rows

VALID = torch.zeros((), dtype=torch.bool)


def answers_of(requests, partition: RowPartition, rank: int) -> torch.Tensor:
    """The global row id that each place would get, if owners answered with their rows' numbers."""
    total = int(requests.counts.sum())
    asked = requests.local_rows[:total].split(requests.counts.tolist())
    answers = [rows + partition.bounds(owner)[0] for owner, rows in enumerate(asked)]
    return torch.cat([*answers[:rank], *answers[rank + 1 :], answers[rank]])[requests.places]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 60), world_size=st.integers(1, 9), ids=st.lists(st.integers(0, 59), max_size=40), fixed=...
)
def test_each_row_is_asked_once_of_its_owner(num_rows: int, world_size: int, ids: list[int], fixed: bool):
    partition = RowPartition(num_rows, world_size)
    row_ids = torch.tensor([row % num_rows for row in ids], dtype=torch.int64)
    with _fixed_size(fixed):
        requests = route_rows(row_ids, partition, world_size // 2)
    assert torch.equal(answers_of(requests, partition, world_size // 2), row_ids)
    assert requests.counts.sum() == len(set(row_ids.tolist()))
    assert requests.counts.tolist() == [
        sum(start <= row < stop for row in set(row_ids.tolist()))
        for start, stop in (partition.bounds(rank) for rank in range(world_size))
    ]
    assert requests.local_rows.dtype == torch.int32
    assert not requests.invalid


@contextmanager
def _fixed_size(fixed: bool) -> Iterator[None]:
    """The form that a GPU uses, whose sizes do not depend on values, on the CPU."""
    with mock.patch.object(routing_module, "_host_may_not_look", return_value=fixed):
        yield


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16, 40])
@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_keys_ask_for_the_rows_of_their_tokens(tiny_hasher, fixed, world_size, tokens):
    ids = torch.randint(0, 9, (tokens,), generator=torch.Generator().manual_seed(tokens))
    partition = RowPartition(tiny_hasher.num_rows, world_size)
    keys = tiny_hasher.keys(ids)
    with _fixed_size(fixed):
        requests = route_keys(keys, tiny_hasher, partition, world_size - 1, VALID)
    row_ids = tiny_hasher.row_ids(ids)
    assert torch.equal(answers_of(requests, partition, world_size - 1), row_ids)
    assert requests.counts.sum() == row_ids.unique().numel(), "a row is asked for twice"
    assert requests.keys == 2 * tokens
    assert requests.unique_keys == sum(keys[:, order].unique().numel() for order in range(2))


def test_the_fixed_size_form_hides_its_filler(tiny_hasher):
    """The filler's row ids never reach an owner: counts end before them."""
    values = torch.tensor([5, 3, 5, 9, 3], dtype=torch.int32)
    with _fixed_size(True):
        unique, inverse = distinct(values, 99)
    assert unique.tolist() == [5, 3, 9, 99, 99]
    assert inverse.tolist() == [0, 1, 0, 2, 1]


@given(values=st.lists(st.integers(-5, 5), max_size=60))
def test_distinct_values_keep_the_order_of_their_first_occurrence(values):
    expected = list(dict.fromkeys(values))
    unique, inverse = distinct(torch.tensor(values, dtype=torch.int64), 99)
    assert unique.tolist() == expected
    assert [expected[number] for number in inverse] == values


def test_rows_are_looked_through_where_the_heads_are_small(tiny_hasher, monkeypatch):
    """81 bigrams and hundreds of trigrams in heads of 101 rows share rows; in the released heads they do not."""
    ids = torch.randint(0, 9, (600,), generator=torch.Generator().manual_seed(1))
    looked_through = []
    monkeypatch.setattr(routing_module, "distinct", lambda v, f: (looked_through.append(v.dtype), distinct(v, f))[1])
    route_keys(tiny_hasher.keys(ids), tiny_hasher, RowPartition(tiny_hasher.num_rows, 3), 0, VALID)
    released = NgramHasher(vocab_size=512, eos_token_id=2)
    route_keys(released.keys(ids), released, RowPartition(released.num_rows, 3), 0, VALID)
    assert looked_through == [torch.int64, torch.int64, torch.int32, torch.int64, torch.int64]


@pytest.mark.parametrize("bad", [-1, 2304, 1 << 40])
def test_rows_outside_the_table_are_invalid(bad):
    partition = RowPartition(2304, 3)
    assert route_rows(torch.tensor([[0, bad, 5]]), partition, 0).invalid


def test_row_numbers_of_more_rows_than_int32_holds():
    """Two ranks of a table of 5e9 rows: local numbers above 2^31 keep their width."""
    partition = RowPartition(5_000_000_000, 2)
    row_ids = torch.tensor([0, 2_499_999_999, 2_500_000_000, 4_999_999_999, 0])
    requests = route_rows(row_ids, partition, 0)
    assert requests.local_rows.dtype == torch.int64
    assert requests.local_rows.tolist() == [0, 2_499_999_999, 0, 2_499_999_999]
    assert requests.counts.tolist() == [2, 2]
    assert torch.equal(answers_of(requests, partition, 0), row_ids)


def test_the_released_hash_has_keys_below_the_filler():
    hasher = NgramHasher(vocab_size=248320, eos_token_id=248044)
    ids = torch.full((3,), 248319)
    assert hasher.keys(ids).max() < routing_module._NO_KEY
