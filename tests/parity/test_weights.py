"""Weights in and out: every tensor accounted for, bit for bit, or an error that names it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_qwen38.ple import RankFailure
from tests.parity import megatron_runs as runs
from tests.ranks import RankError

LAYOUTS = ["text_checkpoint", "released_checkpoint"]
A_LOG = "layers.2.linear_attn.A_log"


def not_exported(name: str) -> bool:
    """Written out, not taken from the code under test."""
    return "ngram_embedding.shard_" in name or name.startswith(("mtp.", "model.visual."))


@pytest.mark.parametrize("ep", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_is_the_checkpoint_bit_for_bit(megatron_ranks, request, layout, ep):
    folder = request.getfixturevalue(layout)
    stored = load_file(folder / "model.safetensors")
    wanted = {name: tensor for name, tensor in stored.items() if not not_exported(name)}
    for exported in megatron_ranks.run(runs.round_trip, folder, world_size=ep, timeout=150):
        assert exported.keys() == wanted.keys()
        unequal = [name for name, tensor in wanted.items() if not _same_bits(exported[name], tensor)]
        assert unequal == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_tensor_stops_the_load_by_name(megatron_ranks, request, tmp_path, layout):
    def lose(tensors: dict) -> None:
        del tensors[_name_of(tensors, A_LOG)]

    message = _load_error(megatron_ranks, request.getfixturevalue(layout), tmp_path, lose, world_size=2)
    assert re.search(rf"tensors missing from the checkpoint: \S*{A_LOG}", message)


def test_an_unknown_tensor_stops_the_load_by_name(megatron_ranks, text_checkpoint, tmp_path):
    def add(tensors: dict) -> None:
        tensors["model.layers.0.input_layernorm.weight"] = torch.ones(64)

    message = _load_error(megatron_ranks, text_checkpoint, tmp_path, add)
    assert "unknown tensors in the checkpoint: model.layers.0.input_layernorm.weight" in message


def test_a_missing_expert_of_another_rank_stops_the_load_by_name(megatron_ranks, text_checkpoint, tmp_path):
    lost = "model.layers.3.mlp.experts.5.up_proj.weight"
    message = _load_error(megatron_ranks, text_checkpoint, tmp_path, lambda tensors: tensors.pop(lost), world_size=2)
    assert f"rank 0: the checkpoint {tmp_path} and the model do not match: tensors missing" in message
    assert lost in message


@pytest.mark.parametrize("buffer", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_pitfall_2_other_hash_constants_stop_the_load(megatron_ranks, released_checkpoint, tmp_path, buffer):
    def pad_the_vocabulary(tensors: dict) -> None:
        tensors[_name_of(tensors, f"layers.1.ple.ple_embedding.{buffer}")] += 2

    message = _load_error(megatron_ranks, released_checkpoint, tmp_path, pad_the_vocabulary)
    assert buffer in message


def test_hash_constants_are_compared_after_the_load_too(megatron_ranks, text_checkpoint):
    """The table's check reads the folder of the table; the weights may come from another."""
    with pytest.raises(RankError, match="layer_multipliers"):
        megatron_ranks.run(runs.inspect, text_checkpoint, _load_with_other_buffers, {}, world_size=1, timeout=150)


def test_a_parameter_without_a_mapping_stops_the_export_by_name(megatron_ranks, text_checkpoint):
    with pytest.raises(RankError, match=r"parameters without a mapping: decoder\.layers\.0\.stray"):
        megatron_ranks.run(runs.inspect, text_checkpoint, _export_with_a_stray_parameter, {}, world_size=1, timeout=150)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output_gate_type", None),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("norm_topk_prob", False),
        ("attention_dropout", 0.1),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused_by_name(megatron_ranks, text_checkpoint, tmp_path, key, value):
    _copy_of(text_checkpoint, tmp_path, config={key: value})
    with pytest.raises(RankError, match=f"{key}={value!r}"):
        megatron_ranks.run(runs.round_trip, tmp_path, world_size=1, timeout=150)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_127.weight", True),
        ("model.layers.1.ple.ple_embedding.ngram_embedding.weight", True),
        ("model.layers.1.ple.ple_embedding.ngram_embedding.weight_scale", True),
        ("model.layers.1.ple.ple_embedding.layer_multipliers", True),
        ("mtp.layers.0.mlp.gate.weight", True),
        ("model.visual.pos_embed.weight", True),
        ("model.layers.1.ple.key_proj.weight", False),
        ("model.language_model.layers.3.self_attn.indexer.index_qk_proj.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_frozen_names(megatron_ranks, name, frozen):
    assert megatron_ranks.run(_is_frozen, name, world_size=1, timeout=150) == [frozen]


def test_registration_is_idempotent_and_undone(megatron_ranks):
    assert megatron_ranks.run(_register_twice_and_undo, world_size=1, timeout=150) == [
        ([False, False], [True, True], [False, False])
    ]


def _is_frozen(rank: int, world_size: int, name: str) -> bool:
    from skyrl_qwen38.qwen4_exp.bridge import is_frozen_hf_name

    return is_frozen_hf_name(name)


def _register_twice_and_undo(rank: int, world_size: int) -> tuple[list[bool], ...]:
    from megatron.bridge import AutoBridge

    from skyrl_qwen38.qwen4_exp import bridge

    def listed() -> list[bool]:
        supported = AutoBridge.list_supported_models()
        return [name in supported for name in ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")]

    bridge.unregister_bridges()  # earlier runs in this process registered them
    before = listed()
    bridge.register_bridges()
    bridge.register_bridges()
    during = listed()
    bridge.unregister_bridges()
    return before, during, listed()


def _load_with_other_buffers(built: runs.Built) -> None:
    built.provider.ngram_seed += 1
    built.bridge.load_hf_weights(built.chunks)


def _export_with_a_stray_parameter(built: runs.Built) -> None:
    built.model.decoder.layers[0].stray = torch.nn.Parameter(torch.zeros(1))
    list(runs.export(built))


def _load_error(
    ranks, checkpoint: Path, folder: Path, change: Callable[[dict[str, Tensor]], object], world_size: int = 1
) -> str:
    """The messages of all ranks that load a copy of the checkpoint with its tensors changed. All must fail."""
    _copy_of(checkpoint, folder, change)
    with pytest.raises(RankError) as failed:
        ranks.run(runs.round_trip, folder, world_size=world_size, timeout=150)
    assert [type(error) for error in failed.value.errors.values()] == [RankFailure] * world_size
    return " ".join(map(str, failed.value.errors.values()))


def _copy_of(
    checkpoint: Path,
    folder: Path,
    change: Callable[[dict[str, Tensor]], object] | None = None,
    config: dict | None = None,
) -> None:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    if change is not None:
        tensors = load_file(checkpoint / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        settings = json.loads((checkpoint / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(settings))


def _name_of(tensors: dict, suffix: str) -> str:
    (name,) = (name for name in tensors if name.endswith(suffix))
    return name


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
