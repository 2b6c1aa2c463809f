"""The settings `trainer.qwen38.*` on SkyRL's configuration classes, and what is refused before a worker starts.

`parse_args(argv)` is the one way in: it parses, sets what follows from other settings, checks, and raises `ConfigError`
with one sentence where something is wrong.

This module must not postpone the evaluation of annotations (`from __future__ import annotations`): SkyRL decides from
`dataclasses.Field.type` whether a value is a nested group; from a string it cannot tell, leaves the group a dictionary,
and accepts any key below it.
"""

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from skyrl.train.config import SkyRLTrainConfig, TrainerConfig
from skyrl.train.config.config import BaseConfig, overrides_dict_to_dotlist

from skyrl_qwen38 import megatron_source, model_folder, resume
from skyrl_qwen38.overrides import ConfigError, Range, check_keys, check_values, nearest
from skyrl_qwen38.patching import PATCHES_VARIABLE, patch_flags_from_environment, patch_flags_to_text

__all__ = [
    "DEVICE_VARIABLE",
    "MASTER_PORT_VARIABLE",
    "PATCHES_VARIABLE",
    "Config",
    "ConfigError",
    "Qwen38Config",
    "export_environment",
    "parse_args",
    "patch_flags_from_environment",
]

DEVICE_VARIABLE = "SKYRL_QWEN38_DEVICE"
MASTER_PORT_VARIABLE = "SKYRL_QWEN38_MASTER_PORT"


@dataclass
class PatchFlags(BaseConfig):
    """One switch a patch; `patches/README.md` says what each does and when it can go."""

    qwen4_exp_bridge: bool = True
    ple_row_shard: bool = True
    bridge_peft_names: bool = True


@dataclass
class PleConfig(BaseConfig):
    """The n-gram table (PLE) of the model."""

    storage: Literal["auto", "pinned", "mapped", "node"] = "auto"
    """Where the rows are: `pinned` in a rank's page-locked memory, `mapped` in the checkpoint's files, `node` all of
    them once a node, which needs no exchange; `auto` is `pinned` where that fits every node, else `mapped`."""


@dataclass
class Qwen38Config(BaseConfig):
    """`trainer.qwen38.*`."""

    device: Literal["cuda", "cpu"] = "cuda"
    """`cpu` trains over gloo and generates with Transformers: for a machine without a GPU."""
    max_logprob_abs_diff: float = 0.01
    """The run stops when the mean over a step's tokens of |training log-prob - rollout log-prob| exceeds this. The two
    differ by rounding only; more means that the trainer and the engine no longer compute the same model. The default
    suits bf16 on the tiny model; fp32 reaches 1e-7, so fp32 recipes set 1e-5."""
    distributed_timeout_minutes: int = 10
    """A collective of the model-parallel groups that takes longer stops the run; SkyRL leaves Megatron's 30 minutes."""
    run_dir: str = "outputs/run"
    """Folder that gets `metrics.jsonl`, `summary.json` and the plot."""
    patches: PatchFlags = field(default_factory=PatchFlags)
    ple: PleConfig = field(default_factory=PleConfig)


@dataclass
class Qwen38TrainerConfig(TrainerConfig):
    qwen38: Qwen38Config = field(default_factory=Qwen38Config)


@dataclass
class Config(SkyRLTrainConfig):
    """SkyRL's configuration with `trainer.qwen38` in it."""

    trainer: Qwen38TrainerConfig = field(default_factory=Qwen38TrainerConfig)

    @classmethod
    def from_cli_overrides(cls, args: Sequence[str] | dict[str, Any]) -> "Config":
        """Parse `key.path=value` arguments, as SkyRL does, with types, ranges and key names checked.

        Raises:
            ConfigError: a key does not exist, or a value is of the wrong type or out of range.
        """
        args = overrides_dict_to_dotlist(args) if isinstance(args, dict) else list(args)
        values = _parse(args)
        check_values(cls, values, RANGES, DOCUMENTED_TYPES)
        try:
            config = super().from_cli_overrides(args)
        except (ValueError, AssertionError, TypeError, OmegaConfBaseException) as error:
            # A wrong key is answered with every right one of its level; ours names the nearest. It is asked second,
            # because keys that SkyRL renamed or removed are unknown to the classes and known to its parser.
            if "Invalid fields" in str(error):
                check_keys(cls, values)
            raise ConfigError(_one_line(error)) from error
        if values.get("trainer", {}).get("bf16") is False:
            _follow_fp32(config, values)
        return config


