"""The packed view of a micro-batch."""

import pytest
import torch

from skyrl_qwen38.qwen4_exp.documents import Documents


def packed(*lengths: int) -> Documents:
    return Documents.from_cu_seqlens(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0), sum(lengths))


def padded(*rows: str) -> Documents:
    """Rows drawn as "xx.": x a token, . padding."""
    return Documents.from_padded_rows(torch.tensor([[mark == "x" for mark in row] for row in rows]))


CASES = [
    (packed(3, 1, 2), [1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 1]),
    (packed(4), [1, 2, 3, 4], [0, 1, 2, 3]),
    (packed(2, 0, 1), [1, 2, 3], [0, 1, 0]),
    (Documents.from_rows(2, 2, torch.device("cpu")), [1, 2, 3, 4], [0, 1, 0, 1]),
    (padded("xx.", "xxx"), [1, 2, 4, 5, 6], [0, 1, 0, 1, 2]),
    (padded(".xx", "..x"), [2, 3, 6], [0, 1, 0]),
    (padded("xx", "xx"), [1, 2, 3, 4], [0, 1, 0, 1]),
    (padded("..", "x."), [3], [0]),
    (padded("..", ".."), [], []),
]


@pytest.mark.parametrize(("documents", "view", "positions"), CASES)
def test_the_packed_view_has_all_tokens_of_documents_one_after_the_other(documents, view, positions):
    """Token i of the micro-batch, counted row by row, holds i + 1."""
    count = documents.batch * documents.sequence
    x = (torch.arange(count) + 1.0).view(documents.batch, documents.sequence, 1).transpose(0, 1)  # [S, B, 1]
    found = documents.pack(x)
    assert found[:, 0].tolist() == view
    assert documents.positions.tolist() == positions
    assert torch.equal(documents.unpack(found), x * torch.isin(x, torch.tensor(view)))
    starts = [start for start, _ in documents.bounds]
    assert documents.cu_seqlens.tolist() == [*starts, len(view)]
    assert [positions[start] for start, stop in documents.bounds if stop > start] == [0] * sum(
        length > 0 for length in documents.lengths
    )


@pytest.mark.parametrize(("documents", "view", "positions"), CASES)
def test_gradients_pass_through_real_tokens_alone(documents, view, positions):
    x = torch.ones(documents.sequence, documents.batch, 1, requires_grad=True)
    documents.unpack(2 * documents.pack(x)).sum().backward()
    real = [2.0 if number + 1 in view else 0.0 for number in range(documents.batch * documents.sequence)]
    assert x.grad[..., 0].T.flatten().tolist() == real


@pytest.mark.parametrize("bounds", [[0, 3], [0, 5], [1, 4]])
def test_bounds_that_do_not_cover_the_row_are_refused(bounds):
    with pytest.raises(ValueError, match=f"runs from {bounds[0]} to {bounds[1]} but the packed row has 4 tokens"):
        Documents.from_cu_seqlens(torch.tensor(bounds), 4)


def test_a_hole_in_a_row_is_refused():
    with pytest.raises(ValueError, match="Row 1 of the attention mask has padding between its 2 tokens"):
        padded("xxx", "x.x")
