"""The PLE layer: gates the rows of the n-gram table into every residual stream.

The table is not here. Its rows arrive with the call, without a gradient, from an exchange that the model has started
before its embedding; this layer only waits for them.
"""

import math

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from skyrl_qwen38.qwen4_exp.documents import ForwardContext
from skyrl_qwen38.qwen4_exp.norms import ZeroCenteredRMSNorm
from skyrl_qwen38.qwen4_exp.short_conv import short_conv

HASH_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
"""The hash's constants, int64, in the checkpoint: :class:`~skyrl_qwen38.ple.NgramHasher` computes the same."""

_GATE_FLOOR = 1e-6


class PLELayer(nn.Module):
    """``PLE(X) = U + SiLU(conv(RMS(U)))`` with ``U_j = a_j · W_v e`` for stream j, over the token's rows e.

    The gate of stream j compares its key with the stream: ``d = RMS(W_k e)_j · RMS(X)_j / √H``,
    ``a = σ(sign(d) √max(|d|, 1e-6))``, and σ(0) where d is 0. The convolution is causal, depthwise, dilated by the
    n-gram size: with kernel 4 and n-grams of 3 it reaches back 9 positions, and not beyond the document's start.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.streams, self.hidden_size = config.hc_count, config.hidden_size
        self.dilation = config.ngram_size
        width, dtype = self.streams * self.hidden_size, config.params_dtype
        self.key_proj = nn.Linear(config.ple_embed_dim, width, bias=False, dtype=dtype)
        self.value_proj = nn.Linear(config.ple_embed_dim, self.hidden_size, bias=False, dtype=dtype)
        self.norm_key, self.norm_query, self.norm_conv = (
            ZeroCenteredRMSNorm(config, width, config.layernorm_epsilon, group_size=self.hidden_size) for _ in range(3)
        )
        self.conv1d = nn.Conv1d(
            width,
            width,
            config.ple_conv_kernel_size,
            groups=width,
            dilation=self.dilation,
            padding=self.dilation * (config.ple_conv_kernel_size - 1),
            bias=False,
            dtype=dtype,
        )
        config.init_method(self.key_proj.weight)
        config.init_method(self.value_proj.weight)
        nn.init.zeros_(self.conv1d.weight)
        heads = (config.ngram_size - 1) * config.heads_per_ngram
        for name, size in zip(HASH_BUFFERS, (config.ngram_size, heads, heads), strict=True):
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64))

    def forward(self, streams: Tensor, context: ForwardContext) -> Tensor:
        """Streams ``[S, B, n*H]`` to what is added to them, ``[S, B, n*H]``."""
        rows = context.ngram_rows.wait()  # [B, S, K, D]
        rows = rows.flatten(-2).transpose(0, 1).to(streams.dtype)  # [S, B, K*D]
        per_stream = (self.streams, self.hidden_size)
        key = self.norm_key(self.key_proj(rows)).unflatten(-1, per_stream)
        query = self.norm_query(streams).unflatten(-1, per_stream)
        score = (key * query).sum(-1, keepdim=True) / math.sqrt(self.hidden_size)
        gate = torch.sigmoid(score.sign() * score.abs().clamp_min(_GATE_FLOOR).sqrt())  # [S, B, n, 1]
        gated = (gate * self.value_proj(rows).unsqueeze(-2)).flatten(-2)  # [S, B, n*H]
        return gated + self._short_conv(self.norm_conv(gated), context)

    def _short_conv(self, x: Tensor, context: ForwardContext) -> Tensor:
        documents = context.documents
        x = short_conv(documents.pack(x), self.conv1d.weight, documents.positions, self.dilation)
        return documents.unpack(F.silu(x))
