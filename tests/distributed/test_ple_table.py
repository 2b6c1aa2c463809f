"""The sharded tables over gloo ranks: rows bit for bit, one schedule of collectives, errors on all ranks."""

import os
import shutil
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from skyrl_qwen38.ple import HeadShardedTable, NgramHasher, RankFailure, RowShardedTable, TableSource
from tests.conftest import TABLE_MODULE
from tests.ranks import RankError

SECONDS_TO_FAIL = 10  # an error that is not agreed on would wait for gloo's time limit instead


class CollectiveCalls:
    """Counts calls of torch.distributed's collectives in this process, in order."""

    NAMES = ("all_to_all_single", "all_gather_object", "all_gather", "all_reduce", "broadcast", "barrier")

    def __enter__(self) -> list[str]:
        self.calls: list[str] = []
        self.originals = {name: getattr(dist, name) for name in self.NAMES}
        for name, original in self.originals.items():
            setattr(dist, name, self._counting(name, original))
        return self.calls

    def _counting(self, name, original):
        def call(*args, **kwargs):
            self.calls.append(name)
            return original(*args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, original in self.originals.items():
            setattr(dist, name, original)


def tokens_of(rank: int, count: int) -> torch.Tensor:
    """Ids with repetition and end-of-sequence runs, different on each rank."""
    return torch.randint(0, 9, (count,), generator=torch.Generator().manual_seed(100 + rank))


def failure_of(call) -> dict[int, str]:
    """The causes by rank of the RankFailure that `call` raises, which must come quickly."""
    begin = time.monotonic()
    with pytest.raises(RankFailure) as error:
        call()
    assert time.monotonic() - begin < SECONDS_TO_FAIL
    return error.value.failures


# ---- rows ----


def looks_up(rank, world_size, folder, hasher, table, counts, kind=RowShardedTable):
    sharded = kind.load(folder, hasher)
    ids = tokens_of(rank, counts[rank])
    rows = sharded.start(ids).wait()
    row_ids = hasher.row_ids(ids)
    assert rows.dtype == table.dtype
    assert not rows.requires_grad
    assert torch.equal(rows, table[row_ids])
    assert torch.equal(sharded.lookup(row_ids), rows)
    assert torch.equal(sharded.start(ids[None]).wait(), rows[None])
    return sharded.stats()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "counts", [[40], [40, 7], [0, 9], [0, 0], [40, 7, 300], [0, 25, 0], [3, 0, 0], [0, 0, 0]], ids=str
)
def test_rows_equal_the_whole_table(ranks, table_checkpoint, tiny_hasher, dtype, counts):
    folder, table = table_checkpoint(dtype=dtype)
    ranks.run(looks_up, folder, tiny_hasher, table, counts, world_size=len(counts))


@pytest.mark.parametrize("counts", [[40], [40, 7], [0, 9]], ids=str)
def test_the_head_split_gives_the_same_rows(ranks, table_checkpoint, tiny_hasher, counts):
    folder, table = table_checkpoint()
    ranks.run(looks_up, folder, tiny_hasher, table, counts, HeadShardedTable, world_size=len(counts))


def test_more_ranks_than_rows(ranks, table_checkpoint):
    """Two rows over three ranks: one of them holds nothing."""
    hasher = NgramHasher(
        vocab_size=512, eos_token_id=2, heads_per_ngram=1, ngram_size=2, ngram_vocab_size_base=2, divisible_by=1
    )
    assert hasher.num_rows == 2
    folder, table = table_checkpoint(hasher=hasher, shards=1, files=1)
    ranks.run(looks_up, folder, hasher, table, [5, 0, 11], world_size=3)


def asks_one_owner(rank, world_size, folder, hasher, table, owner):
    sharded = RowShardedTable.load(folder, hasher)
    start, stop = owner * len(table) // world_size, (owner + 1) * len(table) // world_size
    # Rank 1 asks for nothing; the others for the owner's rows, its first and last among them, many times over.
    row_ids = torch.empty(0, 16, dtype=torch.int64) if rank == 1 else torch.tensor([[start, stop - 1, start + 5] * 4])
    assert torch.equal(sharded.lookup(row_ids), table[row_ids])


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_all_rows_of_one_owner(ranks, table_checkpoint, tiny_hasher, owner):
    ranks.run(asks_one_owner, *_folder_hasher_table(table_checkpoint, tiny_hasher), owner, world_size=3)


