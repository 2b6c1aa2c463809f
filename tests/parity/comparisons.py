"""How the model's numbers are compared with a reference's."""

import torch
from torch import Tensor

LOGPROB_TOLERANCE = 3e-6  # fp32 resolution at their size, 8, is 1e-6
STREAM_TOLERANCE = 3e-5
GRADIENT_TOLERANCE = 1e-5
# Behind the n-gram gate's root sqrt|d|, whose slope grows without bound where a key and a stream are at right angles:
# there fp32 itself, and Transformers with it, is off by more.
GATED = ("ple.key_proj.weight", "ple.norm_key.weight", "ple.norm_query.weight")


def relative_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """``‖Δ‖₂ / ‖g‖₂`` of each tensor; a norm below 1e-6 of the largest counts as that."""
    norms = {name: gradient.double().norm() for name, gradient in wanted.items() if gradient.is_floating_point()}
    floor = 1e-6 * max(norms.values())
    return {
        name: ((found[name].double() - wanted[name].double()).norm() / max(norm, floor)).item()
        for name, norm in norms.items()
    }


def assert_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    errors = relative_errors(found, wanted)
    assert {name: error for name, error in errors.items() if error > tolerance} == {}


def assert_selections(found: list[dict[int, Tensor]], scores: list[dict[int, Tensor]]) -> None:
    """Each query keeps the blocks with the highest scores; of scores that fp32 cannot tell apart it may keep any."""
    for document, (chosen, by_layer) in enumerate(zip(found, scores, strict=True)):
        for layer, blocks in chosen.items():
            for kept, row in zip(blocks.long(), by_layer[layer], strict=True):
                left_out = torch.ones_like(row, dtype=torch.bool).index_fill_(0, kept, False)
                assert len(kept.unique()) == len(kept), (document, layer)
                assert row[kept].min() >= row[left_out].max() - 1e-5 * row.max(), (document, layer)
