"""Times attention over selected blocks of keys, forward and backward, at the release's sizes; and how its memory grows.

    python tests/benchmarks/bench_qsa.py --json qsa.json      (about 15 minutes; --rounds 1: 5)
    python tests/benchmarks/bench_qsa.py --quick              (small sizes, to see that it runs)

24 query heads on 2 heads of keys, head_dim 64, budget 2048, blocks of 4, fp32, one thread; a query's blocks are random,
the hardest case for caches. Peers: a dense SDPA with the same selection as a mask, whose outputs and gradients ours are
first compared with, and a Python loop over queries (timed on some of them, spread over the document, and scaled up).
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))

from skyrl_qwen38.qwen4_exp.documents import Documents
from skyrl_qwen38.qwen4_exp.qsa.attention import document_attention
from skyrl_qwen38.qwen4_exp.qsa.selection import Selection
from tests.benchmarks import machine

HEADS, GROUPS, WIDTH, RATIO = 24, 2, 64, 4
SCALE = WIDTH**-0.5
_LOOPED = 64  # queries that the Python loop is timed on


class Case:
    """One document of random heads, and a random selection for it."""

    def __init__(self, length: int, budget: int):
        generator = torch.Generator().manual_seed(length)
        self.length = length
        self.inputs = [
            torch.randn(length, heads, WIDTH, generator=generator, requires_grad=True)
            for heads in (HEADS, GROUPS, GROUPS)
        ]
        self.seed = torch.randn(length, HEADS, WIDTH, generator=generator)
        first, kept = budget + RATIO - 1, budget // RATIO
        blocks = torch.empty(max(0, length - first), kept, dtype=torch.int32)
        for number in range(len(blocks)):
            seen = (first + number + 1) // RATIO
            blocks[number] = torch.randperm(seen, generator=generator)[:kept].sort().values
        self.selection = Selection(RATIO, first, (blocks,))
        self.documents = Documents.from_cu_seqlens(torch.tensor([0, length]), length)

    def mask(self) -> Tensor:
        """bool ``[length, length]`` of the keys that each query attends to."""
        mask = torch.ones(self.length, self.length, dtype=torch.bool).tril_()
        (blocks,), first = self.selection.blocks, self.selection.first
        count = -(-self.length // RATIO)
        for begin in range(0, len(blocks), 256):
            part = blocks[begin : begin + 256].long()
            own = (torch.arange(len(part)) + first + begin + 1).div(RATIO, rounding_mode="floor").clamp_(max=count - 1)
            seen = torch.zeros(len(part), count, dtype=torch.bool).scatter_(1, part, True)
            seen.scatter_(1, own.unsqueeze(1), True)
            mask[first + begin : first + begin + len(part)] &= seen.repeat_interleave(RATIO, 1)[:, : self.length]
        return mask

    def ours(self) -> Tensor:
        return document_attention(*self.inputs, self.documents, self.selection, SCALE)

    def dense(self, mask: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in self.inputs)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=SCALE, enable_gqa=True)
        return out[0].transpose(0, 1)

    def loop(self, mask: Tensor, queries: range) -> Tensor:
        query, key, value = self.inputs
        outputs = []
        for number in queries:
            keys = mask[number].nonzero().flatten()
            own = query[number].view(GROUPS, -1, WIDTH)
            weights = (own @ key[keys].permute(1, 2, 0) * SCALE).softmax(-1)
            outputs.append((weights @ value[keys].transpose(0, 1)).flatten(0, 1))
        return torch.stack(outputs)

    def seconds(self, forward: Callable[[], Tensor], queries: range | None = None) -> float:
        """Forward and backward."""
        seed = self.seed if queries is None else self.seed[queries.start : queries.stop : queries.step]
        begin = time.perf_counter()
        torch.autograd.grad(forward(), self.inputs, seed)
        return time.perf_counter() - begin

    def check(self) -> None:
        found, wanted = self.ours(), self.dense(self.mask())
        pairs = [(found, wanted)]
        pairs += zip(*(torch.autograd.grad(x, self.inputs, self.seed) for x in (found, wanted)), strict=True)
        for one, other in pairs:
            if (one - other).norm() > 2e-6 * other.norm():
                raise AssertionError(f"chunked attention differs from the masked one at {self.length} tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, alternated (default 3)")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    budget = 64 if arguments.quick else 2048
    lengths = (256, 512) if arguments.quick else (4096, 8192, 16384)
    grown_at = (256, 512, 1024) if arguments.quick else (4096, 8192, 16384, 32768)
    Case(budget * 2, budget).check()
    cells: list[dict[str, Any]] = []
    with tqdm(total=len(lengths) * arguments.rounds + len(grown_at), disable=None) as progress:
        for length in lengths:
            case = Case(length, budget)
            mask = case.mask()
            looped = range(case.selection.first, length, max(1, (length - case.selection.first) // _LOOPED))
            taken: dict[str, list[float]] = {"ours": [], "dense mask": [], "loop": []}
            for _ in range(arguments.rounds):
                taken["ours"].append(case.seconds(case.ours))
                taken["dense mask"].append(case.seconds(lambda case=case, mask=mask: case.dense(mask)))
                some = case.seconds(lambda case=case, mask=mask, looped=looped: case.loop(mask, looped), looped)
                taken["loop"].append(some / len(looped) * (length - case.selection.first))
                progress.update()
            cells.append(
                {
                    "tokens": length,
                    "seconds": {name: statistics.median(times) for name, times in taken.items()},
                    "ours_is_faster": {
                        name: statistics.median(b / a for a, b in zip(taken["ours"], times, strict=True))
                        for name, times in taken.items()
                    },
                }
            )
        growth = {}
        for length in grown_at:
            case = Case(length, budget)
            _, grown = machine.peak_memory(lambda case=case: case.seconds(case.ours))
            growth[length] = grown
            progress.update()
    cells.append({"what": "memory of forward and backward, bytes by tokens", "bytes": growth})
    fastest = {cell["tokens"]: cell["ours_is_faster"] for cell in cells[:-1]}
    loop, dense = fastest[lengths[1]]["loop"], fastest[lengths[-1]]["dense mask"]
    # Bytes a token at the longest against half of it: 1 is linear growth, 2 quadratic.
    linear = growth[grown_at[-1]] / max(1, growth[grown_at[-2]]) / 2
    result = {
        "machine": machine.describe(),
        "cells": cells,
        "targets": {
            f"{lengths[1]} tokens, times as fast as a loop over queries": {
                "wanted": 20,
                "measured": loop,
                "met": loop >= 20,
            },
            f"{lengths[-1]} tokens, times as fast as a dense mask": {"wanted": 2, "measured": dense, "met": dense >= 2},
            f"bytes a token at {grown_at[-1]} tokens over those at {grown_at[-2]}": {
                "wanted": 1.1,
                "measured": linear,
                "met": linear <= 1.1,
            },
        },
    }
    for cell in cells[:-1]:
        times = "  ".join(f"{name} {value:.2f} s" for name, value in cell["seconds"].items())
        print(f"{cell['tokens']:6} tokens: {times}")
    for length, grown in growth.items():
        print(f"{length:6} tokens: {grown / (1 << 20):.0f} MiB")
    for name, target in result["targets"].items():
        verdict = "met" if target["met"] else "NOT MET"
        print(f"{verdict:9}{name}: wanted {target['wanted']}, measured {target['measured']:.3g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
