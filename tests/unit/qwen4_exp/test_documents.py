"""The right-padded view of a micro-batch."""

import pytest
import torch

from skyrl_qwen38.qwen4_exp.documents import Documents


def packed(*lengths: int) -> Documents:
    return Documents.from_cu_seqlens(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0), sum(lengths))


def padded(*rows: str) -> Documents:
    """Rows drawn as "xx.": x a token, . padding."""
    return Documents.from_padded_rows(torch.tensor([[mark == "x" for mark in row] for row in rows]))


CASES = [
    (packed(3, 1, 2), [[[1], [2], [3]], [[4], [0], [0]], [[5], [6], [0]]]),
    (packed(2, 2), [[[1], [2]], [[3], [4]]]),
    (packed(4), [[[1], [2], [3], [4]]]),
    (packed(2, 0, 1), [[[1], [2]], [[0], [0]], [[3], [0]]]),
    (padded("xx.", "xxx"), [[[1], [2], [0]], [[4], [5], [6]]]),
    (padded(".xx", "..x"), [[[2], [3]], [[6], [0]]]),
    (padded("xx", "xx"), [[[1], [2]], [[3], [4]]]),
    (padded("..", "x."), [[[0]], [[3]]]),
]


@pytest.mark.parametrize(("documents", "view"), CASES)
def test_pad_cuts_at_documents_and_unpad_undoes_it(documents, view):
    """Token i of the micro-batch, counted row by row, holds i + 1."""
    count = documents.batch * documents.sequence
    x = (torch.arange(count) + 1.0).view(documents.batch, documents.sequence, 1).transpose(0, 1)  # [S, B, 1]
    assert documents.pad(x).tolist() == view
    real = torch.zeros(count, dtype=torch.bool)
    real[documents.tokens if documents.tokens is not None else slice(None)] = True
    expected = x * real.view(documents.batch, documents.sequence, 1).transpose(0, 1)
    assert torch.equal(documents.unpad(documents.pad(x)), expected)


@pytest.mark.parametrize(("documents", "view"), CASES)
def test_gradients_pass_through_real_tokens_alone(documents, view):
    x = torch.ones(documents.sequence, documents.batch, 1, requires_grad=True)
    documents.unpad(2 * documents.pad(x)).sum().backward()
    real = torch.zeros(documents.batch * documents.sequence)
    real[documents.tokens if documents.tokens is not None else slice(None)] = 2
    assert torch.equal(x.grad[..., 0].T.flatten(), real)


@pytest.mark.parametrize("bounds", [[0, 3], [0, 5], [1, 4]])
def test_bounds_that_do_not_cover_the_row_are_refused(bounds):
    with pytest.raises(ValueError, match=f"runs from {bounds[0]} to {bounds[1]} but the packed row has 4 tokens"):
        Documents.from_cu_seqlens(torch.tensor(bounds), 4)


def test_a_hole_in_a_row_is_refused():
    with pytest.raises(ValueError, match="Row 1 of the attention mask has padding between its 2 tokens"):
        padded("xxx", "x.x")
