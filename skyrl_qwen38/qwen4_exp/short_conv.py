"""A causal depthwise convolution over packed documents: the short convolutions of DeltaNet and of the PLE layer."""

import torch
from torch import Tensor


def short_conv(x: Tensor, weight: Tensor, positions: Tensor, dilation: int = 1) -> Tensor:
    """``y_t = Σ_i w_i x_{t − d(k−1−i)}``, i = 0 … k−1, with zeros before the document's first token.

    Args:
        x: ``[T, channels]``, documents one after the other.
        weight: ``[channels, 1, k]``, as ``nn.Conv1d`` has it.
        positions: int64 ``[T]``, of each token in its document.
        dilation: d, tokens between two taps.
    """
    return _ShortConv.apply(x, weight, positions, dilation)


class _ShortConv(torch.autograd.Function):
    """A sum of shifted copies. By hand, because autograd would keep a masked copy of the input for every tap."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, positions: Tensor, dilation: int) -> Tensor:
        ctx.save_for_backward(x, weight, positions)
        ctx.dilation = dilation
        wide, taps = x.float(), _taps(weight)
        out = wide * taps[0]
        for shift, tap in _shifted(taps, dilation, len(x)):
            out[shift:].addcmul_(_inside(wide[:-shift], positions[shift:], shift), tap)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, positions = ctx.saved_tensors
        wide, grad, taps = x.float(), grad.float(), _taps(weight)
        grad_x = grad * taps[0]
        grad_taps = torch.zeros_like(taps)
        grad_taps[0] = (grad * wide).sum(0)
        for back, (shift, tap) in enumerate(_shifted(taps, ctx.dilation, len(x)), 1):
            reached = _inside(grad[shift:], positions[shift:], shift)
            grad_x[:-shift].addcmul_(reached, tap)
            grad_taps[back] = (reached * wide[:-shift]).sum(0)
        return grad_x.to(x.dtype), grad_taps.flip(0).t().unsqueeze(1).to(weight.dtype), None, None


def _taps(weight: Tensor) -> Tensor:
    """fp32 ``[k, channels]``, the tap of the token itself first."""
    return weight.float().squeeze(1).t().flip(0)


def _shifted(taps: Tensor, dilation: int, length: int) -> list[tuple[int, Tensor]]:
    """The other taps that reach a token at all, each with how many tokens it looks back."""
    return [(back * dilation, tap) for back, tap in enumerate(taps) if 0 < back * dilation < length]


def _inside(x: Tensor, positions: Tensor, shift: int) -> Tensor:
    """``x``, zero where a token's tap of ``shift`` tokens before it lies in another document."""
    return x * (positions >= shift).unsqueeze(-1)
