"""What the parity tests run on the ranks of a pool: each function builds a model from a checkpoint and uses it.

All ranks form one expert-parallel group, in which every rank is also a data-parallel rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE_ATTENTION_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}


@dataclass
class Built:
    bridge: Any
    chunks: list
    provider: Any

    @property
    def model(self):
        return self.chunks[0]


def warm_up(rank: int, world_size: int) -> None:
    """Imports what every other function here needs."""
    import skyrl_qwen38.cpu

    skyrl_qwen38.cpu.install()
    import skyrl_qwen38.qwen4_exp.bridge


def build(checkpoint: Path, table: str = "rows", load_weights: bool = True, **overrides) -> Built:
    """The model on this rank. ``table`` is "rows" or "heads", the split of the n-gram table."""
    import skyrl_qwen38.cpu

    skyrl_qwen38.cpu.install()
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state, tensor_parallel

    from skyrl_qwen38 import patching
    from skyrl_qwen38.patches import ple_row_shard, qwen4_exp_bridge

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), distributed_timeout_minutes=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    flags = {"ple_row_shard": table == "rows"}
    settings = SimpleNamespace(ple=SimpleNamespace(storage="auto"))
    patching.apply([qwen4_exp_bridge.PATCH, ple_row_shard.PATCH], "trainer", flags, settings)

    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    provider = bridge.to_megatron_provider(load_weights=load_weights)
    provider.expert_model_parallel_size = dist.get_world_size()
    for name, value in overrides.items():
        setattr(provider, name, value)
    provider.finalize()
    chunks = provider.provide_distributed_model(wrap_with_ddp=False, bf16=bool(overrides.get("bf16")))
    return Built(bridge, chunks, provider)


def packed_logits(model, documents: list[list[int]], tape: Any = None) -> list[Tensor]:
    """Logits of documents that lie in one packed row, ``[tokens, V]`` for each."""
    ids = torch.tensor([list(chain.from_iterable(documents))])
    logits = model(ids, None, None, packed_seq_params=packing(documents), selections=tape)
    return list(logits[0].split([len(document) for document in documents]))


def packing(documents: list[list[int]]):
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *accumulate(map(len, documents))], dtype=torch.int32)
    longest = max(map(len, documents))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def padded_logits(model, documents: list[list[int]], side: str, tape: Any = None) -> list[Tensor]:
    """Logits of documents in padded rows, as SkyRL hands them over without packing."""
    longest = max(map(len, documents))
    ids = torch.zeros(len(documents), longest, dtype=torch.int64)
    keep = torch.zeros(len(documents), longest, dtype=torch.bool)
    for row, document in enumerate(documents):
        place = slice(0, len(document)) if side == "right" else slice(longest - len(document), longest)
        ids[row, place], keep[row, place] = torch.tensor(document), True
    positions = torch.arange(longest).expand(len(documents), -1)
    logits = model(ids, positions, ~keep[:, None, None, :], selections=tape)
    return [logits[row, keep[row]] for row in range(len(documents))]


def tape_of(provider: Any, selections: list[dict[int, Tensor]]) -> Any:
    """What documents' selections, in their order, are to a call of the model: it replays them."""
    from skyrl_qwen38.qwen4_exp.qsa.selection import Selection, SelectionTape

    ratio = provider.indexer_compress_ratio
    first = provider.indexer_budget + ratio - 1
    layers = selections[0] if selections else {}
    return SelectionTape(
        replay=True, layers={layer: Selection(ratio, first, tuple(s[layer] for s in selections)) for layer in layers}
    )


@torch.no_grad()
def logprobs(
    rank: int,
    world_size: int,
    checkpoint: Path,
    documents: list,
    selections: list,
    form: str,
    table: str,
    attention: str = "chunked",
) -> list[Tensor]:
    """Log-probs of this rank's documents (every world_size-th), as "packed", "right" or "left" padded rows."""
    built = build(checkpoint, table, qsa_attention=attention)
    model, tape = built.model.eval(), tape_of(built.provider, selections[rank::world_size])
    own = documents[rank::world_size]
    logits = packed_logits(model, own, tape) if form == "packed" else padded_logits(model, own, form, tape)
    return [scores.log_softmax(-1) for scores in logits]


@dataclass
class Observed:
    """Of every document, packed: see `transformers_runs.Reference`; the selections are this model's own."""

    logprobs: list[Tensor]
    streams: list[Tensor]
    selections: list[dict[int, Tensor]]


