"""Run folders and their metrics: which folder a start uses, and that nothing is half written."""

import pytest

from skyrl_qwen38 import runs


def make(outputs, name, finished):
    folder = outputs / name
    folder.mkdir()
    if finished:
        (folder / runs.SUMMARY).write_text("{}")


@pytest.mark.parametrize(
    ("existing", "fresh", "expected"),
    [
        ({}, False, "run"),
        ({"run": False}, False, "run"),
        ({"run": True}, False, "run-2"),
        ({"run": True, "run-2": False}, False, "run-2"),
        ({"run": True, "run-2": True}, False, "run-3"),
        ({"run": False}, True, "run-2"),
        ({"run": False, "run-2": False}, True, "run-3"),
    ],
)
def test_an_unfinished_run_is_resumed_and_a_finished_one_left(tmp_path, existing, fresh, expected):
    for name, finished in existing.items():
        make(tmp_path, name, finished)
    assert runs.run_folder(tmp_path, "run", fresh) == tmp_path / expected


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    runs.append_metrics(tmp_path, {"step": 1})
    with open(tmp_path / runs.METRICS, "a") as file:
        file.write('{"step": 2, "rew')
    assert runs.read_metrics(tmp_path) == [{"step": 1}]


def test_metrics_are_appended_in_order(tmp_path):
    lines = [{"step": step, "reward": step / 10} for step in range(3)]
    for line in lines:
        runs.append_metrics(tmp_path, line)
    assert runs.read_metrics(tmp_path) == lines
    runs.write_metrics(tmp_path, lines[:1])
    assert runs.read_metrics(tmp_path) == lines[:1]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    runs.write_atomically(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(runs.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        runs.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
