"""The command line: exit status, one sentence of error, one JSON object."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skyrl_qwen38 import cli, patches, patching
from skyrl_qwen38.patching import Fingerprint, Patch, Target

PARITY = {
    "logprob_abs_diff_max": 3e-6,
    "logprob_abs_diff_mean": 1e-7,
    "documents": [{"tokens": 40, "abs_diff_max": 3e-6}],
    "layers": [
        {"layer": 0, "kind": "linear_attention", "stream_diff": 1e-7},
        {"layer": 1, "kind": "full_attention", "stream_diff": 0.5},
    ],
    "ep": 3,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    text = {"num_experts": 6, "heads_per_ngram": 8, "ngram_size": 3, "vocab_size": 32}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen4_exp", "text_config": text}))
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def run_parity(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple]]:
    """Stands in for the comparison itself; prints, as libraries do, and answers with `PARITY` and what is given."""
    calls: list[tuple] = []

    def install(**changed: Any) -> list[tuple]:
        module = ModuleType("skyrl_qwen38.parity")

        def run(*arguments: Any) -> dict[str, Any]:
            calls.append(arguments)
            print("a library prints")
            os.write(1, b"a child process prints\n")
            return PARITY | changed

        module.run_parity = run
        monkeypatch.setitem(sys.modules, "skyrl_qwen38.parity", module)
        return calls

    return install


def test_help_shows_examples(capsys):
    assert cli.run(["--help"]) == 0
    assert "make-tiny" in capsys.readouterr().out
    for command in ("patches", "make-tiny", "parity"):
        assert cli.run([command, "--help"]) == 0
        assert f"skyrl-qwen38 {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["nope"], "No such command 'nope'."),
        (["parity"], "Missing option '--model'."),
        (["parity", "--model", "/nowhere"], "--model=/nowhere is not a folder"),
        (["parity", "--model", "{model}", "--ep", "0"], "Invalid value for '--ep'"),
        (["parity", "--model", "{model}", "--against", "memory"], "Invalid value for '--against'"),
        (["parity", "--model", "{model}", "--tokens", "/nowhere.json"], "/nowhere.json cannot be read as JSON"),
        (["patches", "--scope", "driver"], "Invalid value for '--scope'"),
        (["make-tiny"], "Missing argument 'out'."),
        (["make-tiny", "{model}", "--seed", "-1"], "Invalid value for '--seed'"),
    ],
)
def test_bad_usage_is_one_sentence_on_stderr_and_status_2(capfd, model, argv, sentence):
    assert cli.run([argument.format(model=model) for argument in argv]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_no_command_is_bad_usage_and_shows_the_help(capsys):
    assert cli.run([]) == 2
    captured = capsys.readouterr()
    assert "make-tiny" in captured.out + captured.err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a list of documents"),
        ('{"a": [1]}', "must hold a list of documents"),
        ("[[1], []]", "document 1 is no list of token ids, or is empty"),
        ("[1, 2]", "document 0 is no list of token ids, or is empty"),
        ("[[1, 32]]", "document 0 has 32, which is no id from 0 to 31"),
        ("[[-1]]", "document 0 has -1"),
        ("[[1.0]]", "document 0 has 1.0"),
        ("[[true]]", "document 0 has True"),
    ],
)
def test_a_wrong_tokens_file_is_one_sentence(capfd, model, tmp_path, content, sentence):
    file = tmp_path / "documents.json"
    file.write_text(content)
    assert cli.run(["parity", "--model", str(model), "--tokens", str(file)]) == 2
    assert sentence in capfd.readouterr().err


def test_parity_passes_its_arguments_on(model, tmp_path, run_parity):
    calls = run_parity()
    file = tmp_path / "documents.json"
    file.write_text("[[1, 2, 31], [0]]")
    argv = ["parity", "--model", str(model), "--tokens", str(file), "--ep", "3", "--layers"]
    assert cli.run(argv) == 0
    assert cli.run(["parity", "--model", str(model)]) == 0
    assert calls[0] == (str(model), [[1, 2, 31], [0]], 3, True)
    assert calls[1] == (str(model), cli.drawn_documents(32), 1, False)


def test_drawn_documents_are_the_same_every_time_and_in_the_vocabulary():
    assert cli.drawn_documents(32) == cli.drawn_documents(32)
    assert [len(document) for document in cli.drawn_documents(32)] == [40, 1, 17, 30]
    assert all(0 <= token < 32 for document in cli.drawn_documents(32) for token in document)


def test_json_is_all_there_is_on_stdout(capfd, model, run_parity):
    run_parity()
    assert cli.run(["parity", "--model", str(model), "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out) == PARITY
    assert "a library prints" in captured.err
    assert "a child process prints" in captured.err


@pytest.mark.parametrize(
    ("difference", "more", "status"),
    [(3e-6, [], 0), (1e-5, [], 0), (1.1e-5, [], 1), (float("nan"), [], 1), (3e-6, ["--bound", "1e-6"], 1)],
)
def test_a_difference_above_the_bound_is_a_finding(capsys, model, run_parity, difference, more, status):
    run_parity(logprob_abs_diff_max=difference)
    assert cli.run(["parity", "--model", str(model), *more]) == status


def test_the_first_layer_that_differs_is_pointed_at(capsys, model, run_parity):
    run_parity()
    cli.run(["parity", "--model", str(model), "--layers"])
    assert "first layer that differs by more than 1e-05 is 1 (full_attention)" in capsys.readouterr().out


def test_an_error_of_the_work_itself_is_one_sentence(capfd, model, run_parity, monkeypatch):
    run_parity()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("rank 1 ran out\nof memory")

    sys.modules["skyrl_qwen38.parity"].run_parity = fail
    assert cli.run(["parity", "--model", str(model)]) == 2
    assert capfd.readouterr().err == "error: rank 1 ran out of memory\n"


def test_interrupted(capfd, model, run_parity):
    run_parity()

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    sys.modules["skyrl_qwen38.parity"].run_parity = interrupt
    assert cli.run(["parity", "--model", str(model)]) == 130


def test_make_tiny_gets_folder_and_seed(monkeypatch, tmp_path):
    from skyrl_qwen38.checkpoint import tiny

    asked = []
    monkeypatch.setattr(tiny, "make_tiny", lambda out, seed: asked.append((out, seed)))
    assert cli.run(["make-tiny", str(tmp_path / "tiny"), "--seed", "7"]) == 0
    assert asked == [(tmp_path / "tiny", 7)]


def _patch(name: str, target: str, scope: str = "trainer", **known: Fingerprint) -> Patch:
    return Patch(
        name=name,
        why=f"{name} is why",
        scope=scope,
        targets=(Target(target, known),),
        apply=lambda changes, settings: None,
    )


GOOD = _patch("good", "json.dumps")
GONE = _patch("gone", "no_such_library.name", scope="vllm")
REFUSED = _patch("wrong", "json.dumps", old=Fingerprint("(x)"))


@pytest.mark.parametrize(
    ("known", "more", "verdicts", "status"),
    [
        ((GOOD, GONE), [], ["applied", "not applicable (target absent)"], 0),
        ((GOOD, GONE), ["--scope", "trainer"], ["applied"], 0),
        ((GOOD, GONE), ["--scope", "vllm"], ["not applicable (target absent)"], 0),
        ((REFUSED, GOOD), [], ["refused (target changed: ", "applied"], 1),
    ],
)
def test_patches_reports_each_verdict(capsys, monkeypatch, known, more, verdicts, status):
    monkeypatch.setattr(cli, "_prepare", lambda device: None)
    monkeypatch.setattr(patches, "ALL_PATCHES", known)
    try:
        assert cli.run(["patches", "--json", *more]) == status
    finally:
        patching.undo("good")
    reported = json.loads(capsys.readouterr().out)["patches"]
    assert len(reported) == len(verdicts)
    for patch, verdict in zip(reported, verdicts, strict=True):
        assert patch["verdict"].startswith(verdict)
        assert patch["why"] == f"{patch['name']} is why"


def _real_patches(rank: int, world_size: int, device: str) -> tuple[int, str]:
    import contextlib
    import io

    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            status = cli.run(["patches", "--device", device, "--json"])
        return status, out.getvalue()
    finally:
        for patch in patches.ALL_PATCHES:
            patching.undo(patch.name)


def test_every_patch_applies_in_this_environment(ranks):
    ((status, out),) = ranks.run(_real_patches, "cpu", world_size=1, timeout=150)
    assert status == 0
    assert {p["name"]: p["verdict"] for p in json.loads(out)["patches"]} == {
        "bridge_peft_names": "applied",
        "qwen4_exp_bridge": "applied",
        "ple_row_shard": "applied",
    }
