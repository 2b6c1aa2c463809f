"""`skyrl_qwen38.parity`: the comparison itself once, what it refuses, and what it says of processes that fail."""

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from skyrl_qwen38 import parity


def test_ranks_agree_with_transformers(text_checkpoint, documents):
    before = set(multiprocessing.active_children())
    result = parity.run_parity(str(text_checkpoint), documents[:4], ep=2, layers=True)
    assert result["ep"] == 2
    assert [document["tokens"] for document in result["documents"]] == [7, 1, 67, 2]
    assert 0 < result["logprob_abs_diff_mean"] <= result["logprob_abs_diff_max"] <= 1e-5
    assert result["logprob_abs_diff_max"] == max(document["abs_diff_max"] for document in result["documents"])
    assert [(layer["layer"], layer["kind"]) for layer in result["layers"]] == [
        (0, "linear_attention"),
        (1, "linear_attention"),
        (2, "linear_attention"),
        (3, "full_attention"),
    ]
    assert all(0 < layer["stream_diff"] <= 3e-5 for layer in result["layers"])
    assert set(multiprocessing.active_children()) <= before
    json.dumps(result)


@pytest.mark.parametrize(
    ("documents", "ep", "sentence"),
    [
        ([[1], [5, 512]], 1, "Document 1 has the token id 512, outside the vocabulary of 512"),
        ([[-1]], 1, "Document 0 has the token id -1"),
        ([[1], []], 1, "one without a token"),
        ([], 1, "There is no document"),
        ([[1]], 5, "--ep=5 does not divide the 12 experts"),
    ],
)
def test_unsuitable_arguments_are_refused_at_once(text_checkpoint, documents, ep, sentence):
    with pytest.raises(ValueError, match=sentence):
        parity.run_parity(str(text_checkpoint), documents, ep, layers=False)


def test_another_model_is_refused(text_checkpoint, tmp_path):
    shutil.copytree(text_checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'qwen3_moe', and only qwen4_exp"):
        parity.run_parity(str(tmp_path), [[1]], 1, layers=False)


def test_a_machine_too_small_is_refused(text_checkpoint, monkeypatch):
    monkeypatch.setattr(parity.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    with pytest.raises(ValueError, match=r"needs about \d\.\d GiB of memory and 1\.0 GiB are available"):
        parity.run_parity(str(text_checkpoint), [[1]], 3, layers=False)


def test_needed_bytes_by_hand():
    def tensor(*shape: int, item: int = 2) -> SimpleNamespace:
        return SimpleNamespace(shape=shape, nbytes=torch.Size(shape).numel() * item)

    index = {
        "lm_head.weight": tensor(10, 10),
        "model.language_model.layers.0.mlp.experts.down_proj": tensor(2, 5, 10),
        "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight": tensor(50, 4),
        "model.visual.pos_embed.weight": tensor(1000, 1000),
        "mtp.fc_hidden.weight": tensor(1000, 1000),
    }
    transformers = 4 * (100 + 100 + 200)
    ranks = 400 + 4 * 100 + 2 * (4 * 100 + 200)
    processes = 3 * (parity._PROCESS_BYTES + 3 * 4 * 7 * 10)
    assert parity._needed_bytes(index, tokens=7, vocab_size=10, ep=2) == transformers + ranks + processes


def test_the_last_position_counts_the_token_that_the_reference_finds_likeliest():
    reference = {"logprobs.0": torch.tensor([-1.0, -2.0]), "last.0": torch.tensor([-3.0, -0.5, -4.0])}
    found = {"logprobs.0": torch.tensor([-1.5, -2.0]), "last.0": torch.tensor([-9.0, -0.25, -4.0])}
    assert parity._logprob_differences(reference, found, 0).tolist() == [0.5, 0.0, 0.25]


def test_streams_take_the_largest_difference_of_all_ranks_and_documents_and_keep_a_nan():
    reference = {f"stream.{layer}.{document}": torch.zeros(2, 3) for layer in range(3) for document in range(2)}
    off = {**reference, "stream.1.1": torch.tensor([[0.0, -2.0, 1.0]]), "stream.2.0": torch.tensor([[float("nan")]])}
    first, second, third = parity._stream_differences(reference, [reference, off], 2, ["a", "b", "c"])
    assert first == {"layer": 0, "kind": "a", "stream_diff": 0.0}
    assert second == {"layer": 1, "kind": "b", "stream_diff": 2.0}
    assert third["stream_diff"] != third["stream_diff"]


def _succeed() -> dict:
    return {"x": torch.ones(1)}


def _fail() -> dict:
    raise ValueError("the table\nis elsewhere")


def _die() -> dict:
    os.kill(os.getpid(), 9)


def _hang() -> dict:
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (_fail, "failed in its process 'rank 0': the table is elsewhere"),
        (_die, "process 'rank 0' ended with status -9, as the system does when memory runs out"),
        (_hang, "given up after 0 minutes: .*rank 0.* had not ended"),
    ],
)
def test_a_process_that_fails_ends_all_of_them(tmp_path, monkeypatch, function: Callable, sentence):
    monkeypatch.setattr(parity, "_TIMEOUT", timedelta(seconds=4 if function is _hang else 120))
    before = set(multiprocessing.active_children())
    others = {} if function is _hang else {"reference": (_hang,)}
    with pytest.raises(RuntimeError, match=sentence):
        parity._run({"rank 0": (function,), "reference": (_succeed,), **others}, str(tmp_path))
    assert set(multiprocessing.active_children()) <= before
