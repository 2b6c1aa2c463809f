"""The gated delta rule against its definition, token by token in float64.

Relative tolerance 3e-6 for output and gradients: fp32 sums of up to a chunk's 64 terms, after a triangular solve.
"""

import pytest
import torch

from skyrl_qwen38.qwen4_exp.gated_delta_rule import gated_delta_rule

TOLERANCE = 3e-6


def inputs(lengths, key_heads=2, group=3, d_k=8, d_v=16, decay=0.05):
    """Decays of e^-decay a token on average: with a small one a state that leaks across documents must show."""
    generator = torch.Generator().manual_seed(sum(lengths) + group)
    count, heads = sum(lengths), key_heads * group

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    query, key = (torch.nn.functional.normalize(normal(count, key_heads, d_k), dim=-1) for _ in range(2))
    g = -2 * decay * torch.rand(count, heads, generator=generator)
    made = query, key, normal(count, heads, d_v), g, normal(count, heads).sigmoid()
    return [x.requires_grad_() for x in made]


def token_by_token(query, key, value, g, beta, lengths):
    """As it is defined."""
    query, key, value, g, beta = (x.double() for x in (query, key, value, g, beta))
    group = value.shape[1] // key.shape[1]
    query, key = query.repeat_interleave(group, 1) * query.shape[-1] ** -0.5, key.repeat_interleave(group, 1)
    outputs = []
    for document in zip(*(x.split(lengths) for x in (query, key, value, g, beta)), strict=True):
        state = torch.zeros(value.shape[1], key.shape[-1], value.shape[-1], dtype=torch.float64)
        for q, k, v, decay, b in zip(*document, strict=True):
            state = state * decay.exp()[:, None, None]
            update = b[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
            state = state + torch.einsum("hk,hv->hkv", k, update)
            outputs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outputs)


LENGTHS = [(1,), (64,), (65,), (5, 0, 130, 64, 1, 63), (3, 2, 4), (128, 7), (20,) * 5]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("group", "decay"), [(1, 0.05), (3, 1e-3), (3, 20)])
def test_output_and_gradients_are_those_of_the_definition(lengths, group, decay):
    arguments = inputs(lengths, group=group, decay=decay)
    expected = token_by_token(*arguments, lengths)
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad(expected, arguments, seed.double())
    output = gated_delta_rule(*arguments, lengths)
    assert output.dtype == torch.float32
    found = torch.autograd.grad(output, arguments, seed)
    for one, other in zip((output, *found), (expected, *wanted), strict=True):
        # A gradient may be nothing but rounding where the decay is fast: then 1e-9 of the largest gradient is its size.
        size = max(other.norm().item(), 1e-9 * max(w.norm().item() for w in wanted))
        assert (one - other).norm() <= TOLERANCE * size


def test_no_document_feels_another():
    lengths = (70, 3, 40)
    arguments = inputs(lengths, decay=1e-4)
    together = gated_delta_rule(*arguments, lengths)
    alone = [
        gated_delta_rule(*part, (len(part[0]),)) for part in zip(*(x.split(lengths) for x in arguments), strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-6)
    joined = gated_delta_rule(*arguments, (sum(lengths),))
    assert (joined - together)[70:].abs().max() > 0.1


def test_nothing_but_whole_chunks_is_padded(monkeypatch):
    """Documents of 130 and 1 tokens take 3 chunks and 1, not 3 each."""
    seen = []
    solve = torch.linalg.solve_triangular

    def counting(matrix, *args, **kwargs):
        seen.append(len(matrix))
        return solve(matrix, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "solve_triangular", counting)
    gated_delta_rule(*inputs((130, 1)), (130, 1))
    assert seen == [4]


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_token_is_no_output(lengths):
    assert gated_delta_rule(*inputs(lengths), lengths).shape == (0, 6, 16)


def test_bf16_is_computed_in_fp32():
    lengths = (70, 9)
    query, key, value, g, beta = (x.detach() for x in inputs(lengths))
    half = [query.bfloat16(), key.bfloat16(), value.bfloat16(), g, beta.bfloat16()]
    output = gated_delta_rule(*half, lengths)
    wide = gated_delta_rule(*(x.float() for x in half), lengths)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, wide.bfloat16())
