"""Functions run on the ranks of a gloo group, in worker processes that live as long as the test session.

    def gathers(rank, world_size, value):  # top level of a test module
        ...
    def test_gathers(ranks):
        assert ranks.run(gathers, 7, world_size=3) == [7, 7, 7]

Workers are kept because importing torch and megatron-core costs seconds of CPU in each. Nothing outlives a run but the
imported modules: every run has a process group of its own, destroyed afterwards with Megatron's groups, and patches
that it applied are undone.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_IMPORT_SECONDS = 150  # a worker's interpreter and torch, or a test module's imports, on a busy machine


class RankError(AssertionError):
    """The function raised on some ranks. `errors` has the exceptions by rank; the message has their tracebacks."""

    def __init__(self, errors: dict[int, BaseException], tracebacks: dict[int, str]):
        super().__init__("\n".join(f"rank {rank}: {error!r}\n{tracebacks[rank]}" for rank, error in errors.items()))
        self.errors = errors


class RanksLost(AssertionError):
    """Ranks died, or did not answer in time. All workers of the pool were killed; the next run starts new ones."""


class RankPool:
    """Worker processes, started when a run first needs them.

    Args:
        env: environment variables of the workers, set before they import anything. One number of threads a worker
            unless it says otherwise.
    """

    def __init__(self, env: Mapping[str, str] | None = None):
        self._env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})}
        self._workers: list[tuple[multiprocessing.Process, Connection]] = []

    def run[T](self, function: Callable[..., T], *args: Any, world_size: int = 3, timeout: float = 60) -> list[T]:
        """`function(rank, world_size, *args)` on every rank of a new gloo group; its results in rank order.

        The function is pickled by reference: it stands at the top level of a test module. A collective that waits
        longer than the timeout (60 s at most) raises in the worker. The time that its module takes to be imported
        does not count.

        Raises:
            RankError: the function raised on some ranks.
            RanksLost: a worker died, or `timeout` seconds passed.
        """
        self._start_workers(world_size)
        task = pickle.dumps((function, args))
        for _, connection in self._workers[:world_size]:
            connection.send((sys.path, task))
        imported = self._answers(range(world_size), _IMPORT_SECONDS)
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            go = all(done for done, *_ in imported.values())
            for rank, (_, connection) in enumerate(self._workers[:world_size]):
                connection.send((rank, world_size, os.path.join(folder, "rendezvous"), timeout) if go else None)
            answers = self._answers(range(world_size), timeout) if go else imported
        failed = {rank: answer for rank, answer in answers.items() if not answer[0]}
        if failed:
            raise RankError(
                {rank: error for rank, (_, error, _) in failed.items()},
                {rank: text for rank, (*_, text) in failed.items()},
            )
        return [answers[rank][1] for rank in range(world_size)]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._workers]

    def close(self) -> None:
        """Ends all workers, by force where one does not answer."""
        for _, connection in self._workers:
            connection.close()
        deadline = time.monotonic() + 5
        for process, _ in self._workers:
            process.join(max(0, deadline - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            process.close()
            connection.close()
        self._workers = []

    def _start_workers(self, count: int) -> None:
        if any(not process.is_alive() for process, _ in self._workers):
            self._kill()
        first_new = len(self._workers)
        context = multiprocessing.get_context("spawn")
        with _environment(self._env):
            while len(self._workers) < count:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        self._answers(range(first_new, count), _IMPORT_SECONDS)

    def _answers(self, ranks: range, seconds: float) -> dict[int, tuple]:
        """One answer of each rank: (True, result) or (False, error, traceback). Ends all workers if one is missing."""
        deadline = time.monotonic() + seconds
        by_connection = {self._workers[rank][1]: rank for rank in ranks}
        answers: dict[int, tuple] = {}
        while len(answers) < len(ranks):
            open_connections = [connection for connection, rank in by_connection.items() if rank not in answers]
            ready = wait(open_connections, timeout=max(0, deadline - time.monotonic()))
            try:
                for connection in ready:
                    answers[by_connection[connection]] = pickle.loads(connection.recv())
            except (EOFError, ConnectionResetError):
                self._lost(f"rank {by_connection[connection]} died")
            if not ready:
                self._lost(f"ranks {sorted(set(ranks) - set(answers))} did not answer in time")
        return answers

    def _lost(self, what: str) -> None:
        self._kill()
        raise RanksLost(f"{what}; all workers were killed")


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(connection: Connection) -> None:
    """A worker's life: answers that it is ready, then each task, until the pool closes the connection."""
    import torch

    torch.set_num_threads(1)
    # The pool ends its workers as one ends daemons, but Megatron's checkpoint writer starts a process of its own.
    multiprocessing.current_process()._config["daemon"] = False
    connection.send(pickle.dumps((True, None)))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            sys.path[:], task = connection.recv()
            try:
                function, args = pickle.loads(task)
            except BaseException as error:
                connection.send(_failure(error))
                connection.recv()
                continue
            connection.send(pickle.dumps((True, None)))
            if place := connection.recv():
                try:
                    connection.send(pickle.dumps((True, _run(function, args, *place))))
                except BaseException as error:
                    connection.send(_failure(error))


def _run(function: Callable, args: tuple, rank: int, world_size: int, rendezvous: str, timeout: float) -> Any:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=min(timeout, 60)),
    )
    try:
        return function(rank, world_size, *args)
    finally:
        if "megatron.core.parallel_state" in sys.modules:
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
        if "skyrl_qwen38.patching" in sys.modules:
            patching = sys.modules["skyrl_qwen38.patching"]
            for name in reversed(list(patching._applied)):
                patching.undo(name)
        if dist.is_initialized():
            dist.destroy_process_group()
        if "megatron.core" in sys.modules:
            # A model that ended in a reference cycle keeps its groups, and the threads of a gloo group whose peers have
            # closed theirs spin: a few such models, and the machine does nothing else.
            gc.collect()


def _failure(error: BaseException) -> bytes:
    return pickle.dumps((False, _picklable(error), traceback.format_exc()))


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
