"""Attention over selected blocks of keys as one FlexAttention kernel: nothing is gathered, masks are computed in place.

PyTorch has its backward pass on GPUs only.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from skyrl_qwen38.qwen4_exp.documents import Documents
from skyrl_qwen38.qwen4_exp.qsa.selection import Selection

_TILE = 128  # queries and keys of a tile, FlexAttention's default
_BITS = 32
_SMALLEST_BUFFER = 16384  # tokens


def flex_document_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, selection: Selection, scale: float
) -> Tensor:
    """Query ``[T, heads, d]``, key and value ``[T, groups, d]``, packed, to ``[T, heads, d]``.

    Raises:
        ValueError: a gradient is wanted of a CPU.
    """
    if query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("qsa_attention=flex has no backward pass on CPU: train there with chunked.")
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    output = _compiled()(query, key, value, block_mask=block_mask(documents, selection), scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


@functools.cache
def _compiled():
    # One graph for the first length, one for all others: see `block_mask`.
    return torch.compile(flex_attention)


def block_mask(documents: Documents, selection: Selection) -> BlockMask:
    """Which tiles hold a key that a query attends to, and inside of them which keys.

    Made from the selection itself, never from a ``[T, T]`` mask.
    """
    count, device = len(documents.positions), documents.positions.device
    numbers = torch.arange(len(documents.lengths), device=device)
    number = numbers.repeat_interleave(documents.cu_seqlens.diff(), output_size=count)
    start = documents.cu_seqlens[number]
    touched = _touched_tiles(documents, selection, start)
    reach, first, ratio = touched.sum(-1, dtype=torch.int32), selection.first, selection.ratio

    # Everything that changes from call to call lies in buffers of a length that seldom does: the compiled kernel
    # depends on the shapes of what a mask reads.
    buffer = _buffer_length(count)
    document = torch.full((buffer,), -1, dtype=torch.int32, device=device)
    document[:count] = number
    position = torch.zeros(buffer, dtype=torch.int32, device=device)
    position[:count] = documents.positions
    chosen = _bits(documents, selection, buffer)
    for read in (document, position, chosen):
        torch._dynamo.mark_static(read)  # a longer buffer is another graph; PyTorch cannot compile for any length

    def mask_mod(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at, block = position[q], position[k] // ratio
        selected = (chosen[q, block // _BITS] >> (block % _BITS)) & 1
        incomplete = block == (at + 1) // ratio
        seen = (document[q] == document[k]) & (position[k] <= at)
        return seen & ((at < first) | incomplete | (selected == 1))

    return BlockMask.from_kv_blocks(
        reach[None, None],
        touched.to(torch.int8).argsort(dim=-1, descending=True, stable=True).int()[None, None],
        BLOCK_SIZE=_TILE,
        mask_mod=mask_mod,
        seq_lengths=(count, count),
    )


def _buffer_length(count: int) -> int:
    return max(_SMALLEST_BUFFER, 1 << (count - 1).bit_length())


def _bits(documents: Documents, selection: Selection, buffer: int) -> Tensor:
    """int32 ``[buffer, blocks / 32]``: bit b of a query's row says that it keeps block b of its document.

    The one thing here that grows with the square of the length: 8 MiB at 16k tokens with blocks of 4, 128 MiB at 64k.
    """
    words = math.ceil(buffer / selection.ratio / _BITS)
    bits = torch.zeros(buffer, words, dtype=torch.int32, device=documents.positions.device)
    for (start, _), blocks in zip(documents.bounds, selection.blocks, strict=True):
        # A block occurs once in a row, so the sum of its bits is their union (and int32 wraps into the sign bit).
        begin = start + selection.first
        bits[begin : begin + len(blocks)].scatter_add_(
            1, (blocks // _BITS).long(), torch.ones_like(blocks) << (blocks % _BITS)
        )
    return bits


def _touched_tiles(documents: Documents, selection: Selection, start: Tensor) -> Tensor:
    """bool ``[query tiles, key tiles]``; ``start`` is the packed index of each token's document's first token."""
    count, device = len(start), start.device
    tiles = math.ceil(count / _TILE)
    token = torch.arange(count, device=device)
    incomplete = start + (documents.positions + 1) // selection.ratio * selection.ratio
    # Of the dense range all keys from the document's start; of others the incomplete block.
    low = torch.where(documents.positions < selection.first, start, incomplete.minimum(token))
    edges = torch.zeros(tiles, tiles + 1, dtype=torch.int32, device=device)
    ones = torch.ones(count, dtype=torch.int32, device=device)
    edges.index_put_((token // _TILE, low // _TILE), ones, accumulate=True)
    edges.index_put_((token // _TILE, token // _TILE + 1), -ones, accumulate=True)
    touched = edges.cumsum(1)[:, :tiles] > 0
    for (begin, _), blocks in zip(documents.bounds, selection.blocks, strict=True):
        row = (torch.arange(len(blocks), device=device) + begin + selection.first).div(_TILE, rounding_mode="floor")
        for edge in (0, selection.ratio - 1):  # a block may lie across two tiles
            column = (blocks * selection.ratio + begin + edge).div(_TILE, rounding_mode="floor")
            touched.index_put_((row.unsqueeze(1), column), torch.ones((), dtype=torch.bool, device=device))
    return touched
