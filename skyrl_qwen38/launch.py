"""The driver: starts Ray, runs the training task, follows its events, and says in one sentence what went wrong."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray
from loguru import logger
from ray.exceptions import ActorDiedError
from rich.console import Console
from skyrl.env_vars import SKYRL_DUMP_INFRA_LOG_TO_STDOUT
from skyrl.train.utils import initialize_ray

from skyrl_qwen38.config import Config, ConfigError, export_environment
from skyrl_qwen38.run_record import PeakMemory, RunRecord

STARTED_AT_VARIABLE = "SKYRL_QWEN38_STARTED_AT"
_GRACE_SECONDS = 10.0


@ray.remote(num_cpus=1, num_returns="streaming")
def train(cfg: Config) -> Iterator[dict[str, Any]]:
    """SkyRL's entry task: trains in a thread of its own and yields the events of :mod:`skyrl_qwen38.trainer`."""
    from skyrl.train.utils.ray_logging import redirect_actor_output_to_file

    redirect_actor_output_to_file()
    from skyrl_qwen38.trainer import Qwen38Experiment

    events: queue.Queue[dict[str, Any] | None] = queue.Queue()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            Qwen38Experiment(cfg, events.put).run()
        except BaseException as error:
            failures.append(error)
        finally:
            events.put(None)

    threading.Thread(target=run, daemon=True).start()
    while (event := events.get()) is not None:
        yield event
    if failures:
        raise failures[0]


def check_addresses() -> None:
    """The addresses that the user fixed can be used.

    Raises:
        ConfigError: nothing answers at ``RAY_ADDRESS``, or ``MASTER_PORT`` is taken.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    match = re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address)
    if match:
        try:
            socket.create_connection((match[1], int(match[2])), timeout=3).close()
        except OSError as error:
            raise ConfigError(
                f"RAY_ADDRESS={address} does not answer ({error}): start that Ray cluster, or unset RAY_ADDRESS to "
                "start a local one"
            ) from None
    port = os.environ.get("MASTER_PORT")
    if port:
        with socket.socket() as probe:
            try:
                probe.bind(("", int(port)))
            except (OSError, ValueError, OverflowError) as error:
                raise ConfigError(
                    f"MASTER_PORT={port} cannot be used ({error}): free it, or unset MASTER_PORT to take any free port"
                ) from None


_ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?((\w*(?:Error|Exception|Mismatch|Refused)): .+)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def explain(error: BaseException, step: int, resumable: bool) -> str:
    """One sentence for a failed run: how far it came, the cause, and how to go on.

    Args:
        error: as Ray raised it in the driver; a worker's traceback is part of its text.
        step: last step that was done.
        resumable: a checkpoint is there.
    """
    lines = [_COLOUR.sub("", line).strip() for line in str(error).splitlines()]
    # The innermost cause is the last line that reads like the end of a traceback.
    causes = [match[1] for line in lines if (match := _ERROR_LINE.match(line)) and match[2] != "ActorDiedError"]
    if causes:
        what = causes[-1]
    elif isinstance(error, ActorDiedError) or "ActorDiedError" in str(error):
        what = "a worker process died (killed, or out of memory)"
    else:
        what = f"{type(error).__name__}: {next(filter(None, lines), 'no message')}"
    where = f"after step {step}" if step else "before the first step was done"
    advice = "; start the same command again to resume from the last checkpoint" if resumable else ""
    return f"{where}: {what}{advice}"


@contextlib.contextmanager
def _no_process_left() -> Iterator[None]:
    """Shuts Ray down at the end and ends every descendant of this process that outlives it."""
    try:
        yield
    finally:
        descendants = psutil.Process().children(recursive=True)
        ray.shutdown()
        _, alive = psutil.wait_procs(descendants, timeout=_GRACE_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def launch(cfg: Config, folder: Path) -> int:
    """Trains as ``cfg`` says and records the run in ``folder``.

    Returns:
        exit status: 0, 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM.
    """
    console, started_at = Console(), float(os.environ.get(STARTED_AT_VARIABLE, time.time()))
    placement, megatron = cfg.trainer.placement, cfg.trainer.policy.megatron_config
    workers = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    check_addresses()
    cluster = contextlib.nullcontext()
    if cfg.trainer.qwen38.device == "cpu":
        from skyrl_qwen38.cpu.cluster import check_machine, local_cluster

        uses_reference = cfg.trainer.algorithm.use_kl_loss or cfg.trainer.algorithm.use_kl_in_reward
        slots = workers + (placement.ref_num_nodes * placement.ref_num_gpus_per_node if uses_reference else 0)
        check_machine(slots, folder)
        cluster = local_cluster(slots)
    record = RunRecord(folder, console, workers, megatron.expert_model_parallel_size, started_at)
    export_environment(cfg)
    terminated = threading.Event()

    def terminate(signal_number: int, frame: object) -> NoReturn:
        terminated.set()
        raise KeyboardInterrupt  # which Ray's core hands on; at SystemExit it ends the process on the spot

    signal.signal(signal.SIGTERM, terminate)
    if not SKYRL_DUMP_INFRA_LOG_TO_STDOUT:
        logger.remove()
        logger.add(sys.stderr, level="WARNING")
    with _no_process_left():
        try:
            record.handle({"kind": "phase", "text": "starting Ray"})
            with cluster:
                initialize_ray(cfg)
            signal.signal(signal.SIGTERM, terminate)  # Ray's core has put its own in place, which dumps a stack
            record.handle({"kind": "phase", "text": f"loading SkyRL and the data; logs in {cfg.trainer.log_path}"})
            with PeakMemory() as memory:
                for event in train.remote(cfg):
                    record.handle(ray.get(event))
            record.finish(memory.gib)
            return 0
        except KeyboardInterrupt:
            console.print(f"interrupted after step {record.step}; start the same command again to resume")
            return 128 + (signal.SIGTERM if terminated.is_set() else signal.SIGINT)
        except Exception as error:
            resumable = record.step > 0 and cfg.trainer.ckpt_interval > 0
            Console(stderr=True).print(f"error: {explain(error, record.step, resumable)}", markup=False, soft_wrap=True)
            return 1
