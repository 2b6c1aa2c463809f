"""The settings `trainer.qwen38.*`, and what is refused before any worker starts."""

import dataclasses
import json
import pickle
import sys
import typing
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from skyrl_qwen38 import config as config_module
from skyrl_qwen38 import megatron_source, patches
from skyrl_qwen38.config import Config, ConfigError, PatchFlags, Qwen38Config, export_environment, parse_args
from skyrl_qwen38.overrides import check_values, leaves

MODEL = {"model_type": "qwen4_exp", "text_config": {"num_experts": 6, "heads_per_ngram": 8, "ngram_size": 3}}
MEGATRON = "trainer.policy.megatron_config"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that has everything the configuration looks at."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_file({"model.embed_tokens.weight": torch.zeros(4, 2)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def argv(model: Path, tmp_path: Path) -> list[str]:
    """What the CPU recipe passes, as far as it is checked: three workers, EP=3, fp32."""
    return [
        "trainer.override_entrypoint=skyrl_qwen38.entrypoints.grpo",
        "trainer.strategy=megatron",
        f"trainer.policy.model.path={model}",
        "trainer.logger=console",
        f"trainer.ckpt_path={tmp_path}/checkpoints",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.placement.colocate_all=false",
        "trainer.placement.policy_num_gpus_per_node=3",
        f"{MEGATRON}.expert_model_parallel_size=3",
        "trainer.bf16=false",
        "trainer.qwen38.device=cpu",
        "trainer.train_batch_size=18",
        "trainer.policy_mini_batch_size=18",
        "trainer.micro_train_batch_size_per_gpu=30",
    ]


