"""Attention over selected blocks of keys, chunk by chunk: time and memory grow linearly with the document."""

import torch
from torch import Tensor

# Of keys (and as much of values) a chunk, in fp32. A core works fastest in its caches, a GPU on much at a time.
_GATHERED_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}


def chunked_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, first: int, ratio: int, scale: float
) -> Tensor:
    """Attention of a document's last queries, each over its own blocks of keys and its incomplete last block.

    The keys of a chunk of queries are gathered, not masked: at 16k tokens and a budget of 2048 a query reads a quarter
    of the keys before it. Nothing but inputs, outputs and the softmax's normaliser is kept for the backward pass, which
    gathers again.

    Args:
        query: ``[n, heads, d]``, of the tokens first … first + n − 1.
        key, value: ``[first + n, groups, d]``, of the whole document.
        blocks: int32 ``[n, kept]``, complete blocks of ``ratio`` keys that each query keeps.
    """
    return _Chunked.apply(query, key, value, blocks, first, ratio, scale)


class _Chunked(torch.autograd.Function):
    """The softmax in fp32; ``dS = P ⊙ (dP − rowsum(dO ⊙ O))`` as in FlashAttention (arXiv 2205.14135, appendix B)."""

    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, first: int, ratio: int, scale: float
    ) -> Tensor:
        gather = _Gather(key, value, blocks, first, ratio)
        out = torch.empty_like(query)
        normaliser = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for chunk in gather.chunks(query):
            grouped = _by_group(query[chunk], key.shape[1])
            keys, values, hidden = gather(chunk)
            scores = _scores(grouped, keys, hidden, scale)
            top = scores.amax(-1, keepdim=True)
            scores.sub_(top).exp_()
            total = scores.sum(-1, keepdim=True)
            out[chunk] = _by_token(scores @ values / total).to(out.dtype)
            normaliser[chunk] = _by_token(top + total.log()).squeeze(-1)
        ctx.save_for_backward(query, key, value, blocks, out, normaliser)
        ctx.constants = first, ratio, scale
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, blocks, out, normaliser = ctx.saved_tensors
        first, ratio, scale = ctx.constants
        groups = key.shape[1]
        gather = _Gather(key, value, blocks, first, ratio)
        grad_query = torch.empty_like(query)
        grad_keys, grad_values = gather.zeros(), gather.zeros()
        delta = (grad_out.float() * out.float()).sum(-1, keepdim=True)
        for chunk in gather.chunks(query):
            grouped, grad = _by_group(query[chunk], groups), _by_group(grad_out[chunk], groups)
            keys, values, hidden = gather(chunk)
            weights = _scores(grouped, keys, hidden, scale)
            weights.sub_(_by_group(normaliser[chunk].unsqueeze(-1), groups)).exp_()
            gather.add(grad_values, chunk, weights.transpose(-1, -2) @ grad)
            grad_scores = (grad @ values.transpose(-1, -2)).sub_(_by_group(delta[chunk], groups)).mul_(weights)
            grad_scores.mul_(scale)
            grad_query[chunk] = _by_token(grad_scores @ keys).to(query.dtype)
            gather.add(grad_keys, chunk, grad_scores.transpose(-1, -2) @ grouped)
        return (grad_query, gather.by_token(grad_keys), gather.by_token(grad_values), None, None, None, None)


class _Gather:
    """Keys and values in blocks, and which of them a chunk of queries reads."""

    def __init__(self, key: Tensor, value: Tensor, blocks: Tensor, first: int, ratio: int):
        self.length, self.groups, self.width = key.shape
        self.ratio, self.dtype = ratio, key.dtype
        self.count = -(-self.length // ratio)
        self.keys, self.values = self._in_blocks(key), self._in_blocks(value)
        tokens = torch.arange(first, self.length, device=key.device)
        # A query's last block is the one that it is in, or (where it completes a block) the next: all of it hidden.
        last = torch.div(tokens + 1, ratio, rounding_mode="floor")
        place = last.unsqueeze(1) * ratio + torch.arange(ratio, device=key.device)
        self.hidden = place > tokens.unsqueeze(1)  # [n, ratio]
        self.index = torch.cat([blocks, last.clamp_(max=self.count - 1).to(blocks.dtype).unsqueeze(1)], dim=1)

    def chunks(self, query: Tensor) -> list[slice]:
        """Of the queries."""
        row = self.index.shape[1] * self.ratio * self.groups * self.width * 4
        step = max(1, _GATHERED_BYTES[query.device.type] // row)
        return [slice(begin, min(begin + step, len(query))) for begin in range(0, len(query), step)]

    def __call__(self, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 keys and values ``[groups, c, keys of a query, d]``; bool ``[c, ratio]``: hidden ones of the last."""
        index = self.index[chunk].flatten()
        shape = (self.groups, len(self.index[chunk]), -1, self.width)
        keys, values = (x.index_select(1, index).view(shape).float() for x in (self.keys, self.values))
        return keys, values, self.hidden[chunk]

    def zeros(self) -> Tensor:
        return torch.zeros(self.keys.shape, dtype=torch.float32, device=self.keys.device)

    def add(self, total: Tensor, chunk: slice, part: Tensor) -> None:
        """Adds to each block ``[groups, c, keys of a query, d]``."""
        total.index_add_(1, self.index[chunk].flatten(), part.reshape(self.groups, -1, self.ratio * self.width))

    def by_token(self, blocks: Tensor) -> Tensor:
        """``[length, groups, d]``"""
        return blocks.view(self.groups, -1, self.width)[:, : self.length].transpose(0, 1).to(self.dtype)

    def _in_blocks(self, x: Tensor) -> Tensor:
        """``[length, groups, d]`` to ``[groups, blocks, ratio * d]``, zeros behind the last token."""
        padded = x.new_zeros(self.groups, self.count * self.ratio, self.width)
        padded[:, : self.length] = x.transpose(0, 1)
        return padded.view(self.groups, self.count, -1)


def _scores(query: Tensor, keys: Tensor, hidden: Tensor, scale: float) -> Tensor:
    scores = (query * scale) @ keys.transpose(-1, -2)  # [groups, c, heads of a group, keys of a query]
    scores[..., -hidden.shape[1] :].masked_fill_(hidden.unsqueeze(1), float("-inf"))
    return scores


def _by_group(x: Tensor, groups: int) -> Tensor:
    """``[c, heads, d]`` to fp32 ``[groups, c, heads of a group, d]``."""
    return x.float().unflatten(1, (groups, -1)).transpose(0, 1)


def _by_token(x: Tensor) -> Tensor:
    """The inverse of :func:`_by_group`."""
    return x.transpose(0, 1).flatten(1, 2)
