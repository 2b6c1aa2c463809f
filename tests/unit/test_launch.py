"""The driver's sentences: what went wrong in a run, and addresses that cannot be used."""

import socket

import pytest
from ray.exceptions import ActorDiedError

from skyrl_qwen38.config import ConfigError
from skyrl_qwen38.launch import check_addresses, explain

WORKER_TRACEBACK = """\x1b[36mray::train()\x1b[39m (pid=1, ip=127.0.0.1)
  File "trainer.py", line 10, in run
ray.exceptions.RayTaskError(WeightSyncError): ray::CpuPolicyWorker.sync() (pid=2)
  File "worker.py", line 3, in sync
skyrl_qwen38.cpu.worker.WeightSyncError: weight sync is incomplete: 2 tensors"""

DEAD_WORKER = """ray::train() (pid=1)
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
	class_name: CpuPolicyWorker"""


@pytest.mark.parametrize(
    ("error", "step", "resumable", "parts"),
    [
        (
            RuntimeError(WORKER_TRACEBACK),
            4,
            True,
            ("after step 4", "WeightSyncError: weight sync is incomplete", "resume"),
        ),
        (RuntimeError(DEAD_WORKER), 2, True, ("after step 2", "a worker process died")),
        (ActorDiedError(), 2, True, ("after step 2", "a worker process died", "resume from the last checkpoint")),
        (ValueError("no good"), 0, False, ("before the first step", "ValueError: no good")),
    ],
)
def test_a_failure_is_one_sentence_with_its_innermost_cause(error, step, resumable, parts):
    sentence = explain(error, step, resumable)
    assert "\n" not in sentence
    assert "\x1b" not in sentence
    for part in parts:
        assert part in sentence


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def _no_addresses(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)


def test_free_addresses_pass(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    check_addresses()


def test_a_master_port_in_use_is_refused(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"MASTER_PORT=\d+ cannot be used"):
            check_addresses()


def test_a_ray_address_without_an_answer_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127.0.0.1:.* does not answer"):
        check_addresses()
