"""The model against Transformers over random configurations: sizes, layer orders, heads, blocks and budgets.

fp32, packed and left-padded, with the reference's selections; and the model's own selections. Tolerances: see
`comparisons`; in log-probs what fp32 resolves where that is more (in one of these configurations Transformers in fp32
is off by 7e-6 from itself in fp64).
"""

import random

import pytest
import torch

from tests.parity import checkpoints, transformers_runs
from tests.parity import megatron_runs as runs
from tests.parity.comparisons import LOGPROB_TOLERANCE, STREAM_TOLERANCE, assert_selections

SEEDS = range(6)


def configuration(seed: int) -> dict:
    """Changes to the tiny configuration."""
    draw = random.Random(seed)
    layers = draw.choice((3, 4, 5))
    kinds = ["linear_attention", *draw.choices(("linear_attention", "full_attention"), k=layers - 2), "full_attention"]
    heads, groups = draw.choice(((4, 2), (6, 2), (3, 1), (8, 4)))
    key_heads, value_heads = draw.choice(((2, 6), (1, 3), (2, 2), (4, 8)))
    ratio, rotated = draw.choice((1, 2, 4, 8)), draw.choice((8, 16))
    sections = {8: [2, 1, 1], 16: [4, 2, 2]}[rotated]
    return {
        "hidden_size": draw.choice((48, 64, 96)),
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "ple_layer_ids": [draw.choice([number for number, kind in enumerate(kinds, 1) if kind == "linear_attention"])],
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": draw.choice((8, 16)),
        "linear_value_head_dim": draw.choice((8, 16, 24)),
        "linear_conv_kernel_dim": draw.choice((3, 4)),
        "num_experts_per_tok": draw.choice((2, 3, 4)),
        "hc_count": draw.choice((2, 4)),
        "hc_lowrank": draw.choice((4, 8)),
        "ple_conv_kernel_size": draw.choice((2, 4)),
        "indexer_n_heads": draw.choice((1, 2, 4)),
        "indexer_compress_ratio": ratio,
        "indexer_budget": ratio * draw.choice((2, 5, 9)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw.choice((1e4, 1e7)),
            "partial_rotary_factor": rotated / 32,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
    }


@pytest.fixture(scope="module", params=SEEDS, ids=lambda seed: f"seed{seed}")
def case(request, tmp_path_factory):
    """Checkpoint, documents (dense and sparse ones), what Transformers says, and the tolerance of log-probs."""
    changes = configuration(request.param)
    folder = checkpoints.make_text_checkpoint(tmp_path_factory.mktemp("configuration"), request.param, **changes)
    generator = torch.Generator().manual_seed(request.param)
    made = [
        torch.randint(0, checkpoints.VOCAB - 4, (length,), generator=generator).tolist() for length in (90, 3, 1, 41)
    ]
    reference = transformers_runs.run(folder, made)
    return folder, made, reference, max(LOGPROB_TOLERANCE, transformers_runs.rounding(folder, made, reference))


def test_logprobs_streams_and_selections(megatron_ranks, case):
    checkpoint, documents, reference, tolerance = case
    (found,) = megatron_ranks.run(runs.observe, checkpoint, documents, reference.selections, world_size=1, timeout=150)
    for name, allowed in (("logprobs", tolerance), ("streams", STREAM_TOLERANCE)):
        for one, other in zip(getattr(found, name), getattr(reference, name), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=allowed)
    assert sum(len(blocks) for chosen in found.selections for blocks in chosen.values()) > 0
    assert_selections(found.selections, reference.scores)


def test_padded_rows(megatron_ranks, case):
    checkpoint, documents, reference, tolerance = case
    (found,) = megatron_ranks.run(
        runs.logprobs, checkpoint, documents, reference.selections, "left", "rows", world_size=1, timeout=150
    )
    for scores, wanted in zip(found, reference.logprobs, strict=True):
        torch.testing.assert_close(scores, wanted, rtol=0, atol=tolerance)
