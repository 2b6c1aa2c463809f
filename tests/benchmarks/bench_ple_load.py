"""Times how the rows of a rank are loaded and gathered, against a plain reader and a plain gather of the same rows.

    python tests/benchmarks/bench_ple_load.py --json load.json     (a shard of 2 GB, about a minute)
    python tests/benchmarks/bench_ple_load.py --quick              (a small one, to see that it runs)

Loading is timed twice: with the file put out of the page cache before each reader (the disk's rate is the limit) and
with it there (memory's is). "Throws away" reads into one small buffer again and again, "keeps" into fresh memory, as
whoever needs the bytes afterwards must.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import trange

sys.path.insert(0, str(Path(__file__).parents[2]))

from skyrl_qwen38.ple import TableSource
from skyrl_qwen38.ple.storage import HostRows, MappedRows
from tests.benchmarks import machine

ROW_DIM = 160
_PIECE_BYTES = 8 << 20


def make_table(folder: Path, rows: int) -> Path:
    """A checkpoint of one bf16 table, in shards as released checkpoints have them."""
    shard = -(-rows // 16)
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    part = torch.randint(-999, 999, (shard, ROW_DIM), dtype=torch.int16).view(torch.bfloat16)
    path = folder / "model.safetensors"
    save_file({name.format(i): part.clone() for i in range(16)}, path)
    return path


def forget(path: Path) -> None:
    """Puts the file out of the page cache."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_and_throw_away(path: Path) -> None:
    """The whole file, piece by piece into one buffer."""
    buffer = bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def read_and_keep(path: Path) -> None:
    """The whole file into memory that was not touched before."""
    memory = memoryview(torch.empty(path.stat().st_size, dtype=torch.uint8).numpy())
    with path.open("rb", buffering=0) as stream:
        done = 0
        while done < len(memory):
            done += stream.readinto(memory[done : done + _PIECE_BYTES])


def seconds(action: Callable[[], Any]) -> float:
    """How long it takes; what it returns is given up outside the time."""
    gc.collect()
    begin = time.perf_counter()
    kept = action()
    taken = time.perf_counter() - begin
    del kept
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="a small shard")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    rows = 100_000 if arguments.quick else 2_000_000_000 // (2 * ROW_DIM)
    with tempfile.TemporaryDirectory(prefix="bench-ple-load-") as folder:
        path = make_table(Path(folder), rows)
        source = TableSource.open(folder)
        everything = (source, 0, source.num_rows)
        loading: dict[str, Callable[[], Any]] = {
            "plain reader, throws away": lambda: read_and_throw_away(path),
            "plain reader, keeps": lambda: read_and_keep(path),
            "pinned": lambda: HostRows(*everything),
            "mapped": lambda: MappedRows(*everything),
        }
        store, grown = machine.peak_memory(lambda: HostRows(*everything))
        taken: dict[str, list[float]] = {name: [] for name in loading}
        cold: dict[str, list[float]] = {name: [] for name in loading}
        held = store.rows * store.row_bytes
        del store
        for _ in trange(arguments.rounds, desc="loading", disable=None):
            for name, action in loading.items():
                forget(path)
                cold[name].append(seconds(action))
            for name, action in loading.items():
                taken[name].append(seconds(action))
        store = HostRows(*everything)
        numbers = torch.randint(0, source.num_rows, (131_072,), dtype=torch.int32)
        in_order = numbers.sort().values
        out = torch.empty(len(numbers), source.row_bytes, dtype=torch.uint8)
        whole = source.read(0, source.num_rows)
        gathering = {
            "sorted index_select": lambda: torch.index_select(
                whole, 0, in_order, out=out.view(torch.bfloat16).view(-1, ROW_DIM)
            ),
            "pinned": lambda: store.gather(numbers, out),
        }
        gathered: dict[str, list[float]] = {name: [] for name in gathering}
        for _ in trange(5 * arguments.rounds, desc="gathering", disable=None):
            for name, action in gathering.items():
                gathered[name].append(seconds(action))
    rate, cold_rate = (
        {name: held / statistics.median(times) / 1e9 for name, times in timed.items()} for timed in (taken, cold)
    )
    rows_a_second = {name: len(numbers) / statistics.median(times) for name, times in gathered.items()}
    paired = lambda ours, theirs: statistics.median(b / a for a, b in zip(ours, theirs, strict=True))  # noqa: E731
    loads = paired(taken["pinned"], taken["plain reader, keeps"])
    cold_loads = paired(cold["pinned"], cold["plain reader, throws away"])
    gathers = paired(gathered["pinned"], gathered["sorted index_select"])
    allowed = 1.02 * held + (64 << 20)
    result = {
        "machine": machine.describe(),
        "cells": [
            {"what": "loading, from disk", "bytes": held, "gigabytes_per_second": cold_rate},
            {
                "what": "loading, from the page cache",
                "bytes": held,
                "gigabytes_per_second": rate,
                "peak_bytes": grown,
            },
            {"what": "gathering", "rows": len(numbers), "rows_per_second": rows_a_second},
        ],
        "targets": {
            "loading from disk, of the rate of a plain reader that throws away": {
                "wanted": 0.8,
                "measured": cold_loads,
                "met": cold_loads >= 0.8,
            },
            "loading from the page cache, of the rate of a plain reader that keeps": {
                "wanted": 0.8,
                "measured": loads,
                "met": loads >= 0.8,
            },
            "peak memory, bytes": {"wanted": allowed, "measured": grown, "met": grown <= allowed},
            "seconds to open mapped": {
                "wanted": 0.5,
                "measured": statistics.median(taken["mapped"]),
                "met": statistics.median(taken["mapped"]) < 0.5,
            },
            "gathering, of a sorted index_select's rate": {"wanted": 0.7, "measured": gathers, "met": gathers >= 0.7},
        },
    }
    for where, rates in (("from disk", cold_rate), ("from the page cache", rate)):
        for name, value in rates.items():
            print(f"{name:28}{value:10.2f} GB/s {where}")
    for name, value in rows_a_second.items():
        print(f"{name:28}{value / 1e6:10.2f} M rows/s gathered")
    for name, target in result["targets"].items():
        verdict = "met" if target["met"] else "NOT MET"
        print(f"{verdict:9}{name}: wanted {target['wanted']:.4g}, measured {target['measured']:.4g}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
