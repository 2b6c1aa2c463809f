"""What a lookup moves on clusters that are not here: bytes, messages, imbalance, and the time by an α-β model.

    python tests/benchmarks/simulate_exchange.py --json exchange.json --plot exchange.svg
    python tests/benchmarks/simulate_exchange.py --quick

One step's samples (32 prompts × 8 samples × 10k tokens of real text, the released hash) are dealt to EP ranks as SkyRL
deals them: in order, so that a prompt's samples lie on one rank, or on neighbours where ranks are more than prompts.
All ranks' first micro-batches, one sample each, are looked up at the same time. Three ways are compared:

  flat       every rank asks every owner, each row once a rank: what `RowShardedTable` does
  two-level  the ranks of a node first make their rows unique among themselves over NVLink; then one rank of the node
             asks each owner, and hands the rows on
  node       a whole copy of the table in each node's memory: no exchange
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))

from skyrl_qwen38.ple import NgramHasher, RowPartition
from tests.benchmarks import machine
from tests.benchmarks.text_ids import text_ids

GPUS_A_NODE = 8
PROMPTS, SAMPLES, TOKENS, PROMPT_TOKENS = 32, 8, 10_000, 1_000
ROW_BYTES, ID_BYTES = 320, 4


@dataclass(frozen=True)
class Link:
    """α seconds a message, β bytes a second and GPU, in one direction."""

    latency: float
    rate: float

    def seconds(self, messages: float, nbytes: float) -> float:
        return messages * self.latency + nbytes / self.rate


# NVLink 4 of an H100/H200 node; InfiniBand at 45 GB/s a GPU; PCIe 5 x16 as measured by most. Latencies are those of one
# more peer in an NCCL all-to-all, rounded up.
NVLINK = Link(1e-6, 400e9)
INFINIBAND = Link(3e-6, 45e9)
PCIE = Link(0, 50e9)


def samples(count: int, corpus: Tensor) -> list[Tensor]:
    """`count` samples, eight in a row of one prompt; responses are text from behind the prompt, each from elsewhere."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        if number % SAMPLES == 0:
            start = int(torch.randint(0, len(corpus) - 20 * TOKENS, (), generator=generator))
            prompt = corpus[start : start + PROMPT_TOKENS]
        behind = start + PROMPT_TOKENS + int(torch.randint(0, 10 * TOKENS, (), generator=generator))
        made.append(torch.cat([prompt, corpus[behind : behind + TOKENS - PROMPT_TOKENS]]))
    return made


