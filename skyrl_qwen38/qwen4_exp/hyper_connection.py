"""Hyper-connections: n residual streams of width H, mixed into each block and written back after it.

The state is stored flat, stream-major: ``[S, B, n*H]``. There is no layer norm before a block and no final norm; the
norms here take their place. The *normed* streams are mixed, the *raw* streams are written to.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from skyrl_qwen38.qwen4_exp.norms import ZeroCenteredRMSNorm


class StreamMixer(nn.Module):
    """The final contraction of the streams, in the place of a final norm.

    With x̂ the streams normed per stream, gates ``G = σ(W_up SiLU(W_down x̂ / n))`` and output ``mean_j(G_j ⊙ x̂_j)``.
    The signature is the one that a transformer block builds its final norm with: ``hidden_size`` is H.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.streams, self.hidden_size = config.hc_count, hidden_size
        width, dtype = config.hc_count * hidden_size, config.params_dtype
        self.hc_norm = ZeroCenteredRMSNorm(config, width, eps, group_size=hidden_size)
        self.input_mix_weight_down = nn.Linear(width, config.hc_lowrank, bias=False, dtype=dtype)
        self.input_mix_weight_up = nn.Linear(config.hc_lowrank, width, bias=False, dtype=dtype)
        config.init_method(self.input_mix_weight_down.weight)
        config.init_method(self.input_mix_weight_up.weight)

    def mix(self, normed: Tensor) -> Tensor:
        """Normed streams ``[S, B, n*H]`` to the block's input ``[S, B, H]``."""
        gates = F.silu(self.input_mix_weight_down(normed) / self.streams)
        gates = torch.sigmoid(self.input_mix_weight_up(gates))
        return (gates * normed).unflatten(-1, (self.streams, self.hidden_size)).mean(-2)

    def forward(self, streams: Tensor) -> Tensor:
        return self.mix(self.hc_norm(streams))


class HyperConnection(StreamMixer):
    """The mix before a block, and the write-back after it.

    One scalar per stream, ``ι = 2σ(W_inj x̂ / n)``, from the same x̂ as the mix; then ``X_j ← X_j + ι_j · y``.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(config, hidden_size, eps)
        width = self.streams * hidden_size
        self.block_inject_weight = nn.Linear(width, self.streams, bias=False, dtype=config.params_dtype)
        config.init_method(self.block_inject_weight.weight)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Streams ``[S, B, n*H]`` to the block's input ``[S, B, H]`` and the injection ``[S, B, n]``."""
        normed = self.hc_norm(streams)
        injection = 2 * torch.sigmoid(self.block_inject_weight(normed) / self.streams)
        return self.mix(normed), injection

    @staticmethod
    def write_back(streams: Tensor, injection: Tensor, output: Tensor) -> Tensor:
        """``X + ι ⊗ y``: streams ``[S, B, n*H]``, injection ``[S, B, n]``, block output ``[S, B, H]``."""
        return streams + (injection.unsqueeze(-1) * output.unsqueeze(-2)).flatten(-2)
