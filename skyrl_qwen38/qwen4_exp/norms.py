"""The two RMS norms of ``qwen4_exp``. Both compute in fp32 and return the input's dtype."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class ZeroCenteredRMSNorm(nn.Module):
    """``x / rms(x) * (1 + w)``, ``w`` zero at initialisation.

    Args:
        hidden_size: features of the input and of the weight.
        group_size: width of one statistic; a stream of the hyper-connections (H) for the norms over n streams.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, group_size: int | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self.group_size = group_size or hidden_size

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().unflatten(-1, (-1, self.group_size))
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * (1.0 + self.weight.float())).to(x.dtype)


class RMSNorm(nn.Module):
    """``x / rms(x) * w``, ``w`` one at initialisation: DeltaNet's output norm, the only one of its kind here."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)
