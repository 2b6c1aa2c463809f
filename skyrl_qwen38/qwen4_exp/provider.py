"""The configuration of ``qwen4_exp`` for Megatron-Core, and how a model is built from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from skyrl_qwen38.ple import HeadShardedTable, NgramHasher
from skyrl_qwen38.qwen4_exp.layer_specs import qwen4_exp_block_spec
from skyrl_qwen38.qwen4_exp.model import Qwen4ExpModel, RowsTable
from skyrl_qwen38.qwen4_exp.qsa.attention import SelectedAttention


def build_ple_table(source: str, hasher: NgramHasher, group: dist.ProcessGroup) -> RowsTable:
    """The n-gram table of the checkpoint ``source``, over the expert-parallel group.

    The patch ``ple_row_shard`` replaces this name of the module.
    """
    return HeadShardedTable.load(source, hasher, group=group)


@dataclass
class Qwen4ExpProvider(GPTModelProvider):
    """Defaults are the architecture's own; sizes come from a checkpoint through the bridge.

    ``linear_attention_freq`` is the list of layer kinds: 1 DeltaNet, 0 QSA.
    """

    transformer_layer_spec: Callable[..., TransformerBlockSubmodules] = qwen4_exp_block_spec

    normalization: str = "RMSNorm"
    gated_linear_unit: bool = True
    add_bias_linear: bool = False
    qk_layernorm: bool = True
    attention_output_gate: bool = True
    hidden_dropout: float = 0.0
    position_embedding_type: str = "rope"
    share_embeddings_and_output_weights: bool = False
    moe_shared_expert_gate: bool = True
    moe_router_pre_softmax: bool = False
    moe_router_dtype: str = "fp32"
    moe_router_load_balancing_type: str = "none"
    moe_aux_loss_coeff: float = 0.0
    moe_token_dispatcher_type: str = "alltoall"
    moe_grouped_gemm: bool = True
    hetereogenous_dist_checkpoint: bool = True  # (sic) one layer alone owns the PLE parameters

    hc_count: int = 4
    hc_lowrank: int = 320

    ple_checkpoint: str = ""
    """Folder or hub id of the checkpoint that holds the table's shards."""
    ple_layer_ids: tuple[int, ...] = (2,)
    """Counted from 1."""
    ple_embed_dim: int = 2560
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    ngram_vocab_divisor: int = 128
    ngram_seed: int = 1234
    ngram_eos_token_id: int = 248044

    indexer_n_heads: int = 4
    indexer_head_dim: int = 128
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4

    qsa_attention: SelectedAttention = "chunked"
    """The kernel for documents beyond the dense range: ``chunked``, or ``flex`` (on CPU without a backward pass)."""

    def finalize(self) -> None:
        """Settles what the machine lacks: without Transformer Engine neither grouped GEMM nor the fused kernels."""
        if not HAVE_TE:
            self.moe_grouped_gemm = False
            self.moe_permute_fusion = False
            self.masked_softmax_fusion = False
            self.cross_entropy_loss_fusion = False
        super().finalize()

    def hasher(self) -> NgramHasher:
        return NgramHasher(
            vocab_size=self.vocab_size,
            eos_token_id=self.ngram_eos_token_id,
            ngram_size=self.ngram_size,
            heads_per_ngram=self.heads_per_ngram,
            ngram_vocab_size_base=self.ngram_vocab_size_base,
            divisible_by=self.ngram_vocab_divisor,
            seed=self.ngram_seed,
        )

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> Qwen4ExpModel:
        """The model on this rank, with its part of the n-gram table loaded from ``ple_checkpoint``.

        Collective over the expert-parallel group.

        Raises:
            ValueError: a parallel layout, or a part of the model, that is not implemented is asked for.
        """
        self._refuse_unsupported()
        groups = self._pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        table = build_ple_table(self.ple_checkpoint, self.hasher(), groups.ep)
        return Qwen4ExpModel(
            self,
            transformer_layer_spec=self.transformer_layer_spec(self),
            vocab_size=self.vocab_size,
            max_sequence_length=self.seq_length,
            fp16_lm_cross_entropy=self.fp16_lm_cross_entropy,
            parallel_output=self.parallel_output,
            position_embedding_type=self.position_embedding_type,
            rotary_percent=self.rotary_percent,
            rotary_base=self.rotary_base,
            pg_collection=groups,
            ple_table=table,
        )

    def _refuse_unsupported(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            if (size := getattr(self, name)) > 1:
                raise ValueError(f"{name}={size} is not supported for qwen4_exp: set it to 1 and split by experts.")
        if self.mtp_num_layers:
            raise ValueError(
                f"mtp_num_layers={self.mtp_num_layers} is not supported for qwen4_exp: its MTP head stays frozen in "
                "the checkpoint, set mtp_num_layers to none."
            )
        if self.should_pad_vocab:
            raise ValueError(
                "should_pad_vocab is not supported for qwen4_exp, whose n-gram hash counts the vocabulary."
            )
        if len(self.ple_layer_ids) != 1:
            raise ValueError(
                f"ple_layer_ids {list(self.ple_layer_ids)} names {len(self.ple_layer_ids)} layers, but exactly one "
                "n-gram layer is supported."
            )
        if len(self.linear_attention_freq) != self.num_layers:
            raise ValueError(
                f"linear_attention_freq lists {len(self.linear_attention_freq)} layer kinds for "
                f"num_layers={self.num_layers}: give one for each layer."
            )
        if self.qsa_attention not in get_args(SelectedAttention):
            raise ValueError(
                f"qsa_attention={self.qsa_attention!r} is not known: choose {', '.join(get_args(SelectedAttention))}."
            )
        if not self.ple_checkpoint:
            raise ValueError("ple_checkpoint is empty: name the folder or hub id that holds the n-gram table.")