def refused(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_args(argv)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_the_recipe_parses_into_typed_settings(argv):
    config = parse_args([*argv, "trainer.qwen38.max_logprob_abs_diff=1e-5", "trainer.qwen38.ple.storage=pinned"])
    assert isinstance(config, Config)
    assert isinstance(config.trainer.qwen38, Qwen38Config)
    assert isinstance(config.trainer.qwen38.patches, PatchFlags)
    assert config.trainer.qwen38.device == "cpu"
    assert config.trainer.qwen38.max_logprob_abs_diff == 1e-5
    assert config.trainer.qwen38.ple.storage == "pinned"
    assert pickle.loads(pickle.dumps(config)) == config  # Ray sends it to the workers


def test_defaults():
    settings = Config.from_cli_overrides([]).trainer.qwen38
    assert settings.device == "cuda"
    assert settings.max_logprob_abs_diff == 0.01
    assert all(dataclasses.asdict(settings.patches).values())
    assert settings.ple.storage == "auto"


def test_every_patch_has_a_flag_and_every_flag_a_patch():
    assert {f.name for f in dataclasses.fields(PatchFlags)} == {patch.name for patch in patches.ALL_PATCHES}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        # keys: the nearest is suggested, at any depth
        (
            "trainer.polcy.model.path=x",
            "trainer.polcy.model.path is not a setting; did you mean trainer.policy.model.path",
        ),
        ("trainer.qwen38.pathces.ple_row_shard=true", "did you mean trainer.qwen38.patches.ple_row_shard?"),
        ("trainer.qwen38.patches.ple_row_shards=true", "did you mean trainer.qwen38.patches.ple_row_shard?"),
        ("trainer.qwen38.dvice=cpu", "trainer.qwen38.dvice is not a setting; did you mean trainer.qwen38.device?"),
        ("trainer.lr=1e-6", "did you mean trainer.policy.optimizer_config.lr?"),
        ("generator.temperature=1", "did you mean generator.sampling_params.temperature?"),
        ("modle=x", "modle is not a setting"),
        ("+trainer.new=1", "the settings are fixed; leave out the +"),
        ("train", "'train' is not a setting; write key.path=value"),
        ("--help", "'--help' is not a setting; write key.path=value"),
        # types and ranges of our own settings
        ("trainer.qwen38.device=gpu", "trainer.qwen38.device must be cuda or cpu, not the text 'gpu'"),
        ("trainer.qwen38.max_logprob_abs_diff=0", "trainer.qwen38.max_logprob_abs_diff must be above 0, not 0"),
        ("trainer.qwen38.max_logprob_abs_diff=small", "max_logprob_abs_diff must be a number, not the text 'small'"),
        ("trainer.qwen38.patches.ple_row_shard=1", "patches.ple_row_shard must be true or false, not 1"),
        ("trainer.qwen38.patches=true", "trainer.qwen38.patches must be a group of settings, not true"),
        (
            "trainer.qwen38.ple.storage=disk",
            "trainer.qwen38.ple.storage must be auto or pinned or mapped or node, not the text 'disk'",
        ),
        # and of SkyRL's, whose parser lets them through
        ("trainer.seed=abc", "trainer.seed must be a whole number, not the text 'abc'"),
        ("trainer.bf16=1", "trainer.bf16 must be true or false, not 1"),
        ("trainer.train_batch_size=0", "trainer.train_batch_size must be at least 1, not 0"),
        (
            "trainer.policy.optimizer_config.lr=-1e-6",
            "trainer.policy.optimizer_config.lr must be at least 0, not -1e-06",
        ),
        (
            "trainer.policy.optimizer_config.adam_betas=[0.9,1.5]",
            "adam_betas must be at least 0 and at most 1, not 1.5",
        ),
        ("generator.sampling_params.top_p=0", "generator.sampling_params.top_p must be above 0 and at most 1, not 0"),
        ("data.train_data=train.jsonl", "data.train_data must be a list, each element text"),
        ("trainer.policy.model.path=[", "not well-formed YAML"),
        ("trainer.run_name=${nothing}", "the settings cannot be parsed"),
        # what SkyRL itself refuses while it builds the configuration
        ("generator.inference_engine.async_engine=false", "`async_engine=False` is no longer supported"),
        ("data.dataloader.num_workers=-1", "data.dataloader.num_workers must be None or >= 0, got -1."),
        # combinations
        ("trainer.strategy=fsdp", "trainer.strategy=fsdp cannot train qwen4_exp; set trainer.strategy=megatron"),
        (f"{MEGATRON}.tensor_model_parallel_size=3", "tensor_model_parallel_size=3 is not supported yet"),
        (f"{MEGATRON}.pipeline_model_parallel_size=3", "pipeline_model_parallel_size=3 is not supported yet"),
        (f"{MEGATRON}.context_parallel_size=3", "context_parallel_size=3 is not supported yet"),
        (f"{MEGATRON}.expert_tensor_parallel_size=3", "expert_tensor_parallel_size=3 is not supported yet"),
        (
            f"{MEGATRON}.expert_model_parallel_size=2",
            "expert_model_parallel_size=2 does not divide the 3 policy workers",
        ),
        (
            "trainer.qwen38.patches.ple_row_shard=false",
            "expert_model_parallel_size=3 does not divide the 16 n-gram heads",
        ),
        ("trainer.qwen38.patches.bridge_peft_names=false", "lacks two functions that SkyRL imports; leave it on"),
        ("trainer.qwen38.patches.qwen4_exp_bridge=false", "lacks a bridge for qwen4_exp; leave it on"),
        (f"{MEGATRON}.transformer_config_kwargs.attention_backnd=flash", "did you mean attention_backend?"),
        (f"{MEGATRON}.transformer_config_kwargs.qsa_attention=flex", "has no backward pass; set it to chunked"),
        (f"{MEGATRON}.optimizer_config_kwargs.adam_epss=1e-8", "did you mean adam_eps?"),
        (
            "trainer.policy.model.lora.rank=8",
            "lora.rank=8 is not supported with trainer.qwen38.device=cpu",
        ),
        ("trainer.placement.colocate_all=true", "with trainer.qwen38.device=cpu set it to false"),
        ("trainer.algorithm.use_kl_loss=true", "trainer.placement.colocate_policy_ref=true offloads"),
        (f"{MEGATRON}.optimizer_config_kwargs.bf16=true", "trainer.bf16=false trains in fp32, but"),
        (f"{MEGATRON}.optimizer_config_kwargs.params_dtype=bf16", "leave that out or set it to fp32"),
        ("generator.inference_engine.model_dtype=bfloat16", "leave that out or set it to float32"),
        ("trainer.resume_mode=lateast", "trainer.resume_mode=lateast must be one of none, latest, from_path"),
        ("trainer.policy.model.path=null", "trainer.policy.model.path is not set"),
        ("trainer.policy.model.path=/nowhere", "trainer.policy.model.path=/nowhere is not a folder"),
        # SkyRL's own validation, also where its assertion says nothing
        (
            "trainer.train_batch_size=17",
            "SkyRL requires cfg.trainer.train_batch_size >= cfg.trainer.policy_mini_batch_size",
        ),
        ("trainer.policy_mini_batch_size=7", "train_batch_size 18 should be divisible by policy_mini_batch_size 7"),
    ],
)
def test_a_wrong_setting_is_one_clear_sentence(argv, override, sentence):
    assert sentence in refused([*argv, override])