DOCUMENTED_TYPES: Mapping[str, Any] = {
    f"trainer.{role}.model.lora.{name}": str | list[str] | None
    for role in ("policy", "critic", "ref")
    for name in ("target_modules", "exclude_modules")
}
"""Settings for which SkyRL documents more than it annotates."""

RANGES: tuple[Range, ...] = (
    Range("trainer.qwen38.max_logprob_abs_diff", 0, low_open=True),
    Range("trainer.qwen38.distributed_timeout_minutes", 1),
    *(
        Range(pattern, 1)
        for pattern in (
            "trainer.*parallel_size",
            "generator.*parallel_size",
            "trainer.placement.*_num_nodes",
            "trainer.placement.*_num_gpus_per_node",
            "trainer.*batch_size",
            "trainer.*batch_size_per_gpu",
            "trainer.epochs",
            "trainer.max_training_steps",
            "trainer.update_epochs_per_batch",
            "trainer.max_prompt_length",
            "generator.max_input_length",
            "generator.max_turns",
            "generator.*n_samples_per_prompt",
            "generator.*.max_generate_length",
            "generator.inference_engine.num_engines",
            "generator.inference_engine.max_num_seqs",
            "generator.inference_engine.max_num_batched_tokens",
        )
    ),
    *(
        Range(pattern, 0)
        for pattern in (
            "trainer.seed",
            "trainer.*.lr",
            "trainer.*.weight_decay",
            "trainer.*.max_grad_norm",
            "trainer.*.num_warmup_steps",
            "trainer.*.lora.rank",
            "trainer.*_coef",
            "trainer.algorithm.eps_clip_*",
            "*.temperature",
        )
    ),
    *(
        Range(pattern, 0, 1)
        for pattern in (
            "trainer.*.adam_betas",
            "trainer.*.dropout",
            "trainer.algorithm.gamma",
            "trainer.algorithm.lambd",
        )
    ),
    Range("generator.*.min_p", 0, 1),
    Range("generator.*.top_p", 0, 1, low_open=True),
    Range("generator.inference_engine.gpu_memory_utilization", 0, 1, low_open=True),
)
"""Numbers for which a value outside would fail late or train nonsense; SkyRL checks some of them, in a worker."""


def parse_args(argv: Sequence[str]) -> Config:
    """The checked configuration from a command line, without the program's name.

    `trainer.override_entrypoint`, which is how SkyRL reached this project and which is no setting, is taken off first.
    The model's folder is read as data, and a folder to resume from is checked.

    Raises:
        ConfigError: one sentence on what is wrong.
    """
    config = Config.from_cli_overrides([arg for arg in argv if not arg.startswith("trainer.override_entrypoint=")])
    validate(config)
    return config