def _folder_hasher_table(table_checkpoint, hasher):
    folder, table = table_checkpoint()
    return folder, hasher, table


def looks_up_packed_and_padded(rank, world_size, folder, hasher, table):
    sharded = RowShardedTable.load(folder, hasher)
    lengths = [[5, 1, 9], [15], [0, 2]][rank]
    documents = tokens_of(rank, sum(lengths)).split(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = sharded.start(torch.cat(documents), cu_seqlens).wait()
    alone = [sharded.hasher.row_ids(document) for document in documents]
    assert torch.equal(packed, table[torch.cat(alone)])

    batch = torch.full((2, 6), -1)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    batch[0, 2:], mask[0, 2:] = tokens_of(rank, 4), True
    batch[1, :3], mask[1, :3] = tokens_of(rank, 3), True
    rows = sharded.start(batch, attention_mask=mask).wait()
    assert rows.shape == (2, 6, 16, 4)
    assert torch.equal(rows[0, 2:], table[hasher.row_ids(tokens_of(rank, 4))])
    assert torch.equal(rows[1, :3], table[hasher.row_ids(tokens_of(rank, 3))])


def test_documents_of_packed_and_padded_batches(ranks, table_checkpoint, tiny_hasher):
    ranks.run(looks_up_packed_and_padded, *_folder_hasher_table(table_checkpoint, tiny_hasher), world_size=3)


# ---- the exchange ----


def counts_collectives(rank, world_size, folder, hasher, kind):
    table = kind.load(folder, hasher)
    with CollectiveCalls() as calls:
        for tokens in ([4, 4, 4], [4, 0, 1], [0, 0, 0]):  # the second micro-batch leaves rank 1 with nothing
            table.start(tokens_of(rank, tokens[rank])).wait()
    return calls


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [(RowShardedTable, 1), (RowShardedTable, 2), (RowShardedTable, 3), (HeadShardedTable, 1), (HeadShardedTable, 2)],
)
def test_every_rank_makes_the_same_calls(ranks, table_checkpoint, tiny_hasher, kind, world_size):
    calls = ranks.run(counts_collectives, table_checkpoint()[0], tiny_hasher, kind, world_size=world_size)
    expected = [] if world_size == 1 else ["all_to_all_single"] * 9  # sizes, row numbers, rows
    assert calls == [expected] * world_size


def two_in_flight(rank, world_size, folder, hasher, table):
    sharded = RowShardedTable.load(folder, hasher)
    first, second = tokens_of(rank, 0 if rank == 1 else 30), tokens_of(rank + 10, 20)
    handles = [sharded.start(first), sharded.start(second)]
    rows = [handle.wait() for handle in reversed(handles)]
    assert torch.equal(rows[0], table[hasher.row_ids(second)])
    assert torch.equal(rows[1], table[hasher.row_ids(first)])
    with CollectiveCalls() as calls:
        assert handles[0].wait() is rows[1]  # as activation recompute asks again
    assert calls == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_lookups_under_way(ranks, table_checkpoint, tiny_hasher, world_size):
    ranks.run(two_in_flight, *_folder_hasher_table(table_checkpoint, tiny_hasher), world_size=world_size)


