"""FlexAttention over a selection: equal to the chunked path, and two compiled graphs for all lengths.

In a process of its own: what is counted are the graphs of one process, and the suite's others run without a compiler.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from skyrl_qwen38.qwen4_exp.documents import Documents
from skyrl_qwen38.qwen4_exp.qsa.attention import document_attention
from skyrl_qwen38.qwen4_exp.qsa.selection import Selection

ROOT = Path(__file__).parents[3]
BUDGET, RATIO = 16, 4
EARLY = 32  # blocks: in a document that starts at token 2 the last of them lies across the first two tiles
ROWS = [
    (200,),
    (333,),
    (129, 0, 1, 20, 21),
    (2, 600),
    *[(40 + 13 * i, 5, 150 + 61 * i, 1 + i) for i in range(19)],
]


def test_flex_equals_chunked_with_two_graphs_for_all_lengths():
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, "-m", "tests.unit.qwen4_exp.test_flex"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])
    assert len({sum(row) for row in ROWS}) >= 20
    assert [result["graphs"] for result in results] == [1] + [2] * (len(ROWS) - 1)
    assert max(result["difference"] for result in results) <= 5e-6  # fp32 rounding of another order of summation


def _case(lengths: tuple[int, ...]) -> tuple[list[torch.Tensor], Documents, Selection]:
    generator = torch.Generator().manual_seed(sum(lengths))
    first, kept = BUDGET + RATIO - 1, BUDGET // RATIO
    blocks = []
    for number, length in enumerate(lengths):
        # Every second document keeps early blocks only, so that whole tiles are skipped.
        last = EARLY if number % 2 else length
        rows = [
            torch.randperm(min((t + 1) // RATIO, last), generator=generator)[:kept].sort().values
            for t in range(first, length)
        ]
        blocks.append(torch.stack(rows).int() if rows else torch.zeros(0, kept, dtype=torch.int32))
    documents = Documents.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))
    inputs = [torch.randn(sum(lengths), heads, 16, generator=generator) for heads in (6, 2, 2)]
    return inputs, documents, Selection(RATIO, first, tuple(blocks))


def _run() -> None:
    """Prints the largest difference from the chunked path, and the graphs compiled so far, after each row."""
    results = []
    for lengths in ROWS:
        inputs, documents, selection = _case(lengths)
        flex = document_attention(*inputs, documents, selection, 0.25, "flex")
        chunked = document_attention(*inputs, documents, selection, 0.25, "chunked")
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        results.append({"difference": (flex - chunked).abs().max().item(), "graphs": graphs})
    print(json.dumps(results))


if __name__ == "__main__":
    _run()