def validate(config: Config) -> None:
    """Check what one value alone cannot show: combinations, the model's folder, the folder to resume from.

    Raises:
        ConfigError: on the first thing that is wrong.
    """
    trainer = config.trainer
    if trainer.strategy != "megatron":
        raise ConfigError(f"trainer.strategy={trainer.strategy} cannot train qwen4_exp; set trainer.strategy=megatron")
    if not trainer.policy.model.path:
        raise ConfigError(
            "trainer.policy.model.path is not set; give the folder or the hub id of a qwen4_exp checkpoint"
        )
    model = model_folder.open_model(trainer.policy.model.path)
    uses_reference = trainer.algorithm.use_kl_loss or trainer.algorithm.use_kl_in_reward
    for role in ("policy", "ref") if uses_reference else ("policy",):
        _check_parallelism(config, role, model)
        megatron = getattr(trainer, role).megatron_config
        prefix = f"trainer.{role}.megatron_config"
        _check_free_keys(f"{prefix}.transformer_config_kwargs", megatron.transformer_config_kwargs, "provider")
        _check_free_keys(f"{prefix}.optimizer_config_kwargs", megatron.optimizer_config_kwargs, "optimizer")
    _check_patches(trainer.qwen38.patches)
    if trainer.qwen38.device == "cpu":
        _check_cpu(config, uses_reference)
    resume.check_resume(trainer.resume_mode, trainer.ckpt_path, trainer.resume_path)
    _check_with_skyrl(config)


def export_environment(config: Config) -> None:
    """Set the variables that Ray's workers read before they have the configuration: SkyRL forwards `SKYRL_*` only.

    Raises:
        ConfigError: MASTER_PORT is set and is no port.
    """
    os.environ[DEVICE_VARIABLE] = config.trainer.qwen38.device
    os.environ[PATCHES_VARIABLE] = patch_flags_to_text(asdict(config.trainer.qwen38.patches))
    if port := os.environ.get("MASTER_PORT"):
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"MASTER_PORT={port} is no port; set a number from 1 to 65535, or unset it")
        os.environ[MASTER_PORT_VARIABLE] = port


def _parse(args: Sequence[str]) -> dict[str, Any]:
    for arg in args:
        key, equals, _ = arg.partition("=")
        if not equals or not key or key.startswith("-"):
            raise ConfigError(f"{arg!r} is not a setting; write key.path=value, for example trainer.seed=1")
        if key.startswith("+"):
            raise ConfigError(f"{arg!r} adds a key, and the settings are fixed; leave out the +")
    try:
        return OmegaConf.to_container(OmegaConf.from_cli(list(args)), resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the settings cannot be parsed: {_one_line(error)}") from error
    except Exception as error:  # a YAML error, whose class OmegaConf does not export
        raise ConfigError(f"a value is not well-formed YAML: {_one_line(error)}") from error


def _follow_fp32(config: Config, given: Mapping[str, Any]) -> None:
    """With `trainer.bf16=false` also train and send fp32, which in SkyRL does not follow.

    Raises:
        ConfigError: one of the three settings was given and says otherwise.
    """
    kwargs = config.trainer.policy.megatron_config.optimizer_config_kwargs
    prefix = "trainer.policy.megatron_config.optimizer_config_kwargs"
    engine = config.generator.inference_engine
    engine_given = given.get("generator", {}).get("inference_engine", {})
    for path, value, allowed in (
        (f"{prefix}.bf16", kwargs.setdefault("bf16", False), (False,)),
        (f"{prefix}.params_dtype", kwargs.setdefault("params_dtype", "fp32"), ("fp32", "float32", "float")),
        ("generator.inference_engine.model_dtype", engine_given.get("model_dtype", "float32"), ("float32",)),
    ):
        if value not in allowed:
            raise ConfigError(
                f"trainer.bf16=false trains in fp32, but {path}={_text(value)}; leave that out or set it to "
                f"{_text(allowed[0])}"
            )
    engine.model_dtype = "float32"


def _check_parallelism(config: Config, role: str, model: model_folder.ModelFacts) -> None:
    placement = config.trainer.placement
    megatron = getattr(config.trainer, role).megatron_config
    prefix = f"trainer.{role}.megatron_config"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_tensor_parallel_size",
    ):
        if (size := getattr(megatron, name) or 1) > 1:
            raise ConfigError(f"{prefix}.{name}={size} is not supported yet for qwen4_exp; set it to 1")
    nodes, gpus = getattr(placement, f"{role}_num_nodes"), getattr(placement, f"{role}_num_gpus_per_node")
    expert = megatron.expert_model_parallel_size
    setting = f"{prefix}.expert_model_parallel_size={expert}"
    if nodes * gpus % expert:
        raise ConfigError(
            f"{setting} does not divide the {nodes * gpus} {role} workers (trainer.placement.{role}_num_nodes={nodes} "
            f"times {role}_num_gpus_per_node={gpus}); choose an EP size that does"
        )
    if model.num_experts % expert:
        raise ConfigError(
            f"{setting} does not divide the {model.num_experts} experts of {model.path}; choose an EP size that does"
        )
    if not config.trainer.qwen38.patches.ple_row_shard and model.ngram_heads % expert:
        raise ConfigError(
            f"{setting} does not divide the {model.ngram_heads} n-gram heads of {model.path}, and with "
            "trainer.qwen38.patches.ple_row_shard=false the table is split by heads; switch the patch on, or choose an "
            "EP size that does"
        )