def asked_rows(ep: int, rows: list[Tensor]) -> list[Tensor]:
    """The distinct rows that each rank asks for: of its first sample, or of none."""
    each = max(len(rows) // ep, 1)
    return [rows[rank * each] if rank * each < len(rows) else rows[0][:0] for rank in range(ep)]


def per_owner(rows: Tensor, partition: RowPartition) -> Tensor:
    """float64 [EP]: how many of these rows each rank owns."""
    return torch.bincount(partition.owner(rows), minlength=partition.world_size).double()


def simulate(ep: int, hasher: NgramHasher, rows: list[Tensor]) -> dict[str, Any]:
    partition = RowPartition(hasher.num_rows, ep)
    asked = asked_rows(ep, rows)
    nodes = [asked[first : first + GPUS_A_NODE] for first in range(0, ep, GPUS_A_NODE)]
    node_of = torch.arange(ep) // GPUS_A_NODE
    matrix = torch.stack([per_owner(own, partition) for own in asked])  # [asker, owner]
    node_rows = [torch.cat(members).unique() for members in nodes]
    node_matrix = torch.stack([per_owner(own, partition) for own in node_rows])  # [node, owner]

    other_node = node_of[:, None] != node_of[None, :]
    not_self = ~torch.eye(ep, dtype=torch.bool)
    unit = ROW_BYTES + ID_BYTES
    # flat: a rank gets its rows, and sends those it owns; the fuller direction counts.
    away, near = matrix * other_node, matrix * (~other_node & not_self)
    across = torch.maximum(away.sum(1), away.sum(0)) * unit
    inside = torch.maximum(near.sum(1), near.sum(0)) * unit
    served = matrix.sum(0) * ROW_BYTES  # read from host memory over PCIe
    far_peers, near_peers = ep - min(ep, GPUS_A_NODE), min(ep, GPUS_A_NODE) - 1
    flat = PCIE.seconds(0, served.max()) + max(
        INFINIBAND.seconds(2 * far_peers, across.max()), NVLINK.seconds(2 * near_peers, inside.max())
    )
    # two-level: a node's rows are unique, and each of its ranks fetches from the owners of its own place in their node.
    place = torch.arange(ep) % GPUS_A_NODE
    fetched = torch.stack([node_matrix[:, place == local].sum(1) for local in range(min(ep, GPUS_A_NODE))], 1)
    own_node = torch.stack([node_matrix[node, node_of == node] for node in range(len(nodes))])  # needs no network
    sent = node_matrix.sum(0) - own_node.flatten()
    received = fetched - own_node
    across_2 = torch.maximum(received.max(), sent.max()) * unit
    handed = torch.stack([own.new_tensor(len(own), dtype=torch.float64) for own in asked]).max() * unit
    two_level = (
        PCIE.seconds(0, node_matrix.sum(0).max() * ROW_BYTES)
        + INFINIBAND.seconds(2 * (len(nodes) - 1), across_2)
        + NVLINK.seconds(2 * near_peers, 2 * handed)
    )
    unique = torch.tensor([float(len(own)) for own in asked])
    node_unique = torch.tensor([float(len(own)) for own in node_rows])
    busy = unique[unique > 0]
    return {
        "ep": ep,
        "nodes": len(nodes),
        "unique_rows_per_rank": busy.mean().item(),
        "unique_rows_per_node": node_unique[node_unique > 0].mean().item(),
        "bytes_across_nodes_per_rank": across.mean().item(),
        "bytes_across_nodes_per_rank_two_level": (received.mean() * unit).item(),
        "messages_per_rank": 2 * (ep - 1),
        "imbalance": (matrix.sum(0).max() / matrix.sum(0).mean()).item(),
        "milliseconds": {
            "flat": 1e3 * float(flat),
            "two-level": 1e3 * float(two_level),
            "node": 1e3 * float(PCIE.seconds(0, unique.max() * ROW_BYTES)),
        },
        "two_level_is_faster": float(flat / two_level),
    }


def plot(cells: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name in cells[0]["milliseconds"]:
        axes.plot([cell["ep"] for cell in cells], [cell["milliseconds"][name] for cell in cells], "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="EP (8 GPUs a node)", ylabel="ms a lookup of 10k tokens a rank")
    axes.set_xticks([cell["ep"] for cell in cells], [str(cell["ep"]) for cell in cells])
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="draw the times there (svg, png)")
    parser.add_argument("--quick", action="store_true", help="EP 8 and 16 only, of short samples")
    arguments = parser.parse_args()
    hasher = NgramHasher(vocab_size=248_320, eos_token_id=248_044)
    corpus = text_ids("bpe")
    eps = (8, 16) if arguments.quick else (8, 16, 32, 64, 128, 256, 512)
    texts = samples(PROMPTS * SAMPLES, corpus)
    if arguments.quick:
        texts = [text[:1000] for text in texts]
    rows = [hasher.row_ids(text).unique() for text in tqdm(texts, desc="hashing", disable=None)]
    cells = [simulate(ep, hasher, rows) for ep in tqdm(eps, desc="EP", disable=None)]
    print(
        f"{'EP':>4}{'rows/rank':>11}{'rows/node':>11}{'MB across':>11}{'two-level':>11}{'messages':>10}"
        f"{'imbalance':>11}{'flat ms':>9}{'two-level':>11}{'node':>7}{'ratio':>8}"
    )
    for cell in cells:
        times = cell["milliseconds"]
        print(
            f"{cell['ep']:4}{cell['unique_rows_per_rank']:11,.0f}{cell['unique_rows_per_node']:11,.0f}"
            f"{cell['bytes_across_nodes_per_rank'] / 1e6:11.2f}"
            f"{cell['bytes_across_nodes_per_rank_two_level'] / 1e6:11.2f}{cell['messages_per_rank']:10}"
            f"{cell['imbalance']:11.2f}{times['flat']:9.3f}{times['two-level']:11.3f}{times['node']:7.3f}"
            f"{cell['two_level_is_faster']:8.2f}"
        )
    worth = [cell["ep"] for cell in cells if cell["two_level_is_faster"] >= 1.5]
    print(
        f"two levels pay (1.5 times as fast) from EP {worth[0]} on"
        if worth
        else "two levels never are 1.5 times as fast"
    )
    middle = [cell["two_level_is_faster"] for cell in cells if cell["ep"] in (32, 64)]
    result = {
        "machine": machine.describe(),
        "cells": cells,
        "targets": {
            "two levels are worth building (at EP 32 to 64)": {
                "wanted": 1.5,
                "measured": max(middle, default=None),
                "met": max(middle) >= 1.5 if middle else None,
            }
        },
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.plot:
        plot(cells, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
