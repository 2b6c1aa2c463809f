"""One decoder layer of ``qwen4_exp``."""

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from skyrl_qwen38.qwen4_exp.documents import ForwardContext
from skyrl_qwen38.qwen4_exp.hyper_connection import HyperConnection
from skyrl_qwen38.qwen4_exp.ple_layer import PLELayer


class Qwen4ExpLayer(TransformerLayer):
    """n-gram rows (in the layers that have them), then DeltaNet or QSA, then the MoE, each between a mix of the
    streams and a write-back to them.

    A :class:`TransformerLayer`, because full recompute hands the call's context to no other kind of layer.
    """

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, layer_number: int = 1, **kwargs
    ) -> None:
        super().__init__(config, submodules, layer_number, **kwargs)
        self.attn_hyper_connection = HyperConnection(config, config.hidden_size, config.layernorm_epsilon)
        self.mlp_hyper_connection = HyperConnection(config, config.hidden_size, config.layernorm_epsilon)
        # ``ple_layer_ids`` counts from 1, as ``layer_number`` does.
        self.ple = PLELayer(config) if self.layer_number in config.ple_layer_ids else None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        attention_bias: ForwardContext,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Streams ``[S, B, n*H]`` to streams; ``padding_mask`` bool ``[B, S]``, True at padding, is the router's."""
        streams = hidden_states
        if self.ple is not None:
            streams = streams + self.ple(streams, attention_bias)

        mixed, injection = self.attn_hyper_connection(streams)
        output, _ = self.self_attention(
            mixed,
            attention_mask,
            attention_bias=attention_bias,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        streams = self.attn_hyper_connection.write_back(streams, injection, output)

        mixed, injection = self.mlp_hyper_connection(streams)
        output, _ = self.mlp(mixed, padding_mask=padding_mask)
        streams = self.mlp_hyper_connection.write_back(streams, injection, output)
        return streams, context
