"""Run folders: ``outputs/<run>``, resumed while unfinished, left alone once finished."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SUMMARY, METRICS = "summary.json", "metrics.jsonl"


def run_folder(outputs: Path, name: str, fresh: bool = False) -> Path:
    """The folder of the run ``name``: an unfinished one is resumed, else the next free of name, name-2, name-3, ….

    A run is finished when its ``summary.json`` is there.

    Args:
        outputs: parent of all runs.
        name: of the run, without a suffix.
        fresh: never resume.
    """
    number = 1
    while True:
        folder = outputs / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
        if not fresh and not (folder / SUMMARY).exists():
            return folder
        number += 1


def write_atomically(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text``, whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        try:
            temporary.write(text)
            temporary.flush()
            os.fsync(temporary.fileno())
            os.replace(temporary.name, path)
        except BaseException:
            os.unlink(temporary.name)
            raise


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``; a last line that was cut off by a kill is dropped."""
    path = folder / METRICS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_metrics(folder: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Rewrites ``metrics.jsonl``, one line a step."""
    write_atomically(folder / METRICS, "".join(f"{json.dumps(line)}\n" for line in lines))


def append_metrics(folder: Path, line: dict[str, Any]) -> None:
    """Adds one step to ``metrics.jsonl``; on the disk when this returns."""
    with open(folder / METRICS, "a") as file:
        file.write(f"{json.dumps(line)}\n")
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    """Prints the folder for a run: ``python -m skyrl_qwen38.runs OUTPUTS NAME``, ``FRESH=1`` for a new one."""
    outputs, name = sys.argv[1:]
    print(run_folder(Path(outputs), name, fresh=os.environ.get("FRESH") == "1"))


if __name__ == "__main__":
    main()