@torch.no_grad()
def observe(rank: int, world_size: int, checkpoint: Path, documents: list, selections: list) -> Observed:
    """All documents on every rank, packed into one row: log-probs and streams with the given selections, and which
    blocks the model selects itself (given those before)."""
    from megatron.core.utils import unwrap_model

    from skyrl_qwen38.qwen4_exp.qsa.attention import QwenSparseAttention
    from skyrl_qwen38.qwen4_exp.qsa.selection import SelectionTape

    built = build(checkpoint)
    model = built.model.eval()
    lengths = [len(document) for document in documents]
    streams, chosen = [], SelectionTape()
    for layer in unwrap_model(model).decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: streams.append(output[0][:, 0].clone()))
        if isinstance(layer.self_attention, QwenSparseAttention):
            layer.self_attention.register_forward_pre_hook(_choose_too(chosen), with_kwargs=True)
    logits = packed_logits(model, documents, tape_of(built.provider, selections))
    by_document = zip(*(stream.split(lengths) for stream in streams), strict=True)
    return Observed(
        [scores.log_softmax(-1) for scores in logits],
        [torch.stack(parts) for parts in by_document],
        [{layer: s.blocks[number] for layer, s in chosen.layers.items()} for number in range(len(documents))],
    )


def _choose_too(tape: Any) -> Callable:
    """A hook that has a layer choose for the tape, whatever it is told to attend to."""

    def choose(module, inputs, kwargs):
        documents, angles = kwargs["attention_bias"].documents, kwargs["rotary_pos_emb"]
        module._select(inputs[0], documents, angles, tape)

    return choose


def loss_and_gradients(
    rank: int,
    world_size: int,
    checkpoint: Path,
    documents: list,
    selections: list,
    overrides: dict,
    in_flight: int = 1,
) -> tuple[float, dict[str, Tensor]]:
    """The loss of all ranks' documents together, and its gradients by Hugging Face name (on rank 0; {} elsewhere).

    A rank's documents are packed into ``in_flight`` micro-batches, all of them forwarded before the first backward.
    """
    built = build(checkpoint, **overrides)
    model = built.model.train()
    own, chosen = documents[rank::world_size], selections[rank::world_size]
    losses = [
        _loss(model, own[first::in_flight], tape_of(built.provider, chosen[first::in_flight]))
        for first in range(in_flight)
    ]
    for loss in losses:
        loss.backward()
    total = torch.stack(losses).sum().detach()
    dist.all_reduce(total)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if ".experts.local_experts." not in name:  # an expert has seen the tokens of all ranks already
                dist.all_reduce(gradient)
            parameter.data.copy_(gradient)
    # The bridge's own export puts the gradients, in the place of the weights, into Hugging Face's layout.
    exported = {name: tensor.clone() for name, tensor in export(built)}
    return total.item(), exported if rank == 0 else {}


def table_collectives(rank: int, world_size: int, checkpoint: Path, documents: list, overrides: dict) -> list[int]:
    """How many collectives the table's own group sees in a training step (with backward), and in an evaluation."""
    model = build(checkpoint, **overrides).model
    group, all_to_all = model.ple_table._exchange._group, dist.all_to_all_single
    calls = 0

    def counting(*args, **kwargs):
        nonlocal calls
        calls += kwargs.get("group") is group
        return all_to_all(*args, **kwargs)

    own = documents[rank::world_size]
    counts = []
    dist.all_to_all_single = counting
    try:
        _loss(model.train(), own).backward()
        counts.append(calls)
        with torch.no_grad():
            packed_logits(model.eval(), own)
        counts.append(calls - counts[0])
    finally:
        dist.all_to_all_single = all_to_all
    return counts


def export(built: Built) -> Iterator[tuple[str, Tensor]]:
    return built.bridge.export_hf_weights(built.chunks, cpu=True, show_progress=False)


def _loss(model, documents: list[list[int]], tape: Any = None) -> Tensor:
    loss = torch.zeros(())
    for document, logits in zip(documents, packed_logits(model, documents, tape), strict=True):
        scores = logits[:-1].log_softmax(-1)
        loss = loss - scores.gather(1, torch.tensor(document)[1:, None]).sum()
    return loss


def round_trip(rank: int, world_size: int, checkpoint: Path) -> dict[str, Tensor]:
    """What the bridge exports of what it has loaded."""
    return {name: tensor.clone() for name, tensor in export(build(checkpoint))}


def inspect(rank: int, world_size: int, checkpoint: Path, look: Callable[[Built], Any], overrides: dict) -> Any:
    """``look(built)``, a top-level function of a test module."""
    return look(build(checkpoint, **overrides))