def _check_free_keys(path: str, values: Mapping[str, Any], kind: Literal["provider", "optimizer"]) -> None:
    """Keys of the free-form places: SkyRL sets a misspelt one as a new attribute, which nothing reads."""
    known = megatron_source.provider_fields() if kind == "provider" else megatron_source.optimizer_fields()
    for key in values:
        if known and key not in known:
            near = nearest(key, sorted(known))
            raise ConfigError(
                f"{path}.{key} is no field that Megatron reads" + (f"; did you mean {near}?" if near else "")
            )


def _check_patches(flags: PatchFlags) -> None:
    """Patches without which nothing can be trained with the installed libraries."""
    for name, needed, lacking in (
        ("bridge_peft_names", megatron_source.lacks_peft_names, "two functions that SkyRL imports"),
        ("qwen4_exp_bridge", megatron_source.lacks_qwen4_exp, "a bridge for qwen4_exp"),
    ):
        if not getattr(flags, name) and needed():
            raise ConfigError(
                f"trainer.qwen38.patches.{name}=false, and the installed Megatron-Bridge lacks {lacking}; leave it on"
            )


def _check_cpu(config: Config, uses_reference: bool) -> None:
    """On a CPU, SkyRL's offload between phases frees the weights: its copy "on the CPU" is the tensor itself."""
    placement = config.trainer.placement
    if (rank := config.trainer.policy.model.lora.rank) > 0:
        raise ConfigError(
            f"trainer.policy.model.lora.rank={rank} is not supported with trainer.qwen38.device=cpu, whose rollout "
            "engine takes full weights only; set it to 0"
        )
    if config.trainer.policy.megatron_config.transformer_config_kwargs.get("qsa_attention") == "flex":
        raise ConfigError(
            "trainer.policy.megatron_config.transformer_config_kwargs.qsa_attention=flex cannot train with "
            "trainer.qwen38.device=cpu, where it has no backward pass; set it to chunked"
        )
    if placement.colocate_all:
        raise ConfigError(
            "trainer.placement.colocate_all=true needs GPUs that training and rollouts share; with "
            "trainer.qwen38.device=cpu set it to false"
        )
    if uses_reference and placement.colocate_policy_ref:
        raise ConfigError(
            "trainer.placement.colocate_policy_ref=true offloads policy and reference in turn, which destroys weights "
            "with trainer.qwen38.device=cpu; set it to false, or trainer.algorithm.use_kl_loss=false"
        )


def _check_with_skyrl(config: Config) -> None:
    """SkyRL's own checks, its assertions turned into sentences."""
    from skyrl.train.utils.utils import validate_cfg  # imports torch and ray: seconds that a wrong key need not cost

    try:
        validate_cfg(config)
    except AssertionError as error:
        failed = traceback.extract_tb(error.__traceback__)[-1].line or "an assertion"
        raise ConfigError(_one_line(error) or f"SkyRL requires {failed.removeprefix('assert ')}") from error
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
