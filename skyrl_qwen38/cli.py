"""`skyrl-qwen38 COMMAND`: what people and scripts run around a training run.

Exit status: 0 good, 1 a finding (the command did its work and something is wrong), 2 bad usage or input. An error is
one sentence on standard error. With `--json` standard output carries one JSON object and nothing else.
"""

import contextlib
import json
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from skyrl_qwen38.model_folder import open_model
from skyrl_qwen38.overrides import ConfigError

app = typer.Typer(
    help="Tools around training Qwen3.8-Flash-Next (qwen4_exp) with SkyRL.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

FINDING, BAD_USAGE = 1, 2

# Click's UsageError, reached so because some versions of typer carry a click of their own.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


class Device(StrEnum):
    """As `trainer.qwen38.device`."""

    CUDA = "cuda"
    CPU = "cpu"


class Scope(StrEnum):
    """The kind of process that a patch is for."""

    TRAINER = "trainer"
    VLLM = "vllm"


class Reference(StrEnum):
    """What log-probs are compared with."""

    TRANSFORMERS = "transformers"


OnDevice = Annotated[
    Device | None, typer.Option(help="As trainer.qwen38.device. Default: cuda where there is a GPU, else cpu.")
]


@app.command()
def patches(
    scope: Annotated[Scope | None, typer.Option(help="Only the patches of this kind of process.")] = None,
    device: OnDevice = None,
    as_json: AsJson = False,
) -> None:
    """Every patch, its verdict in this environment, and why it exists.

    Each patch is really applied, in this process. A refused patch is a finding.

    Examples: `skyrl-qwen38 patches`, `skyrl-qwen38 patches --scope trainer --json`
    """
    with _only_our_output():
        _prepare(device)
        from skyrl_qwen38 import patching
        from skyrl_qwen38.config import Qwen38Config
        from skyrl_qwen38.patches import ALL_PATCHES

        wanted = [patch for patch in ALL_PATCHES if scope is None or patch.scope == scope.value]
        reports = []
        for patch in wanted:
            try:
                reports += patching.apply([patch], patch.scope, {}, Qwen38Config())
            except patching.PatchRefused as refused:
                reports += refused.reports
    if as_json:
        _print_json(
            {
                "patches": [
                    {"name": p.name, "scope": p.scope, "verdict": str(r), "detail": r.detail, "why": p.why}
                    for p, r in zip(wanted, reports, strict=True)
                ]
            }
        )
    else:
        from rich.console import Console

        Console().print(patching.table([reports], ALL_PATCHES))
    if any(report.verdict is patching.Verdict.REFUSED for report in reports):
        raise typer.Exit(FINDING)


@app.command()
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights, the table and the warm-up's order.")] = 0,
) -> None:
    """Make the tiny qwen4_exp checkpoint, with tokenizer, that the CPU run trains.

    It is warmed up by a short supervised run, so that a reward is there to climb. Made again it does nothing.

    Example: `skyrl-qwen38 make-tiny outputs/tiny --seed 0`
    """
    from skyrl_qwen38.checkpoint import tiny

    tiny.make_tiny(out, seed=seed)


@app.command()
def parity(
    model: Annotated[Path, typer.Option(help="Folder of a qwen4_exp checkpoint small enough for this machine.")],
    tokens: Annotated[
        Path | None, typer.Option(help="JSON file: a list of documents, each a list of token ids. Default: drawn ones.")
    ] = None,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 1,
    against: Annotated[Reference, typer.Option(help="What to compare with.")] = Reference.TRANSFORMERS,
    layers: Annotated[bool, typer.Option("--layers", help="Also compare the residual streams layer by layer.")] = False,
    bound: Annotated[float, typer.Option(min=0, help="The largest difference of log-probs that is no finding.")] = 1e-5,
    as_json: AsJson = False,
) -> None:
    """Log-probs of the trainer's model against a reference, on the same tokens.

    The documents are packed into one row here and given to the reference one by one. A difference above the bound is
    a finding.

    Examples: `skyrl-qwen38 parity --model outputs/tiny --ep 3`,
    `skyrl-qwen38 parity --model outputs/tiny --tokens documents.json --layers --json`
    """
    facts = open_model(str(model), setting="--model")
    documents = read_documents(tokens, facts.vocab_size) if tokens else drawn_documents(facts.vocab_size)
    with _only_our_output():
        from skyrl_qwen38.parity import run_parity

        result = run_parity(str(model), documents, ep, layers)
    worst = result["logprob_abs_diff_max"]
    if as_json:
        _print_json(result)
    else:
        _print_parity(result, bound)
    if not worst <= bound:  # also when it is nan
        raise typer.Exit(FINDING)


def drawn_documents(vocab_size: int) -> list[list[int]]:
    """Documents of 40, 1, 17 and 30 random ids: a single token, and starts at odd places of the packed row."""
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in (40, 1, 17, 30)]


def read_documents(file: Path, vocab_size: int) -> list[list[int]]:
    """Documents of token ids from a JSON file.

    Raises:
        ConfigError: the file is missing, or is no list of non-empty lists of ids below `vocab_size`.
    """
    try:
        documents = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(documents, list) or not documents:
        raise ConfigError(f"{file} must hold a list of documents, each a list of token ids")
    for number, document in enumerate(documents):
        if not isinstance(document, list) or not document:
            raise ConfigError(f"{file}: document {number} is no list of token ids, or is empty")
        for token in document:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ConfigError(f"{file}: document {number} has {token!r}, which is no id from 0 to {vocab_size - 1}")
    return documents


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command; its exit status."""
    try:
        return app(argv, standalone_mode=False) or 0
    except _UsageError as error:
        return _fail(error.format_message(), BAD_USAGE)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except (ValueError, OSError, RuntimeError) as error:
        return _fail(" ".join(str(error).split()) or type(error).__name__, BAD_USAGE)


def _fail(sentence: str, status: int) -> int:
    if sentence:  # without arguments click has printed the help instead
        print(f"error: {sentence}", file=sys.stderr)
    return status


def _prepare(device: Device | None) -> None:
    """Make Megatron importable on this machine, and keep its import remarks to itself."""
    import torch

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", module="megatron")
    if device is Device.CPU or (device is None and not torch.cuda.is_available()):
        from skyrl_qwen38 import cpu

        cpu.install()


@contextlib.contextmanager
def _only_our_output() -> Iterator[None]:
    """Send what libraries and child processes print to standard error: standard output is for the answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def _print_parity(result: dict[str, Any], bound: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("document", "tokens", "largest difference", title="log-probs", title_justify="left")
    for number, document in enumerate(result["documents"]):
        table.add_row(str(number), str(document["tokens"]), f"{document['abs_diff_max']:.2e}")
    console.print(table)
    if result.get("layers"):
        table = Table("layer", "kind", "largest difference", title="residual streams", title_justify="left")
        for layer in result["layers"]:
            table.add_row(str(layer["layer"]), layer["kind"], f"{layer['stream_diff']:.2e}")
        console.print(table)
        if first := next((layer for layer in result["layers"] if not layer["stream_diff"] <= bound), None):
            console.print(f"The first layer that differs by more than {bound:g} is {first['layer']} ({first['kind']}).")
    console.print(
        f"EP={result['ep']}: largest difference {result['logprob_abs_diff_max']:.2e}, mean "
        f"{result['logprob_abs_diff_mean']:.2e}; bound {bound:g}"
    )