def moves_each_row_once(rank, world_size, folder, hasher):
    table = RowShardedTable.load(folder, hasher)
    table.start(tokens_of(rank, 6).repeat(8).view(8, 6)).wait()  # one prompt, eight samples
    keys = hasher.keys(tokens_of(rank, 6))
    # Too few keys to look through their rows for duplicates, too.
    unique = [
        row for order in range(2) for row in hasher.rows_of_keys(keys[:, order].unique(), order).flatten().tolist()
    ]
    owners = Counter(((row + 1) * world_size - 1) // table.num_rows for row in unique)
    return table.stats(), len(unique), [owners[r] for r in range(world_size)]


def test_stats_count_unique_rows_and_the_bytes_that_travel(ranks, table_checkpoint, tiny_hasher):
    results = ranks.run(moves_each_row_once, table_checkpoint()[0], tiny_hasher, world_size=3)
    row_bytes, number_bytes = 4 * 2, 4
    for rank, (stats, unique, asked) in enumerate(results):
        away = unique - asked[rank]
        came_in = sum(others[rank] for other, (_, _, others) in enumerate(results) if other != rank)
        assert stats["lookups"] == 1
        assert stats["tokens"] == 48
        assert stats["keys"] == 48 * 2
        assert stats["row_ids"] == 48 * 16
        assert stats["unique_rows"] == unique
        assert stats["unique_keys"] <= 12
        assert stats["bytes_sent"] == away * number_bytes + came_in * row_bytes
        assert stats["bytes_received"] == came_in * number_bytes + away * row_bytes
        assert all(stats[f"{phase}_seconds"] > 0 for phase in ("hash", "sizes", "input_dist", "lookup", "output_dist"))


def uses_a_subgroup(rank, world_size, folder, hasher, table):
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    sharded = RowShardedTable.load(folder, hasher, group=groups[min(rank, 1)])
    ids = tokens_of(rank, 10)
    assert torch.equal(sharded.start(ids).wait(), table[hasher.row_ids(ids)])
    bad = torch.tensor([600]) if rank == 2 else ids
    if rank:
        return failure_of(lambda: sharded.start(bad))
    return sharded.rank, sharded.world_size


def test_a_group_of_its_own_names_global_ranks(ranks, table_checkpoint, tiny_hasher):
    alone, *others = ranks.run(uses_a_subgroup, *_folder_hasher_table(table_checkpoint, tiny_hasher), world_size=3)
    assert alone == (0, 1)
    assert others == [{2: "input_ids holds the token id 600, outside the vocabulary of 512"}] * 2


# ---- errors are agreed on ----


def asks_outside(rank, world_size, folder, hasher, kind, bad_row):
    table = kind.load(folder, hasher)
    good = hasher.row_ids(tokens_of(rank, 3))
    bad = good.clone()
    bad[1, 15] = bad_row
    failures = failure_of(lambda: table.lookup(bad if rank == world_size - 1 else good))
    assert torch.equal(table.lookup(good), table.lookup(good))  # the group still works
    return failures


@pytest.mark.parametrize("bad_row", [-1, 2304, 1 << 40])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_row_id_out_of_range_stops_all_ranks(ranks, table_checkpoint, tiny_hasher, world_size, bad_row):
    folder, _ = table_checkpoint()
    failures = ranks.run(asks_outside, folder, tiny_hasher, RowShardedTable, bad_row, world_size=world_size)
    cause = f"the row id {bad_row} is not in the n-gram table of 2304 rows"
    assert failures == [{world_size - 1: cause}] * world_size


def test_a_row_id_of_another_head_stops_the_head_split(ranks, table_checkpoint, tiny_hasher):
    failures = ranks.run(asks_outside, table_checkpoint()[0], tiny_hasher, HeadShardedTable, 0, world_size=2)
    assert failures == [{1: "the row id 0 is not in the rows of its head"}] * 2


def starts_with_a_bad_argument(rank, world_size, folder, hasher):
    table = RowShardedTable.load(folder, hasher)
    cu_seqlens = torch.tensor([0, 9 if rank == 0 else 3])
    return failure_of(lambda: table.start(tokens_of(rank, 3), cu_seqlens))


def test_a_refused_argument_stops_all_ranks(ranks, table_checkpoint, tiny_hasher):
    failures = ranks.run(starts_with_a_bad_argument, table_checkpoint()[0], tiny_hasher, world_size=3)
    assert failures == [{0: "cu_seqlens must rise from 0 to the row's 3 tokens, got [0, 9]"}] * 3


def loads_its_own_folder(rank, world_size, folders, hasher, kind=RowShardedTable):
    return failure_of(lambda: kind.load(folders[rank], hasher))


def lose(folder: Path) -> None:
    next(folder.glob("model-00002*")).unlink()


def truncate(folder: Path) -> None:
    file = next(folder.glob("model-00002*"))
    os.truncate(file, file.stat().st_size - 50)


@pytest.mark.parametrize("damage", [lose, truncate])
def test_a_file_that_one_rank_lacks_stops_all_ranks(ranks, table_checkpoint, tiny_hasher, tmp_path, damage):
    folder, _ = table_checkpoint()
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    damage(damaged)
    failures = ranks.run(loads_its_own_folder, [folder, damaged, folder], tiny_hasher, world_size=3)
    assert failures[0] == failures[1] == failures[2]
    assert list(failures[0]) == [1]
    assert "model-00002-of-00002.safetensors" in failures[0][1]


def test_ranks_with_different_tables_are_refused(ranks, table_checkpoint, tiny_hasher, tmp_path):
    folder, _ = table_checkpoint()
    wider, _ = table_checkpoint(row_dim=8)
    failures = ranks.run(loads_its_own_folder, [folder, wider], tiny_hasher, world_size=2)
    assert failures[0] == failures[1]
    assert "2304 rows of 4 in torch.bfloat16" in failures[0][0]
    assert "2304 rows of 8 in torch.bfloat16" in failures[0][1]


def reads_badly(rank, world_size, folder, hasher):
    source = TableSource.open(folder)
    if rank == 1:

        def read_into(out, start):
            raise OSError("the disk is gone")

        source.read_into = read_into
    return failure_of(lambda: RowShardedTable.load(source, hasher))


def test_a_read_that_fails_while_filling_stops_all_ranks(ranks, table_checkpoint, tiny_hasher):
    failures = ranks.run(reads_badly, table_checkpoint()[0], tiny_hasher, world_size=3)
    assert failures == [{1: "the disk is gone"}] * 3


def loads_with_three_ranks(rank, world_size, folder, hasher):
    with CollectiveCalls() as calls:
        try:
            HeadShardedTable.load(folder, hasher)
        finally:
            assert calls == []


def test_the_head_split_refuses_three_ranks(ranks, table_checkpoint, tiny_hasher):
    with pytest.raises(RankError) as error:
        ranks.run(loads_with_three_ranks, table_checkpoint()[0], tiny_hasher, world_size=3)
    sentence = (
        "the head-sharded n-gram table needs an EP size that divides its 16 heads, got EP=3: "
        "enable the patch ple_row_shard or change the EP size"
    )
    assert [(type(e), str(e)) for e in error.value.errors.values()] == [(ValueError, sentence)] * 3


# ---- identity ----


def fingerprints(rank, world_size, folders, hasher):
    tables = [RowShardedTable.load(folder, hasher) for folder in folders]
    return [table.fingerprint() for table in tables]


def test_the_fingerprint_is_of_the_table_and_not_of_its_files_or_split(ranks, table_checkpoint, tiny_hasher):
    folders = [table_checkpoint(shards=s, files=f)[0] for s, f in [(5, 2), (1, 1)]]
    folders.append(table_checkpoint(dtype=torch.float16)[0])
    by_rank = ranks.run(fingerprints, folders, tiny_hasher, world_size=3)
    assert by_rank[0] == by_rank[1] == by_rank[2] == ranks.run(fingerprints, folders, tiny_hasher, world_size=1)[0]
    same, cut_otherwise, other_dtype = by_rank[0]
    assert same == cut_otherwise != other_dtype


# ---- planned steps ----


def plans_a_step(rank, world_size, folder, hasher, table, storage):
    sharded = RowShardedTable.load(folder, hasher, storage=storage)
    lengths = [[5, 9, 0, 300], [0, 0, 0, 0], [7, 1, 2, 3]][rank]
    batches = [(tokens_of(10 * i + rank, length), None) for i, length in enumerate(lengths)]
    packed = torch.cat([tokens_of(77, 4), tokens_of(78, 3)])
    batches.append((packed, torch.tensor([0, 4, 7])))
    with CollectiveCalls() as calls:
        sharded.plan(batches)
        handles = [sharded.start(*batch) for batch in batches]
        rows = [handle.wait() for handle in handles]
    for (ids, cu_seqlens), found in zip(batches, rows, strict=True):
        assert torch.equal(found, table[hasher.row_ids(ids, cu_seqlens)])
    assert torch.equal(sharded.start(packed).wait(), table[hasher.row_ids(packed)])  # the plan is used up
    return calls


@pytest.mark.parametrize(("storage", "exchanged"), [("pinned", True), ("mapped", True), ("node", False)])
def test_a_planned_step_exchanges_sizes_once(ranks, table_checkpoint, tiny_hasher, storage, exchanged):
    arguments = _folder_hasher_table(table_checkpoint, tiny_hasher)
    calls = ranks.run(plans_a_step, *arguments, storage, world_size=3)
    assert calls == [["all_to_all_single"] * (1 + 2 * 5) if exchanged else []] * 3


def plans_many(rank, world_size, folder, hasher, table):
    sharded = RowShardedTable.load(folder, hasher)
    batches = [(tokens_of(i + rank, 3 * (i % 2)), None) for i in range(70)]
    with CollectiveCalls() as calls:
        sharded.plan(batches)
    for ids, _ in batches:
        assert torch.equal(sharded.start(ids).wait(), table[hasher.row_ids(ids)])
    return calls


def test_a_collective_carries_the_sizes_of_32_lookups(ranks, table_checkpoint, tiny_hasher):
    calls = ranks.run(plans_many, *_folder_hasher_table(table_checkpoint, tiny_hasher), world_size=2)
    assert calls == [["all_to_all_single"] * 3] * 2


def plans_badly(rank, world_size, folder, hasher, fault):
    table = RowShardedTable.load(folder, hasher)
    ids = tokens_of(rank, 4)
    if fault == "other numbers":
        return failure_of(lambda: table.plan([(ids, None)] * (2 + rank)))
    if fault == "other calls":
        return failure_of(lambda: table.plan([(ids, None)]) if rank else table.start(ids))
    if fault == "a bad id":
        bad = torch.tensor([1, 512]) if rank == 1 else ids
        return failure_of(lambda: table.plan([(ids, None), (bad, None)]))
    raise ValueError(fault)


def test_different_numbers_of_lookups_stop_all_ranks(ranks, table_checkpoint, tiny_hasher):
    for failures in ranks.run(plans_badly, table_checkpoint()[0], tiny_hasher, "other numbers", world_size=3):
        assert list(failures) == [0, 1, 2]
        assert [f"for {count} lookups" in failures[rank] for rank, count in ((0, 2), (1, 3), (2, 4))] == [True] * 3


def test_different_calls_stop_all_ranks(ranks, table_checkpoint, tiny_hasher):
    for failures in ranks.run(plans_badly, table_checkpoint()[0], tiny_hasher, "other calls", world_size=3):
        assert "start" in failures[0]
        assert "plan" in failures[1]
        assert "plan" in failures[2]


def test_a_bad_id_in_a_planned_step_stops_all_ranks(ranks, table_checkpoint, tiny_hasher):
    failures = ranks.run(plans_badly, table_checkpoint()[0], tiny_hasher, "a bad id", world_size=3)
    assert failures == [{1: "input_ids holds the token id 512, outside the vocabulary of 512"}] * 3


def starts_too_rarely(rank, world_size, folder, hasher):
    table = RowShardedTable.load(folder, hasher)
    ids = torch.empty(0, dtype=torch.int64)  # a lookup of nothing, so that ranks may part without a collective
    table.plan([(ids, None)] * 2)
    if rank == 1:
        table._planned.popleft()
    return failure_of(lambda: table.plan([(ids, None)]))


def test_a_planned_lookup_that_was_never_started_stops_all_ranks(ranks, table_checkpoint, tiny_hasher):
    failures = ranks.run(starts_too_rarely, table_checkpoint()[0], tiny_hasher, world_size=2)
    assert failures[0] == failures[1]
    assert failures[0][1] == "1 planned lookups were never started before the next plan"


def starts_out_of_order(rank, world_size, folder, hasher):
    table = RowShardedTable.load(folder, hasher)
    first, second = tokens_of(rank, 4), tokens_of(rank + 5, 4)
    table.plan([(first, None), (second, None)])
    with pytest.raises(ValueError, match="in the order of the plan"):
        table.start(second)


def test_micro_batches_start_in_the_order_of_the_plan(ranks, table_checkpoint, tiny_hasher):
    ranks.run(starts_out_of_order, table_checkpoint()[0], tiny_hasher, world_size=2)


# ---- storage ----


def fingerprint_and_rows(rank, world_size, folder, hasher, storage, kind=RowShardedTable):
    table = kind.load(folder, hasher, storage=storage)
    return table.fingerprint(), table.storage, table.start(tokens_of(0, 30)).wait()


def test_rows_and_fingerprint_are_those_of_the_table_wherever_it_lives(ranks, table_checkpoint, tiny_hasher):
    folder, table = table_checkpoint()
    expected = table[tiny_hasher.row_ids(tokens_of(0, 30))]
    prints = set()
    for world_size, storage, kind in (
        (1, "pinned", RowShardedTable),
        (3, "auto", RowShardedTable),
        (3, "mapped", RowShardedTable),
        (3, "node", RowShardedTable),
        (2, "pinned", HeadShardedTable),
    ):
        arguments = (folder, tiny_hasher, storage, kind)
        for fingerprint, chosen, rows in ranks.run(fingerprint_and_rows, *arguments, world_size=world_size):
            prints.add(fingerprint)
            assert chosen == ("pinned" if storage == "auto" else storage)
            assert torch.equal(rows, expected)
    assert len(prints) == 1


def chooses_by_the_worst_rank(rank, world_size, folder, hasher, storage):
    from skyrl_qwen38.ple import storage as storage_module

    free = storage_module._free_memory
    # As on two nodes, one of which has too little.
    storage_module.socket.gethostname, name = lambda: f"node{rank}", storage_module.socket.gethostname
    storage_module._free_memory = lambda: 100 if rank == 1 else 1 << 40
    try:
        return RowShardedTable.load(folder, hasher, storage=storage).storage
    except ValueError as error:
        return str(error)
    finally:
        storage_module._free_memory, storage_module.socket.gethostname = free, name


def test_the_node_with_the_least_memory_decides_for_all(ranks, table_checkpoint, tiny_hasher):
    folder, _ = table_checkpoint()
    assert ranks.run(chooses_by_the_worst_rank, folder, tiny_hasher, "auto", world_size=3) == ["mapped"] * 3
    refused = ranks.run(chooses_by_the_worst_rank, folder, tiny_hasher, "node", world_size=3)
    assert len(set(refused)) == 1
    assert "'node' does not fit" in refused[0]
    assert "on node node1" in refused[0]


def loads_twice(rank, world_size, folder, hasher):
    first = RowShardedTable.load(folder, hasher)
    second = RowShardedTable.load(folder, hasher)  # as a reference model on the same ranks does
    ids = tokens_of(rank, 9)
    assert torch.equal(first.start(ids).wait(), second.start(ids).wait())
    return first._rows.shared, second._rows.shared


def test_a_reference_model_on_the_same_ranks_shares_the_rows(ranks, table_checkpoint, tiny_hasher):
    folder, _ = table_checkpoint(row_dim=6)
    assert ranks.run(loads_twice, folder, tiny_hasher, world_size=3) == [(False, True)] * 3


def looks_up_fp8(rank, world_size, folder, hasher, expected):
    table = RowShardedTable.load(folder, hasher)
    rows = table.start(tokens_of(rank, 40)).wait()
    stats = table.stats()
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, expected[hasher.row_ids(tokens_of(rank, 40))])
    assert table._rows.row_bytes == 4  # in memory and on the wire a byte an element
    return stats["bytes_received"]


