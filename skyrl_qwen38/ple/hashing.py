"""Token ids to row ids of the n-gram table: a pure function of the model's configuration.

Token t of a document x_0 … x_t has the context c_0 = x_t and, for s = 1 … ngram_size-1, c_s = x_{t-s}; where the
document has not yet begun, or an end-of-sequence token stands at x_{t-1} … x_{t-s}, c_s is that token instead. Order g
(2 … ngram_size) hashes to h_g = xor over s < g of c_s * multiplier_s, and head k of that order asks for row
h_g mod head_size_k + head_offset_k. All of it is int64: the multipliers are chosen so that ids below the vocabulary
size never overflow it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

_UINT64 = (1 << 64) - 1
_INT64_MAX = (1 << 63) - 1
_GAMMA = 0x9E3779B97F4A7C15
_SEED_STEP = 10007  # one more PLE layer moves the seed by this prime

# constructor argument → name in the `text_config` of a checkpoint
_CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "eos_token_id": "eos_token_id",
    "ngram_size": "ngram_size",
    "heads_per_ngram": "heads_per_ngram",
    "ngram_vocab_size_base": "ngram_vocab_size_base",
    "divisible_by": "make_ngram_vocab_size_divisible_by",
    "seed": "seed",
}


@dataclass(frozen=True, kw_only=True)
class NgramHasher:
    """The n-gram hash of one PLE layer.

    Args:
        vocab_size: the tokenizer's vocabulary as the checkpoint's configuration has it. Never the size padded for
            tensor parallelism: the multipliers are derived from it.
        eos_token_id: the document separator; also what stands before the first token of a document.
        ngram_size: the longest n-gram (3: bigrams and trigrams).
        heads_per_ngram: heads of each order. The table has K = (ngram_size - 1) * heads_per_ngram heads.
        ngram_vocab_size_base: the head sizes are consecutive primes, the smallest of them not below this.
        divisible_by: the table's rows are padded to a multiple of this.
        seed: seed of the multipliers.
        ple_index: 0 for the first PLE layer of the model, 1 for the second, …: not the layer's number.

    Raises:
        ValueError: an argument is outside its range.
    """

    vocab_size: int
    eos_token_id: int
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    divisible_by: int = 128
    seed: int = 1234
    ple_index: int = 0

    def __post_init__(self) -> None:
        smallest = {
            "vocab_size": 1,
            "ngram_size": 2,
            "heads_per_ngram": 1,
            "ngram_vocab_size_base": 1,
            "divisible_by": 1,
            "ple_index": 0,
        }
        for name, bound in smallest.items():
            if getattr(self, name) < bound:
                raise ValueError(f"the n-gram hash needs {name} >= {bound}, got {getattr(self, name)}")
        if not 0 <= self.eos_token_id < self.vocab_size:
            raise ValueError(
                f"the n-gram hash needs an eos_token_id below its vocab_size {self.vocab_size}, got {self.eos_token_id}"
            )

    @classmethod
    def from_config(cls, text_config: Any, ple_index: int = 0) -> "NgramHasher":
        """The hasher of a checkpoint's `text_config`, an object with attributes or a mapping.

        A list of end-of-sequence ids counts by its first; keys that are absent or null have the released defaults.

        Raises:
            ValueError: `vocab_size` or `eos_token_id` is absent.
        """
        read = text_config.get if isinstance(text_config, Mapping) else lambda key: getattr(text_config, key, None)
        arguments = {argument: read(key) for argument, key in _CONFIG_KEYS.items() if read(key) is not None}
        for required in ("vocab_size", "eos_token_id"):
            if required not in arguments:
                raise ValueError(
                    f"the text_config has no {required}, which the n-gram hash needs: set it in config.json"
                )
        if isinstance(arguments["eos_token_id"], list | tuple):
            arguments["eos_token_id"] = arguments["eos_token_id"][0]
        return cls(**arguments, ple_index=ple_index)

    @property
    def num_heads(self) -> int:
        """K, the rows that one token asks for."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @cached_property
    def multipliers(self) -> Tensor:
        """int64 [ngram_size]: odd numbers 2 * (mix64(seed' + γ·(i+1)) mod half) + 1, half = ⌊⌊(2^63-1)/V⌋/2⌋."""
        half = max(1, _INT64_MAX // self.vocab_size // 2)
        base = self.seed + _SEED_STEP * self.ple_index
        return torch.tensor(
            [2 * (_mix64(base + _GAMMA * (i + 1)) % half) + 1 for i in range(self.ngram_size)], dtype=torch.int64
        )

    @cached_property
    def head_sizes(self) -> Tensor:
        """int64 [K]: consecutive primes from `ngram_vocab_size_base` on; PLE layer p takes the p-th K of them."""
        primes = _primes_from(self.ngram_vocab_size_base)
        for _ in range(self.ple_index * self.num_heads):
            next(primes)
        return torch.tensor([next(primes) for _ in range(self.num_heads)], dtype=torch.int64)

    @cached_property
    def head_offsets(self) -> Tensor:
        """int64 [K]: the first row of each head, the exclusive prefix sum of `head_sizes`."""
        return self.head_sizes.cumsum(0) - self.head_sizes

    @cached_property
    def smallest_head(self) -> int:
        """Rows of the head that has fewest."""
        return int(self.head_sizes.min())

    @cached_property
    def num_rows(self) -> int:
        """Rows of the table, N: all heads, padded to a multiple of `divisible_by`. No id reaches the padding."""
        return math.ceil(int(self.head_sizes.sum()) / self.divisible_by) * self.divisible_by

    def row_ids(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        dtype: torch.dtype = torch.int64,
    ) -> Tensor:
        """The rows that each token asks for; no document sees another.

        Args:
            input_ids: integers [T] or [B, S]. Without `cu_seqlens`, [T] is one document and [B, S] has B.
            cu_seqlens: integers [documents + 1], rising from 0 to T: cuts a packed row ([T] or [1, T]) into documents.
            attention_mask: like `input_ids`; where it is 0, the token counts as end-of-sequence, so that left
                padding changes nothing.
            context: integers [documents, ngram_size - 1] (for [T] also without the first axis): the tokens before
                each document's first, the latest last, when the document goes on from an earlier call.
            dtype: of the row ids; int32 halves them. The arithmetic is int64 in any case.

        Returns:
            [*input_ids.shape, K] in `dtype`, heads of the shortest order first.

        Raises:
            ValueError: a shape does not fit, `cu_seqlens` does not rise from 0 to T, an id is not in
                [0, vocab_size), or the table has more rows than `dtype` can number.
        """
        if dtype not in (torch.int32, torch.int64) or self.num_rows > torch.iinfo(dtype).max:
            raise ValueError(f"row ids of a table of {self.num_rows} rows do not fit {dtype}: ask for torch.int64")
        keys = self.keys(input_ids, cu_seqlens, attention_mask, context)
        rows = [self.rows_of_keys(keys[..., order], order) for order in range(self.ngram_size - 1)]
        return torch.cat(rows, dim=-1).to(dtype)

    def keys(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """The n-gram key of each token and order, int64 [*input_ids.shape, ngram_size - 1], bigrams first.

        Arguments and errors are those of `row_ids`. All heads of an order share its key, so equal keys ask for equal
        rows.
        """
        tokens, starts, context, invalid = self._read(input_ids, cu_seqlens, attention_mask, context)
        if bool(invalid):
            self._raise_invalid(input_ids, cu_seqlens, attention_mask, context)
        return self._keys(tokens, starts, context).view(*input_ids.shape, self.ngram_size - 1)

    def rows_of_keys(self, keys: Tensor, order: int) -> Tensor:
        """Row ids int64 [*keys.shape, heads_per_ngram] of n-gram keys (int64) of one order: 0 bigrams, 1 trigrams …"""
        heads = slice(order * self.heads_per_ngram, (order + 1) * self.heads_per_ngram)
        sizes, offsets = (_on(keys.device, constant)[heads] for constant in (self.head_sizes, self.head_offsets))
        return keys.unsqueeze(-1) % sizes + offsets

    def keys_unchecked(
        self, input_ids: Tensor, cu_seqlens: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`keys`, and a bool scalar on the same device that tells whether the values are refused: reads neither.

        For a GPU, where looking at a value makes the host wait. The keys are meaningless where the scalar is True.

        Raises:
            ValueError: a shape or a dtype does not fit.
        """
        tokens, starts, context, invalid = self._read(input_ids, cu_seqlens, attention_mask, None)
        return self._keys(tokens, starts, context).view(*input_ids.shape, self.ngram_size - 1), invalid

    def _read(
        self, input_ids: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Flat tokens [T], document starts, the context [documents, ngram_size - 1], and whether a value is refused."""
        tokens = _integers(input_ids, "input_ids")
        if input_ids.dim() not in (1, 2):
            raise ValueError(f"input_ids must have the shape [T] or [B, S], got {list(input_ids.shape)}")
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                raise ValueError(
                    f"attention_mask has the shape {list(attention_mask.shape)} and input_ids {list(input_ids.shape)}: "
                    "they must be equal"
                )
            tokens = tokens.masked_fill(attention_mask == 0, self.eos_token_id)
        starts, invalid = _document_starts(input_ids.shape, cu_seqlens, tokens.device)
        if context is not None:
            wanted = (len(starts), self.ngram_size - 1)
            if context.shape != wanted and (len(starts) != 1 or context.shape != wanted[1:]):
                raise ValueError(
                    f"context has the shape {list(context.shape)}, but {wanted[0]} documents need {list(wanted)}: "
                    "the tokens before each document, the latest last"
                )
            context = _integers(context, "context").to(tokens.device).view(wanted)
            invalid = invalid | self._outside(context).any()
        return tokens.flatten(), starts, context, invalid | self._outside(tokens).any()

    def _keys(self, tokens: Tensor, starts: Tensor, context: Tensor | None) -> Tensor:
        """int64 [T, ngram_size - 1] of flat tokens whose documents begin at `starts`."""
        positions = torch.arange(tokens.numel(), device=tokens.device)
        document = torch.searchsorted(starts, positions, right=True) - 1
        age = positions - starts[document]  # tokens of the same document before this one
        keys = []
        window, mixed = tokens, tokens * self._multipliers[0]
        for shift in range(1, self.ngram_size):
            before = self.eos_token_id if context is None else _carried(context, document, age, shift)
            shifted = torch.where(age >= shift, tokens.roll(shift), before)
            # The token after an end-of-sequence sees nothing of what was before it; that token itself still does.
            window = shifted if shift == 1 else torch.where(window == self.eos_token_id, window, shifted)
            mixed = mixed ^ (window * self._multipliers[shift])
            keys.append(mixed)
        return torch.stack(keys, dim=-1)

    @cached_property
    def _multipliers(self) -> list[int]:
        return self.multipliers.tolist()

    def _outside(self, ids: Tensor) -> Tensor:
        return (ids < 0) | (ids >= self.vocab_size)

    def _raise_invalid(
        self, input_ids: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, context: Tensor | None
    ) -> NoReturn:
        """Says which value is refused."""
        if attention_mask is not None:
            input_ids = input_ids[attention_mask != 0]
        for name, ids in (("input_ids", input_ids), ("context", context)):
            if ids is not None and (outside := ids[self._outside(ids)]).numel():
                raise ValueError(
                    f"{name} holds the token id {outside[0].item()}, outside the vocabulary of {self.vocab_size}"
                )
        raise ValueError(
            f"cu_seqlens must rise from 0 to the row's {input_ids.numel()} tokens, got {cu_seqlens.tolist()}"
        )

    def check_buffers(self, multipliers: Tensor, head_sizes: Tensor, head_offsets: Tensor) -> None:
        """Compares the three int64 buffers of a checkpoint with the computed ones.

        Raises:
            ValueError: one differs (a padded vocabulary, another seed, another base); both values are in the message.
        """
        pairs = {
            "layer_multipliers": (multipliers, self.multipliers),
            "ngram_heads_vocab_sizes": (head_sizes, self.head_sizes),
            "ngram_heads_offsets": (head_offsets, self.head_offsets),
        }
        for name, (found, computed) in pairs.items():
            if found.tolist() != computed.tolist():
                raise ValueError(
                    f"the checkpoint's {name} is {found.tolist()}, but its configuration (vocab_size "
                    f"{self.vocab_size}, seed {self.seed}, ngram_vocab_size_base {self.ngram_vocab_size_base}) gives "
                    f"{computed.tolist()}: correct the configuration, the rows belong to the checkpoint's values"
                )


def _integers(ids: Tensor, name: str) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {ids.dtype}")
    return ids.long()


@lru_cache(maxsize=16)
def _on(device: torch.device, constant: Tensor) -> Tensor:
    """A constant of a hasher on a device: copied there once, not once a micro-batch."""
    return constant.to(device)


def _document_starts(shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """First flat position of each document, int64 [documents] (an empty one keeps its place); whether it is refused."""
    total = shape.numel()
    if cu_seqlens is None:
        rows, length = (1, total) if len(shape) == 1 else shape
        return torch.arange(rows, device=device) * length, torch.zeros((), dtype=torch.bool, device=device)
    if len(shape) == 2 and shape[0] != 1:
        raise ValueError(f"cu_seqlens cuts one packed row, [T] or [1, T], but input_ids has the shape {list(shape)}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must rise from 0 to the row's {total} tokens, got {cu_seqlens.tolist()}")
    bounds = cu_seqlens.to(device=device, dtype=torch.int64)
    return bounds[:-1].contiguous(), (bounds[0] != 0) | (bounds[-1] != total) | (bounds.diff() < 0).any()


def _carried(context: Tensor, document: Tensor, age: Tensor, shift: int) -> Tensor:
    """The token `shift` before each one, for those so near a document's start that it lies in `context`."""
    column = (context.shape[1] - shift + age).clamp(max=context.shape[1] - 1)
    return context[document, column]


def _mix64(value: int) -> int:
    """The finaliser of splitmix64, on unsigned 64-bit integers."""
    value = (value + _GAMMA) & _UINT64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64
    return value ^ (value >> 31)


def _primes_from(start: int) -> Iterator[int]:
    candidate = max(start, 2)
    while True:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            yield candidate
        candidate += 1
