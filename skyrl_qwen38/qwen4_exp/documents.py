"""Where the documents of a micro-batch lie, and what else of one forward call reaches the layers.

Documents are walls: attention, the convolutions and the DeltaNet state never cross one. Every operation that looks at
more than one token therefore works on the right-padded view ``[documents, longest, ...]`` of the micro-batch, where
causality alone keeps padding out of the real tokens, and both input forms (a packed row, padded rows) are the same.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RowsHandle(Protocol):
    """A started lookup of n-gram rows. ``wait`` may be called again: a recomputed layer does."""

    def wait(self) -> Tensor: ...


@dataclass(frozen=True)
class Documents:
    """The documents of one micro-batch ``[B, S]``.

    Attributes:
        lengths: tokens of each document.
        batch, sequence: shape of the micro-batch that the documents lie in.
        tokens: int64, batch-major flat index of every document token; None when the documents cover the whole
            micro-batch in order.
        slots: int64, flat index of the same tokens in ``[documents, longest]``; None when that view is the
            micro-batch itself.
    """

    lengths: tuple[int, ...]
    batch: int
    sequence: int
    tokens: Tensor | None
    slots: Tensor | None

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
        return cls(lengths, 1, sequence, None, _slots(lengths, cu_seqlens.device))

    @classmethod
    def from_padded_rows(cls, keep: Tensor) -> Documents:
        """One document a row; ``keep`` is bool ``[B, S]``, True at real tokens, which are contiguous.

        Raises:
            ValueError: a row has padding between its tokens.
        """
        batch, sequence = keep.shape
        lengths = keep.sum(1).tolist()
        gaps = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0]
        for row, (length, starts) in enumerate(zip(lengths, gaps.tolist(), strict=True)):
            if starts > 1:
                raise ValueError(
                    f"Row {row} of the attention mask has padding between its {length} tokens: pad on one side only."
                )
        if sum(lengths) == batch * sequence:
            return cls(tuple(lengths), batch, sequence, None, None)
        tokens = keep.flatten().nonzero().flatten()
        return cls(tuple(lengths), batch, sequence, tokens, _slots(tuple(lengths), keep.device))

    @property
    def longest(self) -> int:
        return max(1, *self.lengths)

    def pad(self, x: Tensor) -> Tensor:
        """``[S, B, ...]`` to the right-padded view ``[documents, longest, ...]``, zeros at padding."""
        x = x.transpose(0, 1).flatten(0, 1)  # [B * S, ...]
        if self.tokens is not None:
            x = x[self.tokens]
        if self.slots is not None:
            padded = x.new_zeros(len(self.lengths) * self.longest, *x.shape[1:])
            x = padded.index_copy(0, self.slots, x)
        return x.unflatten(0, (len(self.lengths), self.longest))

    def unpad(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pad`: ``[documents, longest, ...]`` to ``[S, B, ...]``, zeros outside documents."""
        x = x.flatten(0, 1)
        if self.slots is not None:
            x = x[self.slots]
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


def _slots(lengths: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Flat indices into ``[documents, longest]`` of every token, or None for documents of one length."""
    longest = max(1, *lengths)
    if all(length == longest for length in lengths):
        return None
    slots = [torch.arange(length) + index * longest for index, length in enumerate(lengths)]
    return torch.cat(slots).to(device)
