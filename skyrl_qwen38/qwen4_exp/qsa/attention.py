"""Qwen sparse attention in its exactly dense range: causal attention inside each document."""

import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from skyrl_qwen38.qwen4_exp.documents import ForwardContext
from skyrl_qwen38.qwen4_exp.qsa.indexer import Indexer


class DocumentAttention(nn.Module):
    """Core attention: causal softmax attention over the keys of the query's own document.

    The documents come with the call's context. Megatron-Core's local core attention cannot serve: it refuses packed
    rows, and a given padding mask replaces its causal mask instead of joining it.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **kwargs) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attention_bias: ForwardContext,
        attn_mask_type: AttnMaskType | None = None,
        packed_seq_params: object | None = None,
    ) -> Tensor:
        """Query ``[S, B, heads, d]``, key and value ``[S, B, groups, d]``, to ``[S, B, heads*d]``.

        A packed row comes without its B of 1, ``[S, heads, d]``, and leaves as ``[S, heads*d]``.
        """
        packed = query.dim() == 3
        documents = attention_bias.documents
        query, key, value = (
            documents.pad(x.unsqueeze(1) if packed else x).transpose(1, 2) for x in (query, key, value)
        )  # [documents, heads, L, d]
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        output = documents.unpad(output.transpose(1, 2).flatten(-2))  # [S, B, heads*d]
        return output.squeeze(1) if packed else output.contiguous()


class QwenSparseAttention(SelfAttention):
    """Megatron-Core's gated self-attention (per-head query and key norms, partial RoPE, sigmoid output gate), with the
    indexer's weights beside it."""

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, layer_number: int, **kwargs
    ) -> None:
        super().__init__(config, submodules, layer_number, **kwargs)
        self.indexer = Indexer(config)
