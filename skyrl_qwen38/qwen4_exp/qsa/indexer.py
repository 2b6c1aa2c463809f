"""The indexer of Qwen sparse attention (QSA): chooses which blocks of keys a query sees."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from skyrl_qwen38.qwen4_exp.documents import Documents
from skyrl_qwen38.qwen4_exp.norms import ZeroCenteredRMSNorm
from skyrl_qwen38.qwen4_exp.qsa.selection import Selection

_SCORES_A_CHUNK = 1 << 22  # 16 MiB in fp32


class Indexer(nn.Module):
    """``score(t, b) = Σ_h max(0, q_h · k_b)`` of query t and complete block b; a query keeps its highest blocks.

    q_h is normed and rotated at the query's position. k_b is the fp32 mean of the block's raw keys, then normed, then
    rotated at the position of the block's first token. The score's positive scale is left out: it changes no choice.

    Loaded, exported and frozen: the choice is not differentiable, so no loss reaches these weights, and an optimizer's
    weight decay would still move them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        heads, width, dtype = config.indexer_n_heads, config.indexer_head_dim, config.params_dtype
        self.heads, self.width = heads, width
        self.ratio, self.kept = config.indexer_compress_ratio, config.indexer_budget // config.indexer_compress_ratio
        # The first query that chooses: those before it keep every key, and so does a document of as many tokens.
        self.first = config.indexer_budget + self.ratio - 1
        self.index_qk_proj = nn.Linear(config.hidden_size, (heads + 1) * width, bias=False, dtype=dtype)
        self.q_layernorm = ZeroCenteredRMSNorm(config, width, config.layernorm_epsilon)
        self.k_layernorm = ZeroCenteredRMSNorm(config, width, config.layernorm_epsilon)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden_states: Tensor, documents: Documents, angles: Tensor) -> Selection:
        """The choice of every document.

        Args:
            hidden_states: packed, ``[T, H]``.
            angles: fp32 ``[>= longest, rotated]``, of rotary embedding at every position.
        """
        blocks = [self._choose(hidden_states[start:stop], angles) for start, stop in documents.bounds]
        return Selection(self.ratio, self.first, tuple(blocks))

    def _choose(self, hidden_states: Tensor, angles: Tensor) -> Tensor:
        """int32 ``[max(0, L − first), kept]`` for a document of L tokens."""
        length = len(hidden_states)
        chosen = torch.empty(max(0, length - self.first), self.kept, dtype=torch.int32, device=hidden_states.device)
        if length <= self.first:
            return chosen
        keys = self._block_keys(hidden_states, angles).float()
        step = max(1, _SCORES_A_CHUNK // len(keys))
        for begin in range(self.first, length, step):
            end = min(begin + step, length)
            scores = self._scores(hidden_states[begin:end], angles[begin:end], keys[: end // self.ratio])
            visible = (torch.arange(begin, end, device=keys.device) + 1) // self.ratio
            unseen = torch.arange(scores.shape[1], device=keys.device) >= visible.unsqueeze(1)
            scores.masked_fill_(unseen, -1.0)  # below every score; a query that chooses sees more blocks than it keeps
            top = scores.topk(self.kept, dim=1, sorted=False).indices
            # In order: neighbours in memory, and one form of a set.
            chosen[begin - self.first : end - self.first] = top.sort(dim=1).values
        return chosen

    def _block_keys(self, hidden_states: Tensor, angles: Tensor) -> Tensor:
        """``[⌊L / ratio⌋, width]``"""
        complete = len(hidden_states) // self.ratio * self.ratio
        weight = self.index_qk_proj.weight[self.heads * self.width :]
        raw = nn.functional.linear(hidden_states[:complete], weight).unflatten(0, (-1, self.ratio))
        pooled = raw.float().mean(1).to(raw.dtype)
        return _rotate(self.k_layernorm(pooled), angles[: complete : self.ratio])

    def _scores(self, hidden_states: Tensor, angles: Tensor, keys: Tensor) -> Tensor:
        """fp32 ``[queries, blocks]``, without the rule of what a query sees."""
        weight = self.index_qk_proj.weight[: self.heads * self.width]
        query = self.q_layernorm(nn.functional.linear(hidden_states, weight).unflatten(-1, (self.heads, self.width)))
        query = _rotate(query, angles.unsqueeze(1)).float()
        scores = query.new_zeros(len(query), len(keys))
        for head in range(self.heads):
            scores += (query[:, head] @ keys.t()).relu_()
        return scores


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of the first dimensions of x ``[..., width]`` by angles ``[..., rotated]``, halves twice."""
    rotated = angles.shape[-1]
    turned, rest = x[..., :rotated], x[..., rotated:]
    left, right = turned.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([turned * cos + torch.cat([-right, left], dim=-1) * sin, rest], dim=-1)