@pytest.mark.parametrize(
    "override",
    [
        "generator.inference_engine.async_engine=true",  # SkyRL takes the removed key where it says what is done anyway
        "trainer.use_sample_packing=false",  # renamed
        "trainer.policy.model.lora.target_modules=[linear_qkv,linear_proj]",  # documented as a list, annotated as text
        f"{MEGATRON}.transformer_config_kwargs.attention_backend=unfused",
        f"{MEGATRON}.transformer_config_kwargs.qsa_attention=chunked",
        f"{MEGATRON}.optimizer_config_kwargs.params_dtype=float32",
        "generator.inference_engine.engine_init_kwargs.anything=1",
        "trainer.policy.optimizer_config.lr=3e-3",
        "trainer.policy.optimizer_config.lr=1",
        "generator.inference_engine.model_dtype=float32",
    ],
)
def test_a_right_setting_passes(argv, override):
    parse_args([*argv, override])


def test_a_dictionary_of_overrides_is_checked_too():
    with pytest.raises(ConfigError, match=r"trainer\.seed must be a whole number"):
        Config.from_cli_overrides({"trainer.seed": "abc"})
    assert Config.from_cli_overrides({"trainer.run_name": "12"}).trainer.run_name == "12"


@pytest.mark.parametrize(
    ("kwargs", "ep", "heads_divide"),
    [({"gpus": 2}, 2, True), ({"gpus": 6}, 6, False), ({"gpus": 6, "nodes": 2}, 2, True)],
)
def test_head_split_runs_where_ep_divides_the_heads(argv, kwargs, ep, heads_divide):
    layout = [
        f"trainer.placement.policy_num_gpus_per_node={kwargs['gpus']}",
        f"trainer.placement.policy_num_nodes={kwargs.get('nodes', 1)}",
        f"{MEGATRON}.expert_model_parallel_size={ep}",
        "trainer.micro_train_batch_size_per_gpu=1",
        "trainer.train_batch_size=24",
        "trainer.policy_mini_batch_size=24",
        "trainer.qwen38.patches.ple_row_shard=false",
    ]
    if heads_divide:
        parse_args([*argv, *layout])
    else:
        assert "the table is split by heads; switch the patch on" in refused([*argv, *layout])


def test_ep_must_divide_the_experts(argv, model):
    (model / "config.json").write_text(json.dumps({**MODEL, "text_config": {**MODEL["text_config"], "num_experts": 8}}))
    assert "expert_model_parallel_size=3 does not divide the 8 experts" in refused(argv)


def test_fp32_is_followed_by_optimizer_and_engine(argv):
    config = parse_args(argv)
    kwargs = config.trainer.policy.megatron_config.optimizer_config_kwargs
    assert (kwargs["bf16"], kwargs["params_dtype"]) == (False, "fp32")
    assert config.generator.inference_engine.model_dtype == "float32"


def test_bf16_is_left_alone(argv):
    config = parse_args([*argv, "trainer.bf16=true"])
    assert "bf16" not in config.trainer.policy.megatron_config.optimizer_config_kwargs
    assert config.generator.inference_engine.model_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a model configuration"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3_moe"}'),
            "config.json says model_type 'qwen3_moe', and only qwen4_exp can be trained here",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps(MODEL | {"text_config": {"num_experts": "6"}})
            ),
            "config.json has num_experts='6', which must be a whole number",
        ),
        (
            lambda folder: (folder / "config.json").write_text(json.dumps(MODEL | {"auto_map": {"A": "b.C"}})),
            "auto_map",
        ),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text('{"auto_map": {"A": ["b.C", null]}}'),
            "auto_map",
        ),
        (lambda folder: (folder / "modeling_x.py").write_text("boom"), "modeling_x.py"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1]),
            "model.safetensors",
        ),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_refused(argv, model, damage, sentence):
    damage(model)
    assert sentence in refused(argv)


