"""The pool of ranks that the other tests trust: what it returns, raises and leaves behind."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from skyrl_qwen38 import cpu
from tests.ranks import RankError, RankPool, RanksLost


def gathers(rank, world_size, value):
    values = torch.zeros(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(values, torch.tensor([value + rank]))
    return values.tolist()


def tells_its_process(rank, world_size):
    return os.getpid(), os.environ.get("RANKS_TEST"), torch.get_num_threads()


def raises_on_last(rank, world_size):
    if rank == world_size - 1:
        raise KeyError("the cause")
    return rank


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def raises_unpicklable(rank, world_size):
    raise Unpicklable(1, 2)


def dies(rank, world_size):
    if rank == 1:
        os._exit(3)
    dist.barrier()


def sleeps(rank, world_size):
    time.sleep(60 if rank == 0 else 0)


def leaves_megatron_groups(rank, world_size):
    cpu.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size)
    return parallel_state.model_parallel_is_initialized()


def has_megatron_groups(rank, world_size):
    return sys.modules["megatron.core.parallel_state"].model_parallel_is_initialized()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("world_size", [2, 1, 3])
def test_results_come_in_rank_order(ranks, world_size):
    expected = [5 + rank for rank in range(world_size)]
    assert ranks.run(gathers, 5, world_size=world_size) == [expected] * world_size


def test_processes_are_kept_and_have_one_thread(ranks):
    first, second = (ranks.run(tells_its_process, world_size=2) for _ in range(2))
    assert first == second
    assert [threads for _, _, threads in first] == [1, 1]
    assert len({pid for pid, _, _ in first}) == 2


def test_errors_come_by_rank_and_the_pool_goes_on(ranks):
    with pytest.raises(RankError, match="raises_on_last") as error:
        ranks.run(raises_on_last, world_size=3)
    assert [(rank, repr(e)) for rank, e in error.value.errors.items()] == [(2, "KeyError('the cause')")]
    assert ranks.run(gathers, 0, world_size=3) == [[0, 1, 2]] * 3


def test_an_error_that_cannot_be_pickled_is_told_by_name(ranks):
    with pytest.raises(RankError, match="Unpicklable: 1 and 2"):
        ranks.run(raises_unpicklable, world_size=1)


def test_megatron_groups_are_destroyed_after_a_run(ranks):
    assert ranks.run(leaves_megatron_groups, world_size=1, timeout=200) == [True]
    assert ranks.run(has_megatron_groups, world_size=1) == [False]


class ImportableOnlyHere:
    """Its pickle names a module that the workers cannot import."""

    def __reduce__(self):
        return __import__, ("no_such_module_of_the_tests",)


def test_a_task_that_a_worker_cannot_import_is_its_error(ranks):
    with pytest.raises(RankError, match="no_such_module_of_the_tests"):
        ranks.run(gathers, ImportableOnlyHere(), world_size=2)
    assert ranks.run(gathers, 0, world_size=2) == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("function", "world_size", "message"), [(dies, 2, "rank 1 died"), (sleeps, 1, r"ranks \[0\] did not answer")]
)
def test_a_lost_rank_ends_the_pool(function, world_size, message):
    pool = RankPool(env={"RANKS_TEST": "set before import"})
    try:
        before = pool.run(tells_its_process, world_size=world_size)
        assert [value for _, value, _ in before] == ["set before import"] * world_size
        assert "RANKS_TEST" not in os.environ
        with pytest.raises(RanksLost, match=message):
            pool.run(function, world_size=world_size, timeout=2)
        assert pool.pids == []
        assert not any(alive(pid) for pid, _, _ in before)
        if world_size == 1:  # one new process is enough to see that the pool starts anew
            assert pool.run(gathers, 1, world_size=1) == [[1]]
    finally:
        last = pool.pids
        pool.close()
    assert not any(map(alive, last))
