"""What the model is made of, what it refuses, and what optimizers and checkpoints see of it."""

from pathlib import Path

import pytest
import torch

from tests.parity import megatron_runs as runs
from tests.ranks import RankError


def test_no_module_of_transformers_and_no_norm_that_the_architecture_lacks(megatron_ranks, text_checkpoint):
    """With pitfall 12: no norm before a block, no final norm but the mixer's own."""
    (found,) = megatron_ranks.run(runs.inspect, text_checkpoint, _modules, {}, world_size=1, timeout=150)
    assert [origin for origin, _, _ in found if origin.startswith("transformers")] == []
    assert {name for _, kind, name in found if kind.startswith("Wrapped") or "LayerNorm" in kind} == set()
    in_layer = {"q_layernorm", "k_layernorm", "hc_norm", "norm_key", "norm_query", "norm_conv", "out_norm"}
    assert {name.rsplit(".", 1)[-1] for _, kind, name in found if kind.endswith("RMSNorm")} == in_layer


def _modules(built: runs.Built) -> list[tuple[str, str, str]]:
    return [(type(module).__module__, type(module).__name__, name) for name, module in built.model.named_modules()]


def test_pitfall_19_indexer_and_table_are_in_no_optimizer_group(megatron_ranks, text_checkpoint):
    run = megatron_ranks.run(runs.inspect, text_checkpoint, _optimized, {}, world_size=2, timeout=150)
    for optimized, frozen, stored in run:
        assert frozen == {
            f"decoder.layers.3.self_attention.indexer.{name}.weight"
            for name in ("index_qk_proj", "q_layernorm", "k_layernorm")
        }
        assert optimized
        assert not optimized & frozen
        assert [name for name in stored if "ngram_embedding" in name or "table" in name] == []


def _optimized(built: runs.Built) -> tuple[set[str], set[str], list[str]]:
    """Names in the optimizer's groups, names without a gradient, and all names of the state dict."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="adam", lr=1e-4, bf16=False, params_dtype=torch.float32)
    names = {parameter: name for name, parameter in built.model.named_parameters()}
    chunk = DistributedDataParallel(built.provider, DistributedDataParallelConfig(), built.model)
    optimizer = get_megatron_optimizer(config, [chunk])
    optimized = {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
    frozen = {name for parameter, name in names.items() if not parameter.requires_grad}
    return optimized, frozen, list(built.model.state_dict())


def test_distributed_checkpoint_is_whole_and_the_same_at_every_ep(megatron_ranks, text_checkpoint):
    """So that one EP size loads what another has saved; and the frozen table is not in it."""
    (one,) = megatron_ranks.run(runs.inspect, text_checkpoint, _sharding, {}, world_size=1, timeout=150)
    for three in megatron_ranks.run(runs.inspect, text_checkpoint, _sharding, {}, world_size=3, timeout=150):
        assert three == one
    assert [key for key in one if "ngram_embedding" in key] == []
    assert one["decoder.layers.1.ple.layer_multipliers"] == (torch.int64, (3,))


def _sharding(built: runs.Built) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Every tensor of a distributed checkpoint, with its global shape; its shards cover it exactly once."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

    sharded = built.model.sharded_state_dict()
    apply_factories(sharded)
    _, global_metadata = determine_global_metadata(sharded)
    validate_sharding_integrity(global_metadata)
    shards = [shard for rank in global_metadata for shard in rank if isinstance(shard, ShardedTensor)]
    assert {shard.key for shard in nested_values(sharded) if isinstance(shard, ShardedTensor)} <= {
        shard.key for shard in shards
    }
    return {shard.key: (shard.dtype, tuple(shard.global_shape)) for shard in shards}


def test_pitfall_24_bf16_keeps_hash_constants_and_rotary_frequencies(megatron_ranks, text_checkpoint):
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    (plain,) = megatron_ranks.run(runs.inspect, text_checkpoint, _constants, {}, world_size=1, timeout=150)
    (half,) = megatron_ranks.run(runs.inspect, text_checkpoint, _constants, bf16, world_size=1, timeout=150)
    frequencies = 1e7 ** -(torch.arange(0, 8, 2) / 8)  # 8 rotated of 32 dimensions
    for constants in (plain, half):
        torch.testing.assert_close(constants["inv_freq"], frequencies, rtol=1e-6, atol=0)
        assert constants["layer_multipliers"].dtype == torch.int64
        assert torch.equal(constants["layer_multipliers"], plain["layer_multipliers"])
    assert half["dtypes"] == {torch.bfloat16}


def _constants(built: runs.Built) -> dict:
    from megatron.core.utils import unwrap_model

    model = unwrap_model(built.model)
    return {
        "inv_freq": model.rotary_pos_emb.inv_freq,
        "layer_multipliers": model.decoder.layers[1].ple.layer_multipliers,
        "dtypes": {parameter.dtype for parameter in model.parameters()},
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2 is not supported"),
        ({"context_parallel_size": 2}, "context_parallel_size=2 is not supported"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2 is not supported"),
        ({"should_pad_vocab": True}, "should_pad_vocab is not supported"),
        ({"ple_layer_ids": (2, 3)}, "names 2 layers"),
        ({"linear_attention_freq": [1, 1, 1]}, "lists 3 layer kinds for num_layers=4"),
        ({"qsa_attention": "fast"}, "qsa_attention='fast' is not known: choose chunked, flex"),
        ({"ple_checkpoint": ""}, "ple_checkpoint is empty"),
    ],
)
def test_unsupported_layouts_are_refused(megatron_ranks, text_checkpoint, overrides, message):
    with pytest.raises(RankError, match=message):
        megatron_ranks.run(_provide, text_checkpoint, overrides, world_size=1, timeout=150)


def _provide(rank: int, world_size: int, checkpoint: Path, overrides: dict) -> None:
    provider = runs.build(checkpoint).provider
    for name, value in overrides.items():
        setattr(provider, name, value)
    provider.provide()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("short bounds", "cu_seqlens runs from 0 to 8 but the packed row has 9 tokens"),
        ("two packed rows", "A packed micro-batch must be one row in thd format, got 2 rows"),
        ("hole", "Row 1 of the attention mask has padding between its 3 tokens"),
        ("square mask", r"The attention mask has shape \[1, 1, 4, 4\]"),
    ],
)
def test_input_that_is_not_documents_is_refused(megatron_ranks, text_checkpoint, case, message):
    with pytest.raises(RankError, match=message):
        megatron_ranks.run(_forward, text_checkpoint, case, world_size=1, timeout=150)


def _forward(rank: int, world_size: int, checkpoint: Path, case: str) -> None:
    model = runs.build(checkpoint).model
    hole = torch.tensor([[False] * 4, [False, True, False, False]])[:, None, None]
    ids, mask, packing = {
        "short bounds": (torch.ones(1, 9), None, runs.packing([[0] * 8])),
        "two packed rows": (torch.ones(2, 4), None, runs.packing([[0] * 8])),
        "hole": (torch.ones(2, 4), hole, None),
        "square mask": (torch.ones(1, 4), torch.zeros(1, 1, 4, 4, dtype=torch.bool), None),
    }[case]
    model(ids.long(), None, mask, packed_seq_params=packing)
