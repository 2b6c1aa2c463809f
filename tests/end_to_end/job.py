"""Starts the main job as a user does, and ends it and all it started."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/run_arithmetic_tiny_cpu.sh"
# Small batches: these runs look at what happens, not at what is learnt.
SMALL = (
    "trainer.train_batch_size=12",
    "trainer.policy_mini_batch_size=12",
    "trainer.micro_train_batch_size_per_gpu=32",
    "trainer.micro_forward_batch_size_per_gpu=32",
    "trainer.max_training_steps=3",
)


class Job:
    """One start of the recipe; its output goes to a file.

    Args:
        outputs: folder for all runs.
        settings: appended to the recipe's.
        environment: on top of this process's.
    """

    def __init__(self, outputs: Path, *settings: str, **environment: str) -> None:
        self.log = outputs / f"output-{time.monotonic_ns()}.txt"
        with open(self.log, "w") as output:
            self.process = subprocess.Popen(
                ["bash", RECIPE, *SMALL, *settings],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"SKYRL_QWEN38_OUTPUTS": str(outputs)} | environment,
                start_new_session=True,
                # A shell starts what it puts into the background deaf to Ctrl-C, and so are its descendants.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self.started: dict[int, psutil.Process] = {}

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, words: str, timeout: float) -> None:
        """Returns once ``words`` were printed; fails if the job ends or the time is up before."""
        deadline = time.monotonic() + timeout
        while words not in self.text:
            assert self.process.poll() is None, f"the job ended early:\n{self.text}"
            assert time.monotonic() < deadline, f"{words!r} did not appear in {timeout} s:\n{self.text}"
            self.descendants()
            time.sleep(0.5)

    def wait(self, timeout: float) -> int:
        """The exit status; every process that the job started has been noted."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"the job did not end in {timeout} s:\n{self.text}"
            self.descendants()
            time.sleep(1)
        return self.process.returncode

    def descendants(self) -> list[psutil.Process]:
        """Processes that descend from the job now; all seen so far are kept in ``started``."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.started.update({process.pid: process for process in found})
        return found

    def policy_workers(self) -> list[psutil.Process]:
        return [p for p in self.descendants() if "CpuPolicyWorker" in " ".join(p.cmdline())]

    def left_over(self) -> list[str]:
        """Processes of this job that still run."""
        return [repr(p) for p in self.started.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        """Kills whatever still runs."""
        self.descendants()
        for process in [*self.started.values(), self.process]:
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait()
