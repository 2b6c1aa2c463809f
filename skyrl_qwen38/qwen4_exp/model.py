"""The language model: Megatron-Core's GPT model around n residual streams and an n-gram table."""

from collections.abc import Callable
from typing import Any, Protocol

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from skyrl_qwen38.ple import NgramHasher
from skyrl_qwen38.qwen4_exp.documents import Documents, ForwardContext, RowsHandle
from skyrl_qwen38.qwen4_exp.ple_layer import HASH_BUFFERS, PLELayer
from skyrl_qwen38.qwen4_exp.qsa.selection import SelectionTape


class RowsTable(Protocol):
    """The n-gram table, split over the expert-parallel group. ``start`` makes the same collectives on every rank."""

    def start(
        self, input_ids: Tensor, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> RowsHandle: ...


class Qwen4ExpModel(GPTModel):
    """``qwen4_exp`` on one pipeline stage.

    Args:
        ple_table: the frozen n-gram table. It is no module, parameter or buffer: no optimizer, checkpoint or weight
            sync sees it.
    """

    def __init__(self, config: TransformerConfig, *args, ple_table: RowsTable, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        self.ple_table = ple_table

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        selections: SelectionTape | None = None,
        output_processor: Callable[..., Tensor] | None = None,
        output_processor_context: Any | None = None,
        **kwargs,
    ) -> Tensor:
        """Logits ``[B, S, V]``, or losses ``[B, S]`` where ``labels`` are given.

        Args:
            input_ids: int64 ``[B, S]``: one packed row with ``packed_seq_params``, else one document a row.
            position_ids: not read; a document's positions count from its start.
            attention_mask: bool ``[B, 1, 1, S]``, True at padding, on either side of a row; None: no padding.
            packed_seq_params: ``thd`` bounds of the documents of a packed row.
            selections: records which keys sparse attention selects, or says which.

        Raises:
            ValueError: the bounds or the mask do not describe documents, or the selections are not theirs.
        """
        documents, cu_seqlens, keep = _read_documents(input_ids, attention_mask, packed_seq_params)
        # Before anything else, so that the exchange runs beside the embedding and the first layer, and outside of
        # what recompute repeats.
        rows = self.ple_table.start(input_ids, cu_seqlens, keep)
        return super().forward(
            input_ids,
            position_ids,
            attention_mask=None,  # the documents say it all
            packed_seq_params=packed_seq_params,
            extra_block_kwargs={"attention_bias": ForwardContext(documents, rows, selections)},
            output_processor=output_processor,
            output_processor_context=output_processor_context,
            **kwargs,
        )

    def _preprocess(self, *args, **kwargs) -> tuple:
        """The embedding, repeated for every stream: ``[S, B, H]`` to ``[S, B, n*H]``."""
        embedded, *rest = super()._preprocess(*args, **kwargs)
        return embedded.repeat(1, 1, self.config.hc_count), *rest

    def check_hash_buffers(self, hasher: NgramHasher) -> None:
        """Compares the loaded hash constants with what the configuration gives.

        Raises:
            ValueError: they differ.
        """
        for module in self.modules():
            if isinstance(module, PLELayer):
                hasher.check_buffers(*(getattr(module, name) for name in HASH_BUFFERS))


def _read_documents(
    input_ids: Tensor, attention_mask: Tensor | None, packed_seq_params: PackedSeqParams | None
) -> tuple[Documents, Tensor | None, Tensor | None]:
    """The documents of a micro-batch, with the table's view of them: cu_seqlens, or the mask of real tokens."""
    batch, sequence = input_ids.shape
    if packed_seq_params is not None:
        if batch != 1 or packed_seq_params.qkv_format != "thd":
            raise ValueError(
                f"A packed micro-batch must be one row in thd format, got {batch} rows in "
                f"{packed_seq_params.qkv_format}."
            )
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        if cu_seqlens is None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
        return Documents.from_cu_seqlens(cu_seqlens, sequence), cu_seqlens, None
    if attention_mask is None:
        return Documents.from_rows(batch, sequence, input_ids.device), None, None
    if attention_mask.shape != (batch, 1, 1, sequence):
        raise ValueError(
            f"The attention mask has shape {list(attention_mask.shape)}, but [B, 1, 1, S] = "
            f"{[batch, 1, 1, sequence]} with True at padding is expected: causality is the model's own."
        )
    keep = ~attention_mask[:, 0, 0]
    return Documents.from_padded_rows(keep), None, keep
