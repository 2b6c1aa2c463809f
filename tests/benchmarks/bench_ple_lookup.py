"""Times the row-sharded n-gram table against its peers, in one run, on the same tokens, in alternated rounds.

    python tests/benchmarks/bench_ple_lookup.py --json lookup.json       (all cells, some minutes)
    python tests/benchmarks/bench_ple_lookup.py --quick                  (one small cell, to see that it runs)

TorchRec is measured where it can be imported; tests/benchmarks/README.md says how to get it.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))

from skyrl_qwen38.ple import NgramHasher, RowPartition, TableSource
from tests.benchmarks import machine, ple_peers
from tests.benchmarks.text_ids import VOCAB_SIZE, text_ids

ROW_DIM = 160
PEERS = {
    "ours": ple_peers.Ours,
    "torchrec": ple_peers.TorchRec,
    "all_reduce": ple_peers.AllReduce,
    "all_to_all": ple_peers.AllToAll,
    "head_split": ple_peers.HeadSplit,
}
SAMPLES, PROMPT = 8, 512  # of the RL cell: samples of one prompt, and its tokens


@dataclass(frozen=True)
class Cell:
    """One measurement: `tokens` a rank of the ids "text", "bpe", "uniform" or "samples" (8 of one prompt, of text)."""

    ranks: int
    rows: int
    tokens: int
    ids: str


def cells(quick: bool) -> Iterator[Cell]:
    """What is measured, grouped by ranks and rows."""
    if quick:
        yield Cell(2, 100_000, 512, "text")
        return
    for ranks, rows in itertools.product((3, 4), (1_000_000, 8_000_000)):
        for tokens, ids in itertools.product((2048, 8192, 32768), ("text", "uniform")):
            yield Cell(ranks, rows, tokens, ids)
        yield Cell(ranks, rows, 8192, "bpe")
        yield Cell(ranks, rows, 8192, "samples")


def make_table(folder: Path, rows: int) -> NgramHasher:
    """A checkpoint with a bf16 table of about `rows` rows, whose values fp16 holds exactly too."""
    base = rows // 16
    hasher = NgramHasher(vocab_size=VOCAB_SIZE, eos_token_id=0, ngram_vocab_size_base=base - base // 1000)
    table = torch.randint(-255, 256, (hasher.num_rows, ROW_DIM), dtype=torch.int16).bfloat16().div_(64)
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.weight"
    save_file({name: table}, folder / "model.safetensors")
    return hasher


def micro_batch(cell: Cell, corpora: dict[str, Tensor], rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Packed tokens and their cu_seqlens, other ones for each rank and round."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    if cell.ids == "uniform":
        tokens = torch.randint(1, VOCAB_SIZE, (cell.tokens,), generator=generator)
        return tokens, torch.tensor([0, cell.tokens])
    corpus = corpora["bpe" if cell.ids == "bpe" else "text"]
    start = int(torch.randint(0, len(corpus) - cell.tokens, (), generator=generator))
    if cell.ids != "samples":
        return corpus[start : start + cell.tokens], torch.tensor([0, cell.tokens])
    # One prompt, and eight continuations that are text from the places behind it.
    response = cell.tokens // SAMPLES - PROMPT
    prompt = corpus[start : start + PROMPT]
    rest = corpus[start + PROMPT : start + PROMPT + SAMPLES * response]
    tokens = torch.cat([torch.cat([prompt, part]) for part in rest.split(response)])
    return tokens, torch.arange(SAMPLES + 1) * (PROMPT + response)


def measure(rank: int, group: list[Cell], folder: str, hasher: NgramHasher, rounds: int, answers: mp.Queue) -> None:
    """One rank's part of a group of cells with equal ranks and rows."""
    torch.set_num_threads(1)
    world_size = group[0].ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world_size}", rank=rank, world_size=world_size)
    corpora = {name: text_ids(name) for name in ("text", "bpe")}
    names = ["ours", "all_reduce", "all_to_all"]
    names += ["head_split"] if hasher.num_heads % world_size == 0 else []
    names += ["torchrec"] if _has_torchrec() else []
    rows = TableSource.open(folder).read(*RowPartition(hasher.num_rows, world_size).bounds(rank))
    peers: dict[str, ple_peers.Peer] = {}
    for name in names:
        own = rows
        if name == "torchrec":  # it rounds its parts up
            block = -(-hasher.num_rows // world_size)
            own = TableSource.open(folder).read(block * rank, min(block * (rank + 1), hasher.num_rows))
        peers[name] = PEERS[name](Path(folder), hasher, own)
    for cell in group:
        result = _measure_cell(cell, peers, corpora, rank, rounds)
        if rank == 0:
            answers.put(result)
    dist.barrier()
    dist.destroy_process_group()


def _measure_cell(
    cell: Cell, peers: dict[str, ple_peers.Peer], corpora: dict[str, Tensor], rank: int, rounds: int
) -> dict[str, Any]:
    batch = micro_batch(cell, corpora, rank, 0)
    expected = peers["ours"](*batch)
    memory, wire = {}, {}
    for name, peer in peers.items():
        if isinstance(peer, ple_peers.Ours | ple_peers.HeadSplit):
            peer.forget()
        found, memory[name] = machine.peak_memory(lambda peer=peer: peer(*batch))
        if not torch.equal(found.to(expected.dtype), expected):
            raise AssertionError(f"{name} gives other rows than ours in {cell}")
        del found
        # Of several batches: texts differ in how much they repeat.
        others = (micro_batch(cell, corpora, rank, number) for number in range(1, rounds + 1))
        wire[name] = statistics.mean(peer.wire_bytes(*other) for other in others)
    del expected
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds):
        batch = micro_batch(cell, corpora, rank, number + 1)
        order = list(peers)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            dist.barrier()
            begin = time.perf_counter()
            rows = peers[name](*batch)
            taken = torch.tensor(time.perf_counter() - begin)
            del rows
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[name].append(taken.item())
    totals = torch.tensor([[wire[name], memory[name]] for name in peers], dtype=torch.float64)
    dist.all_reduce(totals)
    tokens = cell.tokens * cell.ranks
    ours = seconds["ours"]
    return asdict(cell) | {
        "peers": {
            name: {
                "tokens_per_second": tokens / statistics.median(seconds[name]),
                "milliseconds": 1e3 * statistics.median(seconds[name]),
                "wire_bytes_per_token": totals[i, 0].item() / 2 / tokens,
                "peak_mib_per_rank": totals[i, 1].item() / cell.ranks / (1 << 20),
                "ours_is_faster": statistics.median(
                    theirs / mine for mine, theirs in zip(ours, seconds[name], strict=True)
                ),
            }
            for i, name in enumerate(peers)
        }
    }


