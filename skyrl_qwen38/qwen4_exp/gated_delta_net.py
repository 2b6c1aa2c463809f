"""Gated DeltaNet of ``qwen4_exp`` on Megatron-Core's: its parameters and checkpoint layout, our forward.

Ours differs in the output gate (sigmoid, where the convolution keeps SiLU), in cutting at documents, in taking the
decay in fp32, and in running without ``flash-linear-attention``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net import common as mcore_gdn
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from skyrl_qwen38.qwen4_exp.documents import Documents, ForwardContext
from skyrl_qwen38.qwen4_exp.gated_delta_rule import gated_delta_rule
from skyrl_qwen38.qwen4_exp.short_conv import short_conv


@contextmanager
def _fla_not_required() -> Iterator[None]:
    """Megatron-Core refuses to construct a DeltaNet without fla, whose kernels our forward can do without."""
    installed = mcore_gdn.HAVE_FLA
    mcore_gdn.HAVE_FLA = True
    try:
        yield
    finally:
        mcore_gdn.HAVE_FLA = installed


class Qwen4ExpGatedDeltaNet(GatedDeltaNet):
    """Per value head with state S ``[d_k, d_v]`` (fp32), in a document:

    ``S ← e^g S;  S ← S + k ⊗ β(v − Sᵀk);  o = Sᵀq``, where ``β = σ(b)``, ``g = −e^A_log · softplus(a + dt_bias)``, and
    q, k, v come out of a causal depthwise convolution with SiLU; q and k are L2-normed, q is scaled by ``d_k^-½``.
    The result is ``RMS(o; w) ⊙ σ(z)``, projected.
    """

    def __init__(
        self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, layer_number: int, **kwargs
    ) -> None:
        with _fla_not_required():
            super().__init__(config, submodules, layer_number, **kwargs)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = _rule

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, attention_bias: ForwardContext, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """``[S, B, H]`` to ``[S, B, H]``; ``attention_bias`` carries the call's context, see there.

        The mask and the packing parameters are not looked at: the context's documents say the same.
        """
        documents = attention_bias.documents
        projected, _ = self.in_proj(hidden_states)
        qkv, z, b, a = documents.pack(projected).split(self.feat_dim_split, dim=-1)  # [T, ...]

        qkv = _short_conv_silu(qkv, self.conv1d.weight, documents)
        query, key, value = qkv.split([self.qk_dim, self.qk_dim, self.v_dim], dim=-1)
        output = self.gated_delta_rule(
            _l2_norm(query.unflatten(-1, (self.num_key_heads, self.key_head_dim))),
            _l2_norm(key.unflatten(-1, (self.num_key_heads, self.key_head_dim))),
            value.unflatten(-1, (self.num_value_heads, self.value_head_dim)),
            g=-self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float()),
            beta=b.sigmoid(),
            documents=documents,
        )  # [T, value heads, d_v]
        gate = torch.sigmoid(z.float()).view_as(output)
        output = (self.out_norm(output) * gate).to(hidden_states.dtype).flatten(-2)
        return self.out_proj(documents.unpack(output).contiguous())


def _short_conv_silu(x: Tensor, weight: Tensor, documents: Documents) -> Tensor:
    if x.is_cuda and mcore_gdn.causal_conv1d is not None:
        weight = weight.squeeze(1)
        return mcore_gdn.causal_conv1d(x[None], weight, activation="silu", cu_seqlens=documents.cu_seqlens)[0][0]
    return F.silu(short_conv(x, weight, documents.positions))


def _rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, documents: Documents) -> Tensor:
    """fla's kernel on its own devices, torch elsewhere."""
    if query.is_cuda and mcore_gdn.chunk_gated_delta_rule is not None:
        group = value.shape[1] // query.shape[1]  # value head j reads key head j // group
        query, key = (x.repeat_interleave(group, dim=1) for x in (query, key))
        packed = (x[None] for x in (query, key, value))
        cu_seqlens = documents.cu_seqlens
        return mcore_gdn.chunk_gated_delta_rule(*packed, g=g[None], beta=beta[None], cu_seqlens=cu_seqlens)[0][0]
    return gated_delta_rule(query, key, value, g, beta, documents.lengths)


def _l2_norm(x: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
