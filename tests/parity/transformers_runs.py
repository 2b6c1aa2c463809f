"""What Transformers says about documents, each alone, in fp32, in a process without any redirection."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass
class Reference:
    """
    Attributes:
        logprobs: of every document, ``[tokens, V]``.
        streams: of every document, ``[layers, tokens, n*H]``, behind each layer.
        selections: of every document by layer number (from 1), int32 ``[queries, kept]``: the blocks of keys that the
            queries beyond the dense range keep.
        scores: of the same queries, float64 ``[queries, blocks]``, written here from the specification.
        loss: sum over documents of the next-token losses.
        gradients: of ``loss``, by name in the text-only layout with packed experts.
    """

    logprobs: list[Tensor]
    streams: list[Tensor]
    selections: list[dict[int, Tensor]]
    scores: list[dict[int, Tensor]]
    loss: float
    gradients: dict[str, Tensor]


def run(checkpoint: Path, documents: list[list[int]]) -> Reference:
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    model = Qwen4ExpForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    selections: dict[int, Tensor] = {}
    scores: dict[int, Tensor] = {}
    streams: list[Tensor] = []

    def choice_of(layer: int):
        def remember(module, inputs, mask) -> None:
            hidden, (cos, sin), *_ = inputs
            selections[layer] = _chosen(module, mask[0, 0])
            scores[layer] = _scores(module, hidden[0], cos[0], sin[0])

        return remember

    for number, layer in enumerate(model.model.layers, 1):
        layer.register_forward_hook(lambda module, inputs, output: streams.append(_first(output)[0].detach()))
        if hasattr(layer, "self_attn"):
            layer.self_attn.indexer.register_forward_hook(choice_of(number))
    found = Reference([], [], [], [], 0.0, {})
    for document in documents:
        streams.clear()
        ids = torch.tensor([document])
        logprobs = model(ids).logits[0].log_softmax(-1)
        found.logprobs.append(logprobs.detach())
        found.streams.append(torch.stack(streams))
        found.selections.append(dict(selections))
        found.scores.append(dict(scores))
        loss = -logprobs[:-1].gather(1, ids[0, 1:, None]).sum()
        loss.backward()
        found.loss += loss.item()
    found.gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


@torch.no_grad()
def rounding(checkpoint: Path, documents: list[list[int]], reference: Reference) -> float:
    """How far Transformers' log-probs in fp32 are from its own in fp64: what fp32 resolves in this configuration."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    # Its grouped experts know no fp64.
    options = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    model = Qwen4ExpForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, **options)
    exact = [model(torch.tensor([document])).logits[0].log_softmax(-1) for document in documents]
    return max((one - other).abs().max().item() for one, other in zip(reference.logprobs, exact, strict=True))


def _first(output: Tensor | tuple) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _chosen(indexer: torch.nn.Module, mask: Tensor) -> Tensor:
    """The blocks that a mask of keys, bool ``[tokens, tokens]``, keeps for each query beyond the dense range."""
    ratio, kept = indexer.compress_ratio, indexer.block_topk
    rows = []
    for query in range(indexer.token_budget + ratio - 1, len(mask)):
        blocks = mask[query, : (query + 1) // ratio * ratio].view(-1, ratio).all(1)
        rows.append(blocks.nonzero().flatten().int())
    return torch.stack(rows) if rows else torch.empty(0, kept, dtype=torch.int32)


def _scores(indexer: torch.nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Specification section 5, in float64; blocks that a query does not see score minus infinity."""
    heads, width, ratio = indexer.index_n_heads, indexer.index_head_dim, indexer.compress_ratio
    cos, sin, projected = cos.double(), sin.double(), hidden.double() @ indexer.index_qk_proj.weight.double().t()
    complete = len(hidden) // ratio

    def normed(x: Tensor, norm: torch.nn.Module) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (1 + norm.weight.double())

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1] // 2
        left, right, cos, sin = x[..., :half], x[..., half : 2 * half], cos[..., :half], sin[..., :half]
        return torch.cat([left * cos - right * sin, right * cos + left * sin, x[..., 2 * half :]], -1)

    queries = normed(projected[:, : heads * width].view(-1, heads, width), indexer.q_layernorm)
    queries = rotated(queries, cos[:, None], sin[:, None])
    pooled = projected[: complete * ratio, heads * width :].view(complete, ratio, width).mean(1)
    starts = slice(0, complete * ratio, ratio)
    keys = rotated(normed(pooled, indexer.k_layernorm), cos[starts], sin[starts])
    scores = torch.einsum("qhw,bw->qhb", queries, keys).clamp(min=0).sum(1)
    query, block = torch.arange(len(hidden))[:, None], torch.arange(complete)
    scores = scores.masked_fill((block + 1) * ratio > query + 1, float("-inf"))
    return scores[indexer.token_budget + ratio - 1 :].detach()
