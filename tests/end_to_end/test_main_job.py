"""The main job as a user starts it; marked full: killed, interrupted and resumed, and in its other forms."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_qwen38 import runs
from skyrl_qwen38.logprob_bound import LOGPROB_DIFFERENCE
from skyrl_qwen38.run_record import ACCURACY, REWARD
from tests.end_to_end.job import Job

pytestmark = pytest.mark.timeout(1000)
NAME = "arithmetic-tiny-cpu-seed0"
START = 400  # seconds until the first step of a start, on a busy machine


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "models").mkdir()
    shutil.copytree(tiny_checkpoint, folder / "models" / "tiny-seed0")
    return folder


@pytest.fixture
def start(outputs: Path) -> Iterator:
    jobs = []

    def start_job(*settings: str, **environment: str) -> Job:
        jobs.append(Job(outputs, *settings, **environment))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


@pytest.fixture(scope="module")
def unbroken(outputs: Path) -> Iterator[Path]:
    job = Job(outputs, RUN_NAME="unbroken")
    try:
        status = job.wait(timeout=START + 120)
        assert status == 0, job.text
        assert not job.left_over()
        yield outputs / "unbroken"
    finally:
        job.end()


def step_lines(folder: Path) -> list[dict]:
    return runs.read_metrics(folder)


def test_every_step_is_recorded_and_exact(unbroken):
    lines = step_lines(unbroken)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(ACCURACY in line for line in lines)
    assert all(0 <= line[LOGPROB_DIFFERENCE] <= 1e-5 and REWARD in line for line in lines[1:])
    assert len({line[ACCURACY] for line in lines}) > 1, "the weights never changed"


def test_the_summary_names_patches_and_versions(unbroken):
    summary = json.loads((unbroken / "summary.json").read_text())
    assert summary["patches"] == dict.fromkeys(("bridge_peft_names", "qwen4_exp_bridge", "ple_row_shard"), "applied")
    assert (summary["steps"], summary["ep"]) == (3, 3)
    assert summary["logprob_abs_diff_max"] <= 1e-5
    assert 0 < summary["peak_memory_gib"] <= 14
    assert (unbroken / "run.svg").exists()


def test_two_checkpoints_are_kept(unbroken):
    checkpoints = sorted(path.name for path in (unbroken / "checkpoints").glob("global_step_*"))
    assert checkpoints == ["global_step_2", "global_step_3"]


@pytest.mark.full
def test_a_killed_worker_ends_the_job_and_the_resumed_run_repeats_the_unbroken_one(unbroken, outputs, start):
    job = start(RUN_NAME="broken")
    job.wait_for("step   2/3", timeout=START + 60)
    job.policy_workers()[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(timeout=60) == 1, job.text
    assert time.monotonic() - killed < 60
    errors = [line for line in job.text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, job.text
    assert "worker process died" in errors[0]
    assert not job.left_over()
    marker = (outputs / "broken" / "checkpoints" / "latest_ckpt_global_step.txt").read_text()
    assert marker in ("2", "3")

    resumed = start(RUN_NAME="broken")
    assert resumed.wait(timeout=START + 60) == 0, resumed.text
    assert f"resuming after step {marker}" in resumed.text
    exact = (REWARD, ACCURACY, "policy/policy_loss", "policy/grad_norm")
    kept = [[line.get(metric) for metric in exact] for line in step_lines(outputs / "broken")]
    expected = [[line.get(metric) for metric in exact] for line in step_lines(unbroken)]
    assert kept == expected


@pytest.mark.full
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_leaves_no_process_and_can_be_resumed(start, sent, status):
    name = f"interrupted-{sent.name}"
    job = start(RUN_NAME=name)
    job.wait_for("step   1/3", timeout=START + 60)
    job.process.send_signal(sent)
    assert job.wait(timeout=60) == status, job.text
    time.sleep(1)
    assert not job.left_over()
    resumed = start(RUN_NAME=name)
    assert resumed.wait(timeout=START + 60) == 0, resumed.text
    assert "resuming after step" in resumed.text


@pytest.mark.full
def test_the_head_sharded_table_trains_at_ep_2(start, outputs):
    policy = "trainer.policy.megatron_config"
    settings = (
        "trainer.qwen38.patches.ple_row_shard=false",
        "trainer.placement.policy_num_gpus_per_node=2",
        f"{policy}.expert_model_parallel_size=2",
        "trainer.micro_train_batch_size_per_gpu=48",
        "trainer.max_training_steps=1",
    )
    job = start(*settings, RUN_NAME="heads")
    assert job.wait(timeout=START + 60) == 0, job.text
    summary = json.loads((outputs / "heads" / "summary.json").read_text())
    assert summary["patches"]["ple_row_shard"] == "off (flag)"
    assert summary["logprob_abs_diff_max"] <= 1e-5


@pytest.mark.full
def test_a_reference_model_is_patched_too(start, outputs):
    settings = (
        "trainer.algorithm.use_kl_loss=true",
        "trainer.placement.colocate_policy_ref=false",
        "trainer.placement.ref_num_gpus_per_node=1",
        "trainer.max_training_steps=2",
    )
    job = start(*settings, RUN_NAME="reference")
    assert job.wait(timeout=START + 120) == 0, job.text
    assert "patches (4 workers)" in job.text
    losses = [line["policy/policy_kl"] for line in step_lines(outputs / "reference")[1:]]
    assert abs(losses[0]) < 1e-6 < abs(losses[1])


@pytest.mark.full
def test_a_bf16_run_stays_within_its_bound(start, outputs):
    settings = ("trainer.bf16=true", "trainer.qwen38.max_logprob_abs_diff=0.01", "trainer.max_training_steps=2")
    job = start(*settings, RUN_NAME="bf16")
    assert job.wait(timeout=START + 60) == 0, job.text
    assert 1e-5 < json.loads((outputs / "bf16" / "summary.json").read_text())["logprob_abs_diff_max"] <= 0.01


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "environment", "sentence"),
    [
        (("trainer.qwen38.devise=cpu",), {}, "did you mean"),
        ((), {"RAY_ADDRESS": "127.0.0.1:1"}, "RAY_ADDRESS=127.0.0.1:1 does not answer"),
    ],
)
def test_a_wrong_start_is_refused_in_one_sentence_before_ray(start, settings, environment, sentence):
    job = start(*settings, RUN_NAME="refused", **environment)
    assert job.wait(timeout=120) == 2
    errors = [line for line in job.text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, job.text
    assert sentence in errors[0]
    assert "Traceback" not in job.text
    assert not job.left_over()
