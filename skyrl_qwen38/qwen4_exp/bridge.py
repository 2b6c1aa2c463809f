"""Hugging Face ``qwen4_exp`` checkpoints to and from Megatron-Core, through Megatron-Bridge.

Importing this module registers nothing; :func:`register_bridges` does, and :func:`unregister_bridges` undoes it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion import model_bridge
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, WeightConversionTask
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    FusedExpertMapping,
    FusedGatedExpertMapping,
    GatedMLPMapping,
    GDNConv1dMapping,
    GDNLinearMappingSeparate,
    MegatronParamMapping,
    QKVMapping,
    ReplicatedMapping,
)
from megatron.bridge.models.conversion.utils import moe_experts_stored_packed
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.utils import unwrap_model

from skyrl_qwen38.ple.agreement import agree
from skyrl_qwen38.qwen4_exp.ple_layer import HASH_BUFFERS
from skyrl_qwen38.qwen4_exp.provider import Qwen4ExpProvider

_TABLE = re.compile(r"\.ple_embedding\.ngram_embedding\.")
_HASH_BUFFER = re.compile(rf"\.ple_embedding\.({'|'.join(HASH_BUFFERS)})$")
_UNOWNED_PREFIXES = ("mtp.", "model.visual.")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_NAMES_SHOWN = 8

# What the code computes, by configuration key; another value would be computed wrong.
_HONOURED = {
    "hidden_act": "silu",
    "output_gate_type": "sigmoid",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "norm_topk_prob": True,
    "indexer_kv_heads": 1,
}


def is_frozen_hf_name(name: str) -> bool:
    """Whether training never changes this tensor of a Hugging Face checkpoint, so that weight sync leaves it alone.

    The n-gram table (whole or in shards), the vision tower, the MTP head, and the hash's int64 constants, which a
    sync that casts to the model's dtype would destroy.
    """
    return not _is_owned(name) or _HASH_BUFFER.search(name) is not None


def _is_owned(name: str) -> bool:
    """Whether the Megatron model holds this tensor: its bridge loads and exports it."""
    return not name.startswith(_UNOWNED_PREFIXES) and _TABLE.search(name) is None


class _Qwen4ExpBridge(MegatronModelBridge):
    """Both forms of the checkpoint; they differ in the prefix of the language model's names."""

    hf_prefix: str

    def hf_config_to_provider_kwargs(self, hf_config: Any) -> dict[str, Any]:
        return super().hf_config_to_provider_kwargs(hf_config.get_text_config())

    def provider_bridge(self, hf_pretrained: Any) -> Qwen4ExpProvider:
        """The provider for a checkpoint.

        Raises:
            ValueError: its configuration has a value that the code does not compute.
        """
        text = hf_pretrained.config.get_text_config()
        _refuse_unsupported(text)
        provider = super().provider_bridge(hf_pretrained)
        provider.ple_checkpoint = str(getattr(hf_pretrained, "model_name_or_path", ""))
        eos = text.eos_token_id
        fields = {
            "position_embedding_type": "rope",
            "rotary_base": text.rope_parameters["rope_theta"],
            "rotary_percent": text.rope_parameters.get("partial_rotary_factor", 1.0),
            "linear_attention_freq": [int(kind == "linear_attention") for kind in text.layer_types],
            "moe_shared_expert_intermediate_size": text.shared_expert_intermediate_size,
            "moe_aux_loss_coeff": 0.0,  # of pre-training; the trainer sets its own
            "mtp_num_layers": None,
            "ple_layer_ids": tuple(text.ple_layer_ids),
            "ngram_vocab_divisor": text.make_ngram_vocab_size_divisible_by,
            "ngram_seed": text.seed,
            "ngram_eos_token_id": eos[0] if isinstance(eos, list) else eos,
        }
        for name in (
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "hc_count",
            "hc_lowrank",
            "ple_embed_dim",
            "ple_conv_kernel_size",
            "ngram_size",
            "heads_per_ngram",
            "ngram_vocab_size_base",
            "indexer_n_heads",
            "indexer_head_dim",
            "indexer_budget",
            "indexer_compress_ratio",
        ):
            fields[name] = getattr(text, name)
        for name, value in fields.items():
            setattr(provider, name, value)
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        packed = moe_experts_stored_packed(self.hf_pretrained, self.hf_prefix + "layers.")
        return MegatronMappingRegistry(*_mappings(self.hf_prefix, packed))

    def build_conversion_tasks(
        self, hf_pretrained: Any, megatron_model: list[torch.nn.Module], **kwargs
    ) -> list[WeightConversionTask]:
        """One task per parameter and persistent buffer, for load and for export.

        Raises:
            RankFailure: on all ranks, because on one the tensors of the checkpoint and of the model do not correspond
                one to one. (Megatron-Bridge itself logs a warning and leaves the parameter at its random value.)
        """
        self.hf_pretrained = hf_pretrained
        agree(None, lambda: self._check_names(megatron_model))
        return super().build_conversion_tasks(hf_pretrained, megatron_model, **kwargs)

    def load_weights_hf_to_megatron(
        self, hf_pretrained: Any, megatron_model: Any, *args, **kwargs
    ) -> list[torch.nn.Module]:
        """Loads, then compares the checkpoint's hash constants with its configuration's.

        Raises:
            RankFailure: see :meth:`build_conversion_tasks`.
            ValueError: the constants differ.
        """
        loaded = super().load_weights_hf_to_megatron(hf_pretrained, megatron_model, *args, **kwargs)
        for model in unwrap_model(loaded):
            model.check_hash_buffers(model.config.hasher())
        return loaded

    def _check_names(self, megatron_model: list[torch.nn.Module]) -> None:
        registry = self.mapping_registry()
        unmapped, expected = [], set()
        num_experts = unwrap_model(megatron_model)[0].config.num_moe_experts
        for name in self._megatron_global_param_names_all_pp_ranks(megatron_model):
            mapping = registry.megatron_to_hf_lookup(self._get_lora_unwrapped_name(name))
            if mapping is None:
                unmapped.append(name)
            else:
                expected.update(_every_expert(_hf_names(mapping), num_experts))
        problems = {"parameters without a mapping": unmapped}
        source = getattr(getattr(self.hf_pretrained, "state", None), "source", None)
        if source is not None:
            present = {name for name in source.get_all_keys() if _is_owned(name)}
            problems["tensors missing from the checkpoint"] = expected - present
            problems["unknown tensors in the checkpoint"] = present - expected
        if found := "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names):
            where = getattr(self.hf_pretrained, "model_name_or_path", "this configuration")
            raise ValueError(f"the checkpoint {where} and the model do not match: {found}.")


