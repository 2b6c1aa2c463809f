"""Which module stands where in the block, as Megatron-Core's specs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from skyrl_qwen38.qwen4_exp.gated_delta_net import Qwen4ExpGatedDeltaNet
from skyrl_qwen38.qwen4_exp.hyper_connection import StreamMixer
from skyrl_qwen38.qwen4_exp.layer import Qwen4ExpLayer
from skyrl_qwen38.qwen4_exp.norms import RMSNorm, ZeroCenteredRMSNorm
from skyrl_qwen38.qwen4_exp.qsa.attention import DocumentAttention, QwenSparseAttention

if TYPE_CHECKING:
    from skyrl_qwen38.qwen4_exp.provider import Qwen4ExpProvider


def qwen4_exp_block_spec(provider: Qwen4ExpProvider, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The decoder: one layer spec per entry of ``linear_attention_freq`` (1 DeltaNet, 0 QSA), and the final mixer.

    Linear layers and experts are Transformer Engine's where it is installed, Megatron-Core's own elsewhere. None has a
    fused norm: this model has no norm before a block.
    """
    backend = _backend()
    layer = TransformerLayerSubmodules(
        mlp=get_moe_module_spec_for_backend(
            backend, num_experts=provider.num_moe_experts, moe_grouped_gemm=provider.moe_grouped_gemm
        )
    )
    kinds = {1: _delta_net_spec(backend), 0: _attention_spec(backend)}
    return TransformerBlockSubmodules(
        layer_specs=[
            ModuleSpec(module=Qwen4ExpLayer, submodules=replace(layer, self_attention=kinds[kind]))
            for kind in provider.linear_attention_freq
        ],
        layer_norm=StreamMixer,
    )


def _backend() -> BackendSpecProvider:
    if HAVE_TE:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    return LocalSpecProvider()


def _delta_net_spec(backend: BackendSpecProvider) -> ModuleSpec:
    return ModuleSpec(
        module=Qwen4ExpGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_linear(), out_norm=RMSNorm, out_proj=backend.row_parallel_linear()
        ),
    )


def _attention_spec(backend: BackendSpecProvider) -> ModuleSpec:
    return ModuleSpec(
        module=QwenSparseAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=DocumentAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=ZeroCenteredRMSNorm,
            k_layernorm=ZeroCenteredRMSNorm,
        ),
    )