def _has_torchrec() -> bool:
    try:
        import torchrec  # noqa: F401
    except ImportError:
        return False
    return True


def targets(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The goals of the lookup, each with what was measured; ratios are medians of paired rounds."""

    def ratio(cell: dict[str, Any], peer: str) -> float | None:
        return cell["peers"].get(peer, {}).get("ours_is_faster")

    def least(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return min(known) if known else None

    def wants(wanted: float, measured: float | None, at_most: bool = False) -> dict[str, Any]:
        met = None if measured is None else bool(measured <= wanted if at_most else measured >= wanted)
        return {"wanted": wanted, "measured": measured, "met": met}

    text = [cell for cell in found if cell["ids"] == "text" and cell["tokens"] == 8192]
    samples = [cell for cell in found if cell["ids"] == "samples"]
    bytes_kept = [
        cell["peers"]["ours"]["wire_bytes_per_token"] / cell["peers"]["all_to_all"]["wire_bytes_per_token"]
        for cell in text
    ]
    peers = ("torchrec", "all_reduce", "all_to_all")
    return {
        "text 8k, times as fast as all_to_all": wants(2, least([ratio(cell, "all_to_all") for cell in text])),
        "text 8k, times as fast as all_reduce": wants(12, least([ratio(cell, "all_reduce") for cell in text])),
        "text 8k, times as fast as torchrec": wants(3, least([ratio(cell, "torchrec") for cell in text])),
        "text 8k, wire bytes over all_to_all's": wants(0.45, max(bytes_kept, default=None), at_most=True),
        "8 samples of a prompt, times as fast as all_to_all": wants(
            3, least([ratio(cell, "all_to_all") for cell in samples])
        ),
        "any cell, times as fast as the fastest of torchrec, all_reduce, all_to_all": wants(
            0.95, least([ratio(cell, peer) for cell in found for peer in peers])
        ),
        "uniform ids, times as fast as head_split": wants(
            0.9, least([ratio(cell, "head_split") for cell in found if cell["ids"] == "uniform"])
        ),
        "text ids, times as fast as head_split": wants(
            0.95, least([ratio(cell, "head_split") for cell in found if cell["ids"] != "uniform"])
        ),
    }


def show(cell: dict[str, Any]) -> None:
    print(f"\n{cell['ranks']} ranks, {cell['rows']:,} rows, {cell['tokens']} tokens a rank, {cell['ids']} ids")
    print(f"  {'':12}{'ms':>9}{'tokens/s':>12}{'bytes/token':>13}{'peak MiB':>10}{'ours is':>10}")
    for name, peer in cell["peers"].items():
        print(
            f"  {name:12}{peer['milliseconds']:9.1f}{peer['tokens_per_second']:12,.0f}"
            f"{peer['wire_bytes_per_token']:13.0f}{peer['peak_mib_per_rank']:10.0f}{peer['ours_is_faster']:9.2f}x"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="one small cell")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each cell (default 7)")
    parser.add_argument("--ranks", type=int, help="only cells of so many ranks")
    parser.add_argument("--rows", type=int, help="only cells of so many rows")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("text", "bpe"):
        text_ids(name)  # once, before the ranks ask for it
    chosen = [
        cell
        for cell in cells(arguments.quick)
        if arguments.ranks in (None, cell.ranks) and arguments.rows in (None, cell.rows)
    ]
    found: list[dict[str, Any]] = []
    with tqdm(total=len(chosen), unit="cell", disable=None) as progress:
        for (ranks, rows), group in itertools.groupby(chosen, lambda cell: (cell.ranks, cell.rows)):
            part = list(group)
            with tempfile.TemporaryDirectory(prefix="bench-ple-") as folder:
                hasher = make_table(Path(folder), rows)
                answers = mp.get_context("spawn").Queue()
                context = mp.spawn(measure, (part, folder, hasher, arguments.rounds, answers), nprocs=ranks, join=False)
                while not context.join(timeout=0.1):
                    while not answers.empty():
                        found.append(answers.get())
                        progress.update()
                        show(found[-1])
                while len(found) < chosen.index(part[-1]) + 1:
                    found.append(answers.get(timeout=10))
                    show(found[-1])
    result = {"machine": machine.describe(), "cells": found, "targets": targets(found)}
    print()
    for name, target in result["targets"].items():
        verdict = {None: "not measured", True: "met", False: "NOT MET"}[target["met"]]
        measured = "-" if target["measured"] is None else f"{target['measured']:.2f}"
        print(f"{verdict:13} {name}: wanted {target['wanted']}, measured {measured}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
