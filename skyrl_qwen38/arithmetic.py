"""Short addition questions in GSM8K's answer form, the task of the tiny runs.

Questions are sums of two two-digit numbers that stay below 100. They come in three parts that share no operand
pair: the supervised warm-up of the tiny checkpoint, the prompts of RL, and the held-out questions. A pair is
unordered, since a + b = b + a. Which part a pair belongs to is a constant of this module, not of the seed: a
checkpoint and a dataset made with different seeds still keep the held-out pairs unseen. The seed chooses the order
of the questions and, held out, which operand comes first.

Answers are scored by skyrl-gym's own ``gsm8k`` environment: reward 1 if ``#### N`` in the response has N equal to
the sum, else 0.
"""

import argparse
import json
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PARTS = ("warmup", "train", "heldout")
HELDOUT_PAIRS = 320
# Addition with a carry is the harder half of the task, and it is what the warm-up leaves to be learnt.
CARRY_SHARE = 0.6
_PARTITION_SEED = 20_000_003


@dataclass(frozen=True)
class Question:
    """``left + right``, both two-digit, the sum below 100."""

    left: int
    right: int

    @property
    def pair(self) -> tuple[int, int]:
        """The unordered operands, by which the parts are kept apart."""
        return min(self.left, self.right), max(self.left, self.right)

    @property
    def text(self) -> str:
        return f"{self.left} + {self.right}"

    @property
    def carries(self) -> bool:
        return self.left % 10 + self.right % 10 >= 10

    @property
    def answer(self) -> int:
        return self.left + self.right

    @property
    def response(self) -> str:
        """The response that earns reward 1."""
        return f"#### {self.answer}"


def _partition() -> dict[str, list[tuple[int, int]]]:
    """Every usable operand pair, dealt to the three parts with the same share of carries in each."""
    pairs = [(low, high) for low in range(10, 50) for high in range(low, 100 - low)]
    carrying = [pair for pair in pairs if Question(*pair).carries]
    plain = [pair for pair in pairs if not Question(*pair).carries]
    dealer = random.Random(_PARTITION_SEED)
    dealer.shuffle(carrying)
    dealer.shuffle(plain)
    plain = plain[: round(len(carrying) * (1 - CARRY_SHARE) / CARRY_SHARE)]

    parts: dict[str, list[tuple[int, int]]] = {part: [] for part in PARTS}
    for kind, share in ((carrying, CARRY_SHARE), (plain, 1 - CARRY_SHARE)):
        heldout = round(HELDOUT_PAIRS * share)
        middle = heldout + (len(kind) - heldout) // 2
        parts["heldout"] += kind[:heldout]
        parts["train"] += kind[heldout:middle]
        parts["warmup"] += kind[middle:]
    return parts


def questions(part: str, seed: int = 0) -> list[Question]:
    """The questions of ``part`` (one of ``PARTS``) in an order drawn from ``seed``.

    Warm-up and training hold each pair in both orders; held-out holds each pair once.

    Raises:
        ValueError: ``part`` is not one of ``PARTS``.
    """
    if part not in PARTS:
        raise ValueError(f"arithmetic has no part {part!r}; use one of {', '.join(PARTS)}")
    draw = random.Random(f"{part}-{seed}")
    pairs = _partition()[part]
    if part == "heldout":
        asked = [Question(*pair) if draw.random() < 0.5 else Question(*reversed(pair)) for pair in pairs]
    else:
        asked = [Question(left, right) for low, high in pairs for left, right in sorted({(low, high), (high, low)})]
    draw.shuffle(asked)
    return asked


def row(question: Question, part: str, index: int) -> dict:
    """One line of a SkyRL prompt dataset."""
    return {
        "prompt": [{"role": "user", "content": question.text}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": str(question.answer)},
        "data_source": "arithmetic",
        "extra_info": {"part": part, "index": index},
    }


def write_jsonl(rows: Iterable[dict], path: Path) -> None:
    """Writes one JSON object a line; ``path`` appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for entry in rows:
                file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_dataset(folder: str | Path, seed: int = 0, parts: Sequence[str] = ("train", "heldout")) -> dict[str, Path]:
    """Writes ``<part>.jsonl`` for each part into ``folder`` and returns their paths by part."""
    paths = {part: Path(folder) / f"{part}.jsonl" for part in parts}
    for part, path in paths.items():
        write_jsonl((row(question, part, index) for index, question in enumerate(questions(part, seed))), path)
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m skyrl_qwen38.arithmetic FOLDER [--seed S]`` writes the datasets of RL and of evaluation."""
    parser = argparse.ArgumentParser(description="Write train.jsonl and heldout.jsonl of the arithmetic task.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for part, path in write_dataset(options.folder, options.seed).items():
        print(f"{path}: {len(questions(part, options.seed))} questions")


if __name__ == "__main__":
    main()
