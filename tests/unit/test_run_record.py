"""What a run prints and leaves behind, fed with the events that the trainer sends."""

import io
import json
import os
import time

import pytest
from rich.console import Console

from skyrl_qwen38 import run_record, runs
from skyrl_qwen38.logprob_bound import LOGPROB_DIFFERENCE
from skyrl_qwen38.patching import PatchReport, Verdict
from skyrl_qwen38.run_record import ACCURACY, REWARD, TOKENS_PER_SECOND, PeakMemory, RunRecord


def log(step, **metrics):
    return {"kind": "log", "step": step, "metrics": metrics}


@pytest.fixture
def record(tmp_path):
    return RunRecord(tmp_path / "run", Console(file=io.StringIO(), width=200), 3, 3, time.time() - 5)


def printed(record):
    return record._console.file.getvalue()


def run(record, steps):
    record.handle({"kind": "start", "step": 0, "total_steps": steps[-1]})
    record.handle(log(0, **{ACCURACY: 0.25}))
    for step in steps:
        record.handle(
            log(
                step,
                **{
                    REWARD: step / 10,
                    ACCURACY: 0.25 + step / 10,
                    LOGPROB_DIFFERENCE: step * 1e-7,
                    TOKENS_PER_SECOND: 100.0,
                    "timing/generate": 1.5,
                },
            )
        )


def test_a_step_line_has_reward_accuracy_difference_speed_and_phases(record):
    run(record, [1, 2])
    line = printed(record).splitlines()[-1]
    for part in (
        "step   2/2",
        "reward 0.200",
        "accuracy 45.0%",
        "log-prob diff 2.0e-07",
        "300 tokens/s",
        "generate 1.5",
    ):
        assert part in line


def test_the_summary_has_every_field_that_is_promised(record):
    record.handle({"kind": "patches", "reports": [[PatchReport("ple_row_shard", Verdict.APPLIED)]] * 3})
    run(record, [1, 2, 3])
    record.finish(peak_memory_gib=7.654)
    summary = json.loads((record.folder / "summary.json").read_text())
    assert summary["steps"] == 3
    assert (summary["accuracy_first"], summary["accuracy_last"]) == (0.25, 0.55)
    assert (summary["reward_first"], summary["reward_last"]) == (0.1, 0.3)
    assert summary["logprob_abs_diff_max"] == pytest.approx(3e-7)
    assert summary["peak_memory_gib"] == 7.65
    assert summary["ep"] == 3
    assert summary["patches"] == {"ple_row_shard": "applied"}
    assert summary["versions"]["megatron-core"]
    assert summary["seconds"] >= summary["setup_seconds"] >= 5
    assert (record.folder / "run.svg").read_text().startswith("<?xml")


def test_a_resumed_run_repeats_no_step(tmp_path):
    for first, last in ((0, 3), (2, 4)):  # killed after the line of step 3, before its checkpoint
        record = RunRecord(tmp_path / "run", Console(file=io.StringIO()), 3, 3, time.time())
        record.handle({"kind": "start", "step": first, "total_steps": 4})
        record.handle(log(first, **{ACCURACY: 0.5}))  # the evaluation before training
        for step in range(first + 1, last + 1):
            record.handle(log(step, **{REWARD: first + 0.1}))
    lines = runs.read_metrics(record.folder)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line.get(REWARD) for line in lines] == [None, 0.1, 0.1, 2.1, 2.1]


def test_an_unfinished_run_has_no_summary(record):
    run(record, [1])
    assert not (record.folder / runs.SUMMARY).exists()


def test_peak_memory_is_at_least_what_this_process_holds(monkeypatch):
    monkeypatch.setattr(run_record, "_SAMPLE_SECONDS", 0.1)
    with PeakMemory() as memory:
        held = bytearray(os.urandom(1 << 20) * 200)
        time.sleep(0.5)
    assert memory.gib > len(held) / 2**30
