"""Qwen sparse attention: in each document, a query's blocks of keys as the indexer has chosen them."""

from typing import Literal

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from skyrl_qwen38.qwen4_exp.documents import Documents, ForwardContext
from skyrl_qwen38.qwen4_exp.qsa.chunked import chunked_attention
from skyrl_qwen38.qwen4_exp.qsa.flex import flex_document_attention
from skyrl_qwen38.qwen4_exp.qsa.indexer import Indexer
from skyrl_qwen38.qwen4_exp.qsa.selection import Selection, SelectionTape

SelectedAttention = Literal["chunked", "flex"]
"""How a selection is attended to."""


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    selection: Selection | None,
    scale: float,
    kernel: SelectedAttention = "chunked",
) -> Tensor:
    """Causal softmax attention over the selected keys of the query's own document.

    Args:
        query: ``[T, heads, d]``, packed.
        key, value: ``[T, groups, d]``.
        selection: None where every document is in the dense range.
        kernel: for a selection; without one attention is dense.

    Returns:
        ``[T, heads, d]``

    Raises:
        ValueError: a gradient is wanted of ``flex`` on CPU.
    """
    if selection is None:
        return _dense(query, key, value, documents.bounds, scale)
    if kernel == "flex":
        return flex_document_attention(query, key, value, documents, selection, scale)
    heads = [(start, min(stop, start + selection.first)) for start, stop in documents.bounds]
    dense = _dense(query, key, value, heads, scale).split([stop - start for start, stop in heads])
    parts = []
    for (start, stop), head, blocks in zip(documents.bounds, dense, selection.blocks, strict=True):
        parts.append(head)
        if len(blocks):
            own = query[start + selection.first : stop], key[start:stop], value[start:stop]
            parts.append(chunked_attention(*own, blocks, selection.first, selection.ratio, scale))
    return torch.cat(parts)


def _dense(query: Tensor, key: Tensor, value: Tensor, bounds: list[tuple[int, int]], scale: float) -> Tensor:
    """Causal attention inside the spans ``bounds``; their queries' outputs, one span after the other.

    Spans of similar length (up to the same power of two) are one padded batch: it costs less than a call for each
    where they are many and short, and wastes less than one batch for all where they differ.
    """
    if len(bounds) == 1:
        (start, stop) = bounds[0]
        return _causal(query[None, start:stop], key[None, start:stop], value[None, start:stop], scale)[0]
    alike: dict[int, list[int]] = {}
    for number, (start, stop) in enumerate(bounds):
        alike.setdefault((stop - start).bit_length(), []).append(number)
    alike.pop(0, None)  # spans without a token
    outputs, order = [], []
    for numbers in alike.values():
        longest = max(bounds[number][1] - bounds[number][0] for number in numbers)
        # Behind its end a span repeats its last token, whose outputs nobody reads.
        index = torch.stack([torch.arange(longest) + bounds[n][0] for n in numbers])
        index = index.minimum(torch.tensor([[bounds[n][1] - 1] for n in numbers]))
        index = index.to(query.device, non_blocking=True)
        padded = _causal(query[index], key[index], value[index], scale).flatten(0, 1)
        for place, number in enumerate(numbers):
            start, stop = bounds[number]
            outputs.append(padded[place * longest : place * longest + stop - start])
            order.append(number)
    by_number = [output for _, output in sorted(zip(order, outputs, strict=True), key=lambda pair: pair[0])]
    return torch.cat(by_number) if by_number else query[:0]


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``[batch, L, heads, d]``, with fewer heads of keys and values."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)


class DocumentAttention(nn.Module):
    """Core attention, in the place of Megatron-Core's.

    Documents and selection come with the call's context. Megatron-Core's local core attention cannot serve: it refuses
    packed rows, and a given padding mask replaces its causal mask instead of joining it.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **kwargs) -> None:
        super().__init__()
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.kernel: SelectedAttention = config.qsa_attention

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attention_bias: "_QSAContext",
        attn_mask_type: AttnMaskType | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Query ``[S, B, heads, d]``, key and value ``[S, B, groups, d]``, to ``[S, B, heads*d]``.

        A packed row comes without its B of 1, ``[S, heads, d]``, and leaves as ``[S, heads*d]``.
        """
        if query.dim() == 3:
            output = document_attention(query, key, value, *attention_bias, self.softmax_scale, self.kernel)
            return output.flatten(1)
        documents = attention_bias[0]
        packed = (documents.pack(x) for x in (query, key, value))
        output = document_attention(*packed, *attention_bias, self.softmax_scale, self.kernel)
        return documents.unpack(output.flatten(1)).contiguous()


_QSAContext = tuple[Documents, Selection | None]


class QwenSparseAttention(SelfAttention):
    """Megatron-Core's gated self-attention (per-head query and key norms, partial RoPE, sigmoid output gate) over the
    keys that the indexer chooses."""

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, layer_number: int, **kwargs
    ) -> None:
        super().__init__(config, submodules, layer_number, **kwargs)
        self.indexer = Indexer(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        attention_bias: ForwardContext,
        rotary_pos_emb: Tensor,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """``[S, B, H]`` to ``[S, B, H]``; ``attention_bias`` carries the call's context, see there."""
        documents = attention_bias.documents
        selection = self._select(hidden_states, documents, rotary_pos_emb, attention_bias.selections)
        return super().forward(
            hidden_states,
            attention_mask,
            attention_bias=(documents, selection),
            rotary_pos_emb=rotary_pos_emb,
            **kwargs,
        )

    def _select(
        self, hidden_states: Tensor, documents: Documents, rotary_pos_emb: Tensor, tape: SelectionTape | None
    ) -> Selection | None:
        if documents.longest <= self.indexer.first:
            return None
        if tape is not None and tape.replay:
            return tape.read(self.layer_number, documents)
        selection = self.indexer(documents.pack(hidden_states), documents, rotary_pos_emb[:, 0, 0])
        if tape is not None:
            tape.layers[self.layer_number] = selection
        return selection
