"""Sparse attention: what the indexer chooses, and attention over the choice.

Choices are compared with a loop over queries in float64, written from the specification; a query whose choice hangs on
scores closer than fp32 tells apart may keep either block.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from skyrl_qwen38.qwen4_exp.documents import Documents
from skyrl_qwen38.qwen4_exp.qsa import chunked, indexer
from skyrl_qwen38.qwen4_exp.qsa.attention import document_attention
from skyrl_qwen38.qwen4_exp.qsa.indexer import Indexer
from skyrl_qwen38.qwen4_exp.qsa.selection import Selection

ROTATED = 8


def documents_of(*lengths: int) -> Documents:
    return Documents.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))


def make_indexer(budget=16, ratio=4, heads=2, width=16, hidden=32) -> Indexer:
    torch.manual_seed(3)
    config = SimpleNamespace(
        hidden_size=hidden,
        indexer_n_heads=heads,
        indexer_head_dim=width,
        indexer_budget=budget,
        indexer_compress_ratio=ratio,
        params_dtype=torch.float32,
        layernorm_epsilon=1e-6,
    )
    made = Indexer(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def angles_of(length: int) -> torch.Tensor:
    frequencies = 1e4 ** -(torch.arange(0, ROTATED, 2) / ROTATED)
    halves = torch.arange(length).unsqueeze(1) * frequencies
    return torch.cat([halves, halves], dim=1)


# ---- the choice ----


def specified_scores(own: Indexer, hidden: torch.Tensor, query: int) -> torch.Tensor:
    """Scores of the complete blocks that a query sees, float64."""

    def normed(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + norm.weight.double())

    def rotated(x, position):
        angles = position * 1e4 ** -(torch.arange(0, ROTATED, 2, dtype=torch.float64) / ROTATED)
        left, right = x[..., : ROTATED // 2], x[..., ROTATED // 2 : ROTATED]
        turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin())
        return torch.cat([*turned, x[..., ROTATED:]], dim=-1)

    projected = hidden.double() @ own.index_qk_proj.weight.double().t()
    heads = projected[query, : own.heads * own.width].view(own.heads, own.width)
    heads = rotated(normed(heads, own.q_layernorm), query)
    raw = projected[:, own.heads * own.width :]
    scores = []
    for block in range((query + 1) // own.ratio):
        pooled = raw[block * own.ratio : (block + 1) * own.ratio].mean(0)
        key = rotated(normed(pooled, own.k_layernorm), block * own.ratio)
        scores.append((heads @ key).clamp(min=0).sum())
    return torch.stack(scores)


def assert_best(kept: list[int], scores: torch.Tensor) -> None:
    """No block that was left out scores higher than one that was kept, beyond fp32 rounding."""
    left_out = [block for block in range(len(scores)) if block not in kept]
    assert len(set(kept)) == len(kept)
    assert scores[kept].min() >= scores[left_out].max() - 1e-5 * scores.max()


@pytest.mark.parametrize(("budget", "ratio"), [(16, 4), (12, 2), (8, 8), (5, 1)])
def test_pitfall_16_a_query_keeps_the_best_blocks_of_its_document(budget, ratio):
    own = make_indexer(budget, ratio)
    lengths = (own.first + 21, 3, own.first, own.first + 1)
    hidden = torch.randn(sum(lengths), 32)
    selection = own(hidden, documents_of(*lengths), angles_of(max(lengths)))
    assert [len(blocks) for blocks in selection.blocks] == [21, 0, 0, 1]
    for part, blocks in zip(hidden.split(lengths), selection.blocks, strict=True):
        for number, kept in enumerate(blocks.tolist()):
            assert kept == sorted(kept)
            assert len(kept) == budget // ratio
            assert_best(kept, specified_scores(own, part, own.first + number))


def test_pitfall_17_the_first_choice_is_made_where_not_all_blocks_fit(monkeypatch):
    """Released sizes: 2051 tokens are dense, and the next query sees 513 blocks of which it keeps 512."""
    own = make_indexer(2048, 4, heads=4, width=128)
    assert own.first == 2051
    selection = own(torch.randn(2053, 32), documents_of(2053), angles_of(2053))
    assert selection.blocks[0].shape == (2, 512)
    assert selection.blocks[0].max() == 512


def test_pitfall_17_the_block_that_a_query_has_just_completed_is_droppable():
    own = make_indexer(16, 4)
    selection = own(torch.randn(400, 32), documents_of(400), angles_of(400))
    completing = [t for t in range(own.first, 400) if (t + 1) % 4 == 0]
    kept = [t // 4 in selection.blocks[0][t - own.first].tolist() for t in completing]
    assert True in kept
    assert False in kept


def test_chunks_of_scores_change_nothing(monkeypatch):
    own = make_indexer(heads=8)  # that many, so that no cut falls among scores of zero
    arguments = torch.randn(150, 32), documents_of(100, 50), angles_of(100)
    whole = own(*arguments)
    monkeypatch.setattr(indexer, "_SCORES_A_CHUNK", 64)
    for one, other in zip(whole.blocks, own(*arguments).blocks, strict=True):
        assert torch.equal(one, other)


# ---- attention over it ----


def selection_of(documents: Documents, budget: int, ratio: int) -> Selection:
    generator = torch.Generator().manual_seed(5)
    first, kept = budget + ratio - 1, budget // ratio
    chosen = []
    for length in documents.lengths:
        rows = [
            torch.randperm((t + 1) // ratio, generator=generator)[:kept].sort().values for t in range(first, length)
        ]
        chosen.append(torch.stack(rows).int() if rows else torch.empty(0, kept, dtype=torch.int32))
    return Selection(ratio, first, tuple(chosen))


def mask_of(documents: Documents, selection: Selection | None) -> torch.Tensor:
    """bool [T, T] of the keys that each query sees."""
    count = sum(documents.lengths)
    mask = torch.zeros(count, count, dtype=torch.bool)
    for number, (start, stop) in enumerate(documents.bounds):
        for t in range(stop - start):
            row = mask[start + t]
            if selection is None or t < selection.first:
                row[start : start + t + 1] = True
                continue
            for block in selection.blocks[number][t - selection.first].tolist():
                row[start + block * selection.ratio : start + (block + 1) * selection.ratio] = True
            row[start + (t + 1) // selection.ratio * selection.ratio : start + t + 1] = True
    return mask


def heads(documents: Documents, query_heads=6, groups=2, width=16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = sum(documents.lengths)
    shapes = [(count, number, width) for number in (query_heads, groups, groups)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def masked_attention(query, key, value, mask):
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


CASES = [
    ((61,), 16, 4),
    ((9, 44, 0, 19, 20, 1), 16, 4),
    ((30, 31, 33), 6, 2),
    ((25, 3), 5, 1),
    ((47,), 8, 8),
    ((5, 4, 3), 16, 4),
]


@pytest.mark.parametrize(("lengths", "budget", "ratio"), CASES)
def test_output_and_gradients_are_those_of_a_mask(lengths, budget, ratio, monkeypatch):
    """Relative 1e-6: fp32 rounding of another order of summation."""
    monkeypatch.setitem(chunked._GATHERED_BYTES, "cpu", 3 * (budget + ratio) * 2 * 16 * 4)  # chunks of three queries
    documents = documents_of(*lengths)
    selection = selection_of(documents, budget, ratio) if max(lengths) > budget + ratio - 1 else None
    inputs = heads(documents)
    expected = masked_attention(*inputs, mask_of(documents, selection))
    seed = torch.randn(expected.shape)
    wanted = torch.autograd.grad(expected, inputs, seed)
    output = document_attention(*inputs, documents, selection, 16**-0.5)
    assert (output - expected).norm() <= 1e-6 * expected.norm()
    for found, gradient in zip(torch.autograd.grad(output, inputs, seed), wanted, strict=True):
        assert (found - gradient).norm() <= 1e-6 * gradient.norm()


def test_attending_to_all_keys_is_not_attending_to_the_chosen_ones():
    documents = documents_of(61)
    inputs = heads(documents)
    sparse = document_attention(*inputs, documents, selection_of(documents, 16, 4), 16**-0.5)
    dense = document_attention(*inputs, documents, None, 16**-0.5)
    torch.testing.assert_close(sparse[:19], dense[:19], rtol=0, atol=1e-6)
    assert ((sparse - dense)[19:].abs().amax((1, 2)) > 1e-3).all()


def test_bf16_inputs_are_rounded_once():
    documents = documents_of(61)
    selection = selection_of(documents, 16, 4)
    half = [x.detach().bfloat16() for x in heads(documents)]
    output = document_attention(*half, documents, selection, 16**-0.5)[19:]
    exact = masked_attention(*(x.double() for x in half), mask_of(documents, selection))[19:]
    assert output.dtype == torch.bfloat16
    assert ((output.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


def test_nothing_quadratic_is_kept_for_the_backward_pass():
    saved = []

    def remember(tensor):
        saved.append(tensor.numel())
        return tensor

    documents = documents_of(400)
    selection = selection_of(documents, 16, 4)
    inputs = heads(documents)
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        chunked.chunked_attention(inputs[0][19:], *inputs[1:], selection.blocks[0], 19, 4, 0.25)
    assert max(saved) <= max(x.numel() for x in inputs)