def test_a_hub_id_that_cannot_be_had_is_refused(argv, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("outgoing traffic has been disabled\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert "neither a folder here nor a repository that the hub gives" in refused(
        [*argv, "trainer.policy.model.path=org/model"]
    )


def test_a_hub_id_is_read_by_its_small_files(argv, model, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot(repository: str, allow_patterns: list[str]) -> str:
        asked.update(repository=repository, patterns=allow_patterns)
        return str(model)

    (model / "model.safetensors").unlink()  # weights come with the workers' download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    parse_args([*argv, "trainer.policy.model.path=org/model"])
    assert asked["repository"] == "org/model"
    assert not any("safetensors" in pattern for pattern in asked["patterns"])


def test_workers_are_told_device_patches_and_port(monkeypatch):
    for name in (config_module.DEVICE_VARIABLE, config_module.PATCHES_VARIABLE, config_module.MASTER_PORT_VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MASTER_PORT", "29511")
    export_environment(
        Config.from_cli_overrides(["trainer.qwen38.device=cpu", "trainer.qwen38.patches.ple_row_shard=false"])
    )
    from os import environ

    assert environ[config_module.DEVICE_VARIABLE] == "cpu"
    assert environ[config_module.MASTER_PORT_VARIABLE] == "29511"
    assert set(environ[config_module.PATCHES_VARIABLE].split(",")) == {
        "qwen4_exp_bridge=1",
        "ple_row_shard=0",
        "bridge_peft_names=1",
    }


@pytest.mark.parametrize("port", ["abc", "0", "70000", "-1"])
def test_a_master_port_that_is_none_is_refused(monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", port)
    for name in (config_module.DEVICE_VARIABLE, config_module.PATCHES_VARIABLE):
        monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match=f"MASTER_PORT={port} is no port"):
        export_environment(Config.from_cli_overrides([]))


def test_ranges_and_documented_types_name_settings_that_exist():
    numbers = [path for path, annotation in leaves(Config) if {int, float} & _types_in(annotation)]
    for bound in config_module.RANGES:
        assert any(fnmatchcase(path, bound.pattern) for path in numbers), bound
    assert set(config_module.DOCUMENTED_TYPES) <= {path for path, _ in leaves(Config)}


def _types_in(annotation: object) -> set[object]:
    return {annotation}.union(*map(_types_in, typing.get_args(annotation)))


def test_every_default_has_its_annotated_type_and_is_in_range():
    """Else the check would refuse a user who writes the default down."""
    values = OmegaConf.to_container(OmegaConf.create(dataclasses.asdict(Config())))
    del values["generator"]["inference_engine"][
        "delta_weight_sync"
    ]  # None by default, and no setting of it is required
    check_values(Config, values, config_module.RANGES, config_module.DOCUMENTED_TYPES)


POSTPONED = """
from __future__ import annotations
from dataclasses import dataclass, field
from skyrl.train.config import SkyRLTrainConfig, TrainerConfig
from skyrl.train.config.config import BaseConfig

@dataclass
class Mine(BaseConfig):
    size: int = 1

@dataclass
class MyTrainer(TrainerConfig):
    mine: Mine = field(default_factory=Mine)

@dataclass
class Postponed(SkyRLTrainConfig):
    trainer: MyTrainer = field(default_factory=MyTrainer)
"""


def test_annotations_are_not_postponed(monkeypatch):
    """With them SkyRL's parser takes a nested group for a dictionary and accepts any key below it."""
    from types import ModuleType

    from skyrl.train.config.config import build_nested_dataclass

    postponed = ModuleType("postponed")
    monkeypatch.setitem(sys.modules, "postponed", postponed)
    exec(POSTPONED, vars(postponed))
    trainer = build_nested_dataclass(postponed.MyTrainer, {"mine": {"no_such_key": 1}})
    assert trainer.mine == {"no_such_key": 1}

    for cls in (Config, config_module.Qwen38TrainerConfig, Qwen38Config, PatchFlags, config_module.PleConfig):
        assert not any(isinstance(f.type, str) for f in dataclasses.fields(cls)), cls
    with pytest.raises(ValueError, match="Invalid fields"):
        build_nested_dataclass(config_module.Qwen38TrainerConfig, {"qwen38": {"no_such_key": 1}})


def _dataclass_fields(rank: int, world_size: int) -> tuple[set[str], set[str]]:
    from skyrl_qwen38 import cpu

    cpu.install()
    from megatron.core.optimizer import OptimizerConfig

    from skyrl_qwen38.qwen4_exp.provider import Qwen4ExpProvider

    provider, optimizer = ({f.name for f in dataclasses.fields(cls)} for cls in (Qwen4ExpProvider, OptimizerConfig))
    return provider, optimizer


def test_megatron_field_names_are_those_of_the_classes(ranks):
    """The names read from source are the dataclasses' own; compared in a process that may import Megatron."""
    ((provider, optimizer),) = ranks.run(_dataclass_fields, world_size=1, timeout=150)
    assert megatron_source.provider_fields() == provider | {"rope_parameters"}
    assert megatron_source.optimizer_fields() == optimizer


def test_megatron_source_are_not_guessed_when_a_class_moved(monkeypatch):
    monkeypatch.setattr(megatron_source, "_OPTIMIZER_CLASSES", (("megatron", "core/optimizer/moved.py", "X"),))
    megatron_source.optimizer_fields.cache_clear()
    try:
        assert megatron_source.optimizer_fields() == frozenset()
    finally:
        megatron_source.optimizer_fields.cache_clear()
