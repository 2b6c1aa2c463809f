"""The short convolution, against PyTorch's own on each document alone. Tolerances are fp32 rounding of 4 terms."""

import pytest
import torch
import torch.nn.functional as F

from skyrl_qwen38.qwen4_exp.documents import Documents
from skyrl_qwen38.qwen4_exp.short_conv import short_conv


def inputs(lengths, channels=5, kernel=4):
    generator = torch.Generator().manual_seed(sum(lengths))
    x = torch.randn(sum(lengths), channels, generator=generator, requires_grad=True)
    weight = torch.randn(channels, 1, kernel, generator=generator, requires_grad=True)
    documents = Documents.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))
    return x, weight, documents, torch.randn(x.shape, generator=generator)


def document_by_document(x, weight, documents, dilation):
    parts = []
    for part in x.split([length for length in documents.lengths if length]):
        padded = F.pad(part.t(), (dilation * (weight.shape[-1] - 1), 0))
        parts.append(F.conv1d(padded[None], weight, groups=len(weight), dilation=dilation)[0].t())
    return torch.cat(parts)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("lengths", [(20,), (1,), (2, 3), (7, 1, 0, 12, 3, 10), (1, 1, 1)])
def test_output_and_gradients_are_those_of_each_document_alone(lengths, dilation):
    x, weight, documents, seed = inputs(lengths)
    expected = document_by_document(x, weight, documents, dilation)
    wanted = torch.autograd.grad(expected, (x, weight), seed)
    output = short_conv(x, weight, documents.positions, dilation)
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)
    for found, gradient in zip(torch.autograd.grad(output, (x, weight), seed), wanted, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=5e-6)


def test_bf16_is_rounded_once():
    x, weight, documents, _ = inputs((30, 3))
    half = [tensor.detach().bfloat16() for tensor in (x, weight)]
    output = short_conv(*half, documents.positions)
    assert output.dtype == torch.bfloat16
    wide = short_conv(*(tensor.float() for tensor in half), documents.positions)
    assert torch.equal(output, wide.bfloat16())


def test_gradients_are_those_of_finite_differences():
    x, weight, documents, _ = inputs((4, 3), channels=2)
    # The kernel works in fp32, so the step is large and the tolerance that of fp32.
    arguments = (x, weight, documents.positions, 1)
    assert torch.autograd.gradcheck(short_conv, arguments, eps=1e-2, atol=1e-2, rtol=1e-2)