def test_an_fp8_table_travels_in_fp8(ranks, table_checkpoint, tiny_hasher, tmp_path):
    _, table = table_checkpoint(dtype=torch.float32)
    scale = 0.37
    stored = (table / scale).to(torch.float8_e4m3fn)
    save_file(
        {
            f"{TABLE_MODULE}ngram_embedding.weight": stored,
            f"{TABLE_MODULE}ngram_embedding.weight_scale": torch.tensor(scale),
        },
        tmp_path / "model.safetensors",
    )
    expected = (stored.double() * torch.tensor(scale).double()).to(torch.bfloat16)  # rounded once
    ranks.run(looks_up_fp8, tmp_path, tiny_hasher, expected, world_size=3)


# ---- many ranks ----


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [4, 5, 6, 7, 8])
def test_uneven_tokens_on_many_ranks(ranks, table_checkpoint, tiny_hasher, dtype, world_size):
    folder, table = table_checkpoint(dtype=dtype)
    counts = [0, 1, 2, 9, 511, 4096, 0, 3][:world_size]
    ranks.run(looks_up, folder, tiny_hasher, table, counts, world_size=world_size, timeout=120)


# ---- a rank that is gone ----


def loses_a_peer(rank, world_size, folder, hasher):
    table = RowShardedTable.load(folder, hasher)
    ids = tokens_of(rank, 5)
    table.start(ids).wait()
    if rank == 2:
        return None  # its process group is destroyed; the peers' third call finds nobody
    return failure_of(lambda: [table.start(ids).wait() for _ in range(2)])


def test_a_rank_that_makes_fewer_calls_and_leaves_ends_its_peers(ranks, table_checkpoint, tiny_hasher):
    failures = ranks.run(loses_a_peer, table_checkpoint()[0], tiny_hasher, world_size=3)
    for rank in (0, 1):
        assert "a peer left the n-gram table's exchange" in failures[rank][rank]


def time_limits(rank, world_size, folder, hasher):
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=17))
    table = RowShardedTable.load(folder, hasher, group=group)
    own = table._exchange._group
    assert own is not group
    return own._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_the_exchange_has_a_group_of_its_own_with_the_time_limit_of_the_given_one(ranks, table_checkpoint, tiny_hasher):
    assert ranks.run(time_limits, table_checkpoint()[0], tiny_hasher, world_size=2) == [17, 17]