class Qwen4ExpForConditionalGenerationBridge(_Qwen4ExpBridge):
    """The released layout; vision tower and MTP head stay in the checkpoint."""

    hf_prefix = "model.language_model."


class Qwen4ExpForCausalLMBridge(_Qwen4ExpBridge):
    """The text-only layout."""

    hf_prefix = "model."


_BRIDGES = {
    "Qwen4ExpForConditionalGeneration": (Qwen4ExpForConditionalGenerationBridge, "qwen4_exp"),
    "Qwen4ExpForCausalLM": (Qwen4ExpForCausalLMBridge, "qwen4_exp_text"),
}
_DISPATCHERS = (
    model_bridge.get_model_bridge,
    model_bridge.stream_weights_megatron_to_hf,
    model_bridge.stream_weights_megatron_to_hf_quant,
    model_bridge.stream_adapter_weights_megatron_to_hf,
)
_before_registration: list[tuple[Any, dict]] = []


def register_bridges() -> None:
    """Registers both architectures with Megatron-Bridge, once.

    Raises:
        RuntimeError: Megatron-Bridge does not list them afterwards.
    """
    if _before_registration:
        return
    _before_registration.extend((dispatcher, dict(dispatcher._exact_types)) for dispatcher in _DISPATCHERS)
    for architecture, (bridge, model_type) in _BRIDGES.items():
        MegatronModelBridge.register_bridge(
            source=architecture, target=GPTModel, provider=Qwen4ExpProvider, model_type=model_type
        )(bridge)
    if missing := set(_BRIDGES) - set(AutoBridge.list_supported_models()):
        raise RuntimeError(
            f"Megatron-Bridge does not list {', '.join(sorted(missing))} after their registration: "
            "its registry has changed, use a supported version."
        )


def unregister_bridges() -> None:
    """Gives Megatron-Bridge back the registrations of both architectures that it had before."""
    names = set(_BRIDGES)
    for dispatcher, before in _before_registration:
        for key in [key for key in dispatcher._exact_types if names & {key, *(key if isinstance(key, tuple) else ())}]:
            del dispatcher._exact_types[key]
            if key in before:
                dispatcher._exact_types[key] = before[key]
        dispatcher._dispatch_cache.clear()
    _before_registration.clear()


