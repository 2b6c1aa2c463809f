"""What a run leaves behind and what one sees of it: step lines, ``metrics.jsonl``, ``summary.json``, a plot.

Lives in the driver, fed with the events of :mod:`skyrl_qwen38.trainer`, whatever logger SkyRL uses besides.
"""

from __future__ import annotations

import json
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from skyrl_qwen38 import patching, runs
from skyrl_qwen38.logprob_bound import LOGPROB_DIFFERENCE
from skyrl_qwen38.patches import ALL_PATCHES

REWARD = "reward/avg_raw_reward"
ACCURACY = "eval/all/avg_score"
TOKENS_PER_SECOND = "trainer/tokens_per_second_per_gpu"
# Phases of a step, with the names that the step line uses.
PHASES = {
    "timing/generate": "generate",
    "timing/fwd_logprobs_values_reward": "log-probs",
    "timing/policy_train": "train",
    "timing/save_checkpoints": "save",
    "timing/sync_weights": "sync",
    "timing/eval": "eval",
}
_PACKAGES = ("skyrl-qwen38", "skyrl", "ray", "torch", "transformers", "megatron-core", "megatron-bridge")
_GIB = 2**30
_SAMPLE_SECONDS = 5.0  # one sample walks the page tables of a dozen processes


class PeakMemory:
    """The largest sum of proportional set sizes of this process and its descendants, sampled every five seconds."""

    def __init__(self) -> None:
        self.gib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        root = psutil.Process()
        while not self._stop.wait(_SAMPLE_SECONDS):
            total = 0
            for process in [root, *root.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:  # it ended meanwhile
                    continue
            self.gib = max(self.gib, total / _GIB)


class RunRecord:
    """Prints and stores what happens in one run.

    Args:
        folder: of the run; created if need be.
        console: to print to.
        workers: number of policy workers, for tokens/s of all of them.
        expert_parallel: EP size, for the summary.
        started_at: time.time() at which the user started the command, set-up included.
    """

    def __init__(self, folder: Path, console: Console, workers: int, expert_parallel: int, started_at: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.step = 0
        self._console = console
        self._workers = workers
        self._expert_parallel = expert_parallel
        self._started_at = started_at
        self._setup_seconds = 0.0
        self._total_steps = 0
        self._patches: dict[str, str] = {}
        self._lines: list[dict[str, Any]] = []

    def handle(self, event: dict[str, Any]) -> None:
        """Takes one event of the trainer."""
        getattr(self, f"_on_{event['kind']}")(event)

    def _on_phase(self, event: dict[str, Any]) -> None:
        self._console.print(f"[{time.time() - self._started_at:5.0f} s] {event['text']}", highlight=False, markup=False)

    def _on_patches(self, event: dict[str, Any]) -> None:
        self._patches = patching.report_dict(event["reports"])
        self._console.print(patching.table(event["reports"], ALL_PATCHES))

    def _on_start(self, event: dict[str, Any]) -> None:
        self.step, self._total_steps = event["step"], event["total_steps"]
        self._setup_seconds = time.time() - self._started_at
        # Steps after the checkpoint from which the run goes on are done again.
        self._lines = [line for line in runs.read_metrics(self.folder) if line["step"] <= self.step]
        runs.write_metrics(self.folder, self._lines)
        begin = f"resuming after step {self.step}" if self.step else "training"
        self._on_phase({"text": f"{begin}, {self._total_steps} steps, folder {self.folder}"})

    def _on_log(self, event: dict[str, Any]) -> None:
        step, metrics = event["step"], event["metrics"]
        self.step = step
        if not any(line["step"] == step for line in self._lines):
            line = {"step": step, "seconds": round(time.time() - self._started_at, 3), **metrics}
            self._lines.append(line)
            runs.append_metrics(self.folder, line)
        self._console.print(self._step_line(step, metrics), highlight=False, markup=False, soft_wrap=True)

    def _step_line(self, step: int, metrics: dict[str, float]) -> str:
        parts = [f"[{time.time() - self._started_at:5.0f} s] step {step:>3}/{self._total_steps}"]
        if REWARD in metrics:
            parts.append(f"reward {metrics[REWARD]:.3f}")
        if ACCURACY in metrics:
            parts.append(f"held-out accuracy {metrics[ACCURACY]:.1%}")
        if LOGPROB_DIFFERENCE in metrics:
            parts.append(f"log-prob diff {metrics[LOGPROB_DIFFERENCE]:.1e}")
        if TOKENS_PER_SECOND in metrics:
            parts.append(f"{metrics[TOKENS_PER_SECOND] * self._workers:,.0f} tokens/s")
        phases = [f"{label} {metrics[name]:.1f}" for name, label in PHASES.items() if name in metrics]
        return "  ".join([*parts, f"({', '.join(phases)} s)" if phases else ""])

    def finish(self, peak_memory_gib: float) -> dict[str, Any]:
        """Writes the plot and then ``summary.json``, which marks the run as finished; prints the summary."""
        summary = {
            "steps": self.step,
            "seconds": round(time.time() - self._started_at, 1),
            "setup_seconds": round(self._setup_seconds, 1),
            "peak_memory_gib": round(peak_memory_gib, 2),
            **self._first_and_last("accuracy", ACCURACY),
            **self._first_and_last("reward", REWARD),
            "logprob_abs_diff_max": max(self._values(LOGPROB_DIFFERENCE), default=None),
            "ep": self._expert_parallel,
            "patches": self._patches,
            "versions": {name: metadata.version(name) for name in _PACKAGES},
        }
        plot = plot_run(self._lines, self.folder / "run.svg")
        runs.write_atomically(self.folder / runs.SUMMARY, f"{json.dumps(summary, indent=2)}\n")
        table = Table(title=f"run {self.folder.name}", title_justify="left", show_header=False)
        for name in ("steps", "seconds", "setup_seconds", "peak_memory_gib", "logprob_abs_diff_max"):
            value = summary[name]
            table.add_row(name, f"{value:.2e}" if name == "logprob_abs_diff_max" and value is not None else str(value))
        for name in ("accuracy", "reward"):
            first, last = summary[f"{name}_first"], summary[f"{name}_last"]
            table.add_row(name, "not measured" if first is None else f"{first:.3f} -> {last:.3f}")
        table.add_row("plot", str(plot))
        self._console.print(table)
        return summary

    def _values(self, metric: str) -> list[float]:
        return [line[metric] for line in self._lines if metric in line]

    def _first_and_last(self, name: str, metric: str) -> dict[str, float | None]:
        values = self._values(metric) or [None]
        return {f"{name}_first": values[0], f"{name}_last": values[-1]}


def plot_run(lines: list[dict[str, Any]], path: Path) -> Path:
    """Plots reward and held-out accuracy above the log-prob difference, by step, as SVG.

    Args:
        lines: of ``metrics.jsonl``.
        path: of the SVG file.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    for axis, metric, label in (
        (above, REWARD, "reward (training questions, sampled)"),
        (above, ACCURACY, "accuracy (held-out questions, greedy)"),
        (below, LOGPROB_DIFFERENCE, "mean |log-prob difference|, trainer against rollout"),
    ):
        points = [(line["step"], line[metric]) for line in lines if metric in line]
        if points:
            axis.plot(*zip(*points, strict=True), marker=".", label=label)
    above.set_ylim(0, 1)
    below.set_yscale("log")
    below.set_xlabel("step")
    below.xaxis.get_major_locator().set_params(integer=True)
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
