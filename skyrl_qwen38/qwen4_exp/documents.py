"""Where the documents of a micro-batch lie, and what else of one forward call reaches the layers.

Documents are walls: attention, the convolutions and the DeltaNet state never cross one. Whatever looks at more than one
token therefore works on the packed view ``[T, ...]`` of the micro-batch: the tokens of all documents, one after the
other and without padding. Both input forms (a packed row, padded rows) are the same in it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from skyrl_qwen38.qwen4_exp.qsa.selection import SelectionTape


class RowsHandle(Protocol):
    """A started lookup of n-gram rows. ``wait`` may be called again: a recomputed layer does."""

    def wait(self) -> Tensor: ...


@dataclass(frozen=True)
class Documents:
    """The documents of one micro-batch ``[B, S]`` with T tokens in them.

    Attributes:
        lengths: tokens of each document, known to the host.
        batch, sequence: shape of the micro-batch that the documents lie in.
        tokens: int64 ``[T]``, batch-major flat index of every document token; None when the documents cover the whole
            micro-batch in order.
        cu_seqlens: int64 ``[documents + 1]``, first token of each document in the packed view, and T.
        positions: int64 ``[T]``, of each token in its document.
    """

    lengths: tuple[int, ...]
    batch: int
    sequence: int
    tokens: Tensor | None
    cu_seqlens: Tensor
    positions: Tensor

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, sequence: int) -> Documents:
        """Documents of a packed row ``[1, S]``; ``cu_seqlens`` is int ``[documents + 1]``, from 0 to S.

        Raises:
            ValueError: the bounds do not cover the row.
        """
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != sequence:
            raise ValueError(
                f"cu_seqlens runs from {bounds[0]} to {bounds[-1]} but the packed row has {sequence} tokens: "
                "give bounds that start at 0 and end at the row's length."
            )
        lengths = tuple(stop - start for start, stop in itertools.pairwise(bounds))
        return cls._made(lengths, 1, sequence, None, cu_seqlens.long())

    @classmethod
    def from_rows(cls, batch: int, sequence: int, device: torch.device) -> Documents:
        """One document a row, without padding."""
        cu_seqlens = torch.arange(batch + 1, device=device) * sequence
        return cls._made((sequence,) * batch, batch, sequence, None, cu_seqlens)

    @classmethod
    def from_padded_rows(cls, keep: Tensor) -> Documents:
        """One document a row; ``keep`` is bool ``[B, S]``, True at real tokens, which are contiguous.

        Raises:
            ValueError: a row has padding between its tokens.
        """
        batch, sequence = keep.shape
        starts = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0]
        lengths, runs = torch.stack([keep.sum(1), starts]).tolist()
        for row, (length, found) in enumerate(zip(lengths, runs, strict=True)):
            if found > 1:
                raise ValueError(
                    f"Row {row} of the attention mask has padding between its {length} tokens: pad on one side only."
                )
        if sum(lengths) == batch * sequence:
            return cls.from_rows(batch, sequence, keep.device)
        tokens = torch.nonzero_static(keep.flatten(), size=sum(lengths)).flatten()
        cu_seqlens = F.pad(keep.sum(1).cumsum(0), (1, 0))
        return cls._made(tuple(lengths), batch, sequence, tokens, cu_seqlens)

    @classmethod
    def _made(cls, lengths: tuple[int, ...], batch: int, sequence: int, tokens: Tensor | None, cu: Tensor) -> Documents:
        count = sum(lengths)
        starts = cu[:-1].repeat_interleave(cu.diff(), output_size=count)
        return cls(lengths, batch, sequence, tokens, cu, torch.arange(count, device=cu.device) - starts)

    @property
    def longest(self) -> int:
        return max(0, *self.lengths)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First token of each document in the packed view, and the token after its last."""
        return list(itertools.pairwise(itertools.accumulate(self.lengths, initial=0)))

    def pack(self, x: Tensor) -> Tensor:
        """``[S, B, ...]`` to ``[T, ...]``."""
        if self.batch == 1 and self.tokens is None:
            return x.squeeze(1)
        x = x.transpose(0, 1).flatten(0, 1)  # [B * S, ...]
        return x if self.tokens is None else x.index_select(0, self.tokens)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`: ``[T, ...]`` to ``[S, B, ...]``, zeros outside documents."""
        if self.tokens is not None:
            x = x.new_zeros(self.batch * self.sequence, *x.shape[1:]).index_copy(0, self.tokens, x)
        return x.unflatten(0, (self.batch, self.sequence)).transpose(0, 1)


@dataclass(frozen=True)
class ForwardContext:
    """What one call of the model hands to its layers besides tensors.

    It travels with the call, in the block's ``attention_bias`` argument, which every recompute mode closes over. A
    module attribute would be overwritten by the next micro-batch in flight before the first one is recomputed.
    """

    documents: Documents
    ngram_rows: RowsHandle
    selections: SelectionTape | None = None