def _mappings(hf: str, packed: bool) -> list[MegatronParamMapping]:
    """Megatron name to Hugging Face name or names, ``*`` being the layer (and the expert)."""
    AutoMapping.register_module_type("Qwen4ExpGatedDeltaNet", "column")  # A_log and dt_bias
    layer, hf_layer = "decoder.layers.*.", f"{hf}layers.*."
    attention, mlp = layer + "self_attention.", layer + "mlp."
    hf_qsa, hf_gdn, hf_mlp = hf_layer + "self_attn.", hf_layer + "linear_attn.", hf_layer + "mlp."

    parallel = {
        "embedding.word_embeddings.weight": hf + "embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        attention + "linear_proj.weight": hf_qsa + "o_proj.weight",
        attention + "out_proj.weight": hf_gdn + "out_proj.weight",
        attention + "A_log": hf_gdn + "A_log",
        attention + "dt_bias": hf_gdn + "dt_bias",
        mlp + "router.weight": hf_mlp + "gate.weight",
        mlp + "shared_experts.linear_fc2.weight": hf_mlp + "shared_expert.down_proj.weight",
    }
    mixer = ("hc_norm.weight", "input_mix_weight_down.weight", "input_mix_weight_up.weight")
    ple = ("key_proj", "value_proj", "norm_key", "norm_query", "norm_conv", "conv1d")
    indexer = ("index_qk_proj.weight", "q_layernorm.weight", "k_layernorm.weight")
    replicated = {
        **{f"decoder.final_layernorm.{name}": f"{hf}hyper_connection_mixer.{name}" for name in mixer},
        **{
            f"{layer}{side}_hyper_connection.{name}": f"{hf_layer}{side}_hyper_connection.{name}"
            for side in ("attn", "mlp")
            for name in (*mixer, "block_inject_weight.weight")
        },
        **{f"{layer}ple.{name}.weight": f"{hf_layer}ple.{name}.weight" for name in ple},
        **{f"{layer}ple.{name}": f"{hf_layer}ple.ple_embedding.{name}" for name in HASH_BUFFERS},
        **{f"{attention}indexer.{name}": f"{hf_qsa}indexer.{name}" for name in indexer},
        attention + "q_layernorm.weight": hf_qsa + "q_norm.weight",
        attention + "k_layernorm.weight": hf_qsa + "k_norm.weight",
        attention + "out_norm.weight": hf_gdn + "norm.weight",
        mlp + "shared_experts.gate_weight": hf_mlp + "shared_expert_gate.weight",
    }
    return [
        *(AutoMapping(*names) for names in parallel.items()),
        *(ReplicatedMapping(*names) for names in replicated.items()),
        # q_proj holds query and gate of each head in turn; the mapping reads attention_output_gate.
        QKVMapping(
            attention + "linear_qkv.weight",
            q=hf_qsa + "q_proj.weight",
            k=hf_qsa + "k_proj.weight",
            v=hf_qsa + "v_proj.weight",
        ),
        GDNConv1dMapping(attention + "conv1d.weight", hf_gdn + "conv1d.weight"),
        GDNLinearMappingSeparate(
            attention + "in_proj.weight",
            qkv=hf_gdn + "in_proj_qkv.weight",
            z=hf_gdn + "in_proj_z.weight",
            b=hf_gdn + "in_proj_b.weight",
            a=hf_gdn + "in_proj_a.weight",
        ),
        GatedMLPMapping(
            mlp + "shared_experts.linear_fc1.weight",
            gate=hf_mlp + "shared_expert.gate_proj.weight",
            up=hf_mlp + "shared_expert.up_proj.weight",
        ),
        *_expert_mappings(mlp + "experts.", hf_mlp + "experts.", packed),
    ]


def _expert_mappings(experts: str, hf_experts: str, packed: bool) -> Iterable[MegatronParamMapping]:
    """Routed experts: one tensor of all experts (packed) or one of each; grouped and sequential experts here."""
    for linear in ("linear_fc{}.weight*", "local_experts.*.linear_fc{}.weight"):
        first, second = experts + linear.format(1), experts + linear.format(2)
        if packed:
            yield FusedGatedExpertMapping(first, hf_experts + "gate_up_proj")
            yield FusedExpertMapping(second, hf_experts + "down_proj")
        else:
            yield GatedMLPMapping(first, gate=hf_experts + "*.gate_proj.weight", up=hf_experts + "*.up_proj.weight")
            yield AutoMapping(second, hf_experts + "*.down_proj.weight")


def _hf_names(mapping: MegatronParamMapping) -> Iterable[str]:
    return mapping.hf_param.values() if isinstance(mapping.hf_param, Mapping) else (mapping.hf_param,)


def _every_expert(names: Iterable[str], num_experts: int) -> Iterable[str]:
    """A rank's model names its own experts; the checkpoint must hold all of them."""
    for name in names:
        if _EXPERT.search(name):
            yield from (_EXPERT.sub(str(expert), name) for expert in range(num_experts))
        else:
            yield name


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _refuse_unsupported(text: Any) -> None:
    for key, wanted in _HONOURED.items():
        if (value := getattr(text, key, None)) != wanted:
            raise ValueError(f"The configuration has {key}={value!r}, but only {wanted!r} is implemented.")
    rope_type = text.rope_parameters.get("rope_type", "default")
    if rope_type != "default":
        raise ValueError(f"The configuration has rope_type={rope_type!r}, but only 'default' is implemented.")
