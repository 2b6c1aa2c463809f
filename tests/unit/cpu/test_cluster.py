"""What is checked of a machine before a local cluster starts on it."""

from types import SimpleNamespace

import pytest

from skyrl_qwen38.cpu import cluster

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    def have(memory_gib: float, disk_gib: float) -> None:
        monkeypatch.setattr(cluster.psutil, "virtual_memory", lambda: SimpleNamespace(available=memory_gib * GIB))
        monkeypatch.setattr(cluster.shutil, "disk_usage", lambda _: SimpleNamespace(free=disk_gib * GIB))

    return have


def test_a_machine_that_fits_passes(machine, tmp_path):
    machine(memory_gib=12, disk_gib=5)
    cluster.check_machine(3, tmp_path / "not" / "there" / "yet")


@pytest.mark.parametrize(
    ("memory", "disk", "sentence"),
    [
        (4, 50, r"3 workers need about 9.6 GiB of memory and 4.0 GiB are free: close"),
        (12, 0.5, r"has 0.5 GiB free and a run needs 2 GiB for its checkpoints: free some"),
    ],
)
def test_too_little_memory_or_disk_is_refused_with_both_numbers(machine, tmp_path, memory, disk, sentence):
    machine(memory, disk)
    with pytest.raises(cluster.MachineTooSmall, match=sentence):
        cluster.check_machine(3, tmp_path / "run")
