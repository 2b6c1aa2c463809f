"""The gated delta rule over packed documents, chunk by chunk, in plain PyTorch."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST_CHUNK = 64


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """Per value head, with a state S ``[d_k, d_v]`` that is zero at the start of each document:

    ``S ← e^g S;  S ← S + k ⊗ β(v − Sᵀk);  o = d_k^-½ Sᵀq``.

    In a chunk that starts with the state S₀, with G the running sum of g, the updates are ``U = T(V − e^G ⊙ K S₀)``,
    where ``T = (I + tril(β e^{G_i − G_j} KKᵀ, −1))⁻¹ diag(β)``, and the rest is products of matrices (Yang et al.,
    "Gated Delta Networks", arXiv 2412.06464, section 3.3). Only S₀ is found chunk after chunk, for all documents at
    once. A document is padded to whole chunks, never to the longest one.

    Args:
        query, key: ``[T, key heads, d_k]``, L2-normed. Value head j reads key head ``j // (value heads / key heads)``.
        value: ``[T, value heads, d_v]``.
        g: fp32 ``[T, value heads]``, logarithm of the decay, at most 0.
        beta: ``[T, value heads]``.
        lengths: tokens of each document; they sum to T.

    Returns:
        ``[T, value heads, d_v]`` in the dtype of value; computed in fp32.
    """
    if not len(query):
        return value
    layout = _Layout.of(lengths, min(_LARGEST_CHUNK, _power_of_two(max(lengths))), query.device)
    q, k, v, decay, beta = (layout.chunked(x) for x in (query, key, value, g, beta))
    q = q * q.shape[-1] ** -0.5
    group = v.shape[1] // k.shape[1]

    # In fp64: differences of large sums are to be exact to fp32.
    total = decay.squeeze(-1).double().cumsum(-1)  # G, [chunks, heads, C]
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill(layout.later, float("-inf")).exp()
    by_key_head = between.unflatten(1, (-1, group))
    coupling = ((k @ k.mT).unsqueeze(2) * by_key_head).flatten(1, 2) * beta
    solved = torch.linalg.solve_triangular(
        coupling, torch.diag_embed(beta.squeeze(-1)), upper=False, unitriangular=True
    )  # T, [chunks, heads, C, C]
    reads = ((q @ k.mT).unsqueeze(2) * by_key_head).flatten(1, 2)

    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    since_start, until_end = (x.float().exp().unsqueeze(-1) for x in (total, total[..., -1:] - total))
    whole = since_start[..., -1:, :]
    state = v.new_zeros(layout.active[0], v.shape[1], k.shape[-1], v.shape[-1])
    states, updates = [], []
    for part in layout.steps:
        state = state[: part.stop - part.start]
        states.append(state)
        updates.append(solved[part] @ (v[part] - since_start[part] * (k[part] @ state)))
        state = whole[part] * state + k[part].mT @ (until_end[part] * updates[-1])
    output = since_start * (q @ torch.cat(states)) + reads @ torch.cat(updates)
    return layout.packed(output).to(value.dtype)


@dataclass(frozen=True)
class _Layout:
    """Where tokens lie in chunks: the first chunks of all documents, then all second ones, and so on, and in each of
    these steps the documents with most chunks first. So a step is a slice, of the documents that are still going on.

    Attributes:
        size: C, tokens of a chunk.
        active: documents of each step.
        tokens: int64 ``[chunks * C]``, the token in each place; behind a document's end its last one, which nobody
            reads and which comes too late to be felt.
        places: int64 ``[T]``, the place of each token.
        later: bool ``[C, C]``, True where the second token comes after the first.
    """

    size: int
    active: list[int]
    tokens: Tensor
    places: Tensor
    later: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], size: int, device: torch.device) -> "_Layout":
        starts = list(itertools.accumulate(lengths, initial=0))
        chunks = [-(-length // size) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda number: -chunks[number])
        active = [sum(count > step for count in chunks) for step in range(max(chunks))]
        tokens, places = [], torch.empty(starts[-1], dtype=torch.int64)
        for step, count in enumerate(active):
            for number in order[:count]:
                begin, end = starts[number] + step * size, starts[number + 1]
                span = torch.arange(begin, begin + size)
                places[begin : min(begin + size, end)] = torch.arange(min(size, end - begin)) + len(tokens) * size
                tokens.append(span.clamp_(max=end - 1))
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        on_device = (x.to(device, non_blocking=True) for x in (torch.cat(tokens), places, later))
        return cls(size, active, *on_device)

    @property
    def steps(self) -> list[slice]:
        """The chunks of each step."""
        return [slice(begin, end) for begin, end in itertools.pairwise(itertools.accumulate(self.active, initial=0))]

    def chunked(self, x: Tensor) -> Tensor:
        """``[T, heads]`` or ``[T, heads, d]`` to fp32 ``[chunks, heads, C, d]``, d being 1 where there is none."""
        x = x.float().view(*x.shape[:2], -1).index_select(0, self.tokens)
        return x.unflatten(0, (-1, self.size)).transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """``[chunks, heads, C, d]`` to ``[T, heads, d]``."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
