"""A tiny ``qwen4_exp`` checkpoint in the released layout, warmed up on the arithmetic task.

Every mechanism of the released model is there, small: gated DeltaNet with grouped value heads, one layer with the
n-gram table, QSA, hyper-connections over four streams, mixture of experts with a shared expert. Expert and row
counts are chosen to be awkward for sharding: six experts (EP 1, 2, 3, 6) and a table whose rows three ranks cannot
share evenly.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from skyrl_qwen38.checkpoint.tiny_tokenizer import END_OF_TEXT, END_OF_TURN, VOCAB_SIZE, build_tokenizer
from skyrl_qwen38.checkpoint.warmup import MAX_STEPS, WarmupResult, warm_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen4ExpForCausalLM

CARD = "tiny.json"
_FORMAT = 1
_FILES = 2
_HEADS = 16
_D = 4

TEXT_CONFIG = {
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HEADS * _D,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 0.25,
    # Rotary width 32 * 0.25 = 8, so 4 frequencies: 2 temporal, 1 height, 1 width.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "output_gate_type": "sigmoid",
    "mamba_ssm_dtype": "float32",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "hc_count": 4,
    "hc_lowrank": 16,
    "ple_layer_ids": [2],
    "ple_embed_dim": _HEADS * _D,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 1201,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 8,
    "seed": 1234,
    # As released. Transformers would zero the embedding of a padding id, and there RMSNorm's gradient is 1000.
    "pad_token_id": None,
    # Attention is exactly dense up to budget + ratio - 1 = 131 tokens.
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 128,
    "indexer_compress_ratio": 4,
}
VISION_CONFIG = {
    "model_type": "qwen4_exp_vision",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": _HEADS * _D,
}


def make_tiny(
    out: str | Path, seed: int = 0, warmup_steps: int = MAX_STEPS, log: Callable[[str], None] = print
) -> Path:
    """Makes the tiny checkpoint in the folder ``out`` and returns it; does nothing if it is there already.

    Args:
        out: the folder; it appears whole or not at all.
        seed: of the initial weights, the table, and the order of the warm-up.
        warmup_steps: bound on supervised steps; 0 leaves the weights as initialised, in a second: norms and the
            table's convolution are then zero, and a test that compares them sees nothing.
        log: told what is being done.

    Raises:
        FileExistsError: ``out`` holds something else than a tiny checkpoint of the same settings.
    """
    out = Path(out)
    settings = {"format": _FORMAT, "seed": seed, "warmup_steps": warmup_steps, "config": _digest(TEXT_CONFIG)}
    if _is_made(out, settings):
        log(f"{out}: tiny qwen4_exp of seed {seed} is already there")
        return out

    started = time.monotonic()
    log(f"{out}: making a tiny qwen4_exp of seed {seed}; importing Transformers takes some seconds")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    result = warm_up(model, tokenizer, seed=seed, max_steps=warmup_steps, log=log)
    _write(out, model, tokenizer, settings, result)
    log(f"{out}: written after {time.monotonic() - started:.0f} s")
    return out


def full_config(tokenizer: "PreTrainedTokenizerFast") -> dict:
    """``config.json``, nested as the released one is; the vision tower is described but has no weights."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    ids |= tokenizer.get_added_vocab()
    separator = ids[END_OF_TEXT]
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": deepcopy(TEXT_CONFIG) | dict.fromkeys(("bos_token_id", "eos_token_id"), separator),
        "vision_config": deepcopy(VISION_CONFIG),
    }


def build_model(tokenizer: "PreTrainedTokenizerFast", seed: int) -> "Qwen4ExpForCausalLM":
    """Transformers' own text model with random fp32 weights drawn from ``seed``; the n-gram table is frozen."""
    from transformers import Qwen4ExpConfig, Qwen4ExpForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen4ExpForCausalLM(Qwen4ExpConfig(**full_config(tokenizer)).text_config).float()
        for name, parameter in model.named_parameters():
            if name.endswith("ngram_embedding.weight"):
                torch.nn.init.normal_(parameter, std=1.0)
                parameter.requires_grad_(False)
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def released_tensors(model: "Qwen4ExpForCausalLM") -> dict[str, torch.Tensor]:
    """The model's tensors by their names in a released checkpoint: bf16, int64 hash constants, table in shards."""
    prefix = "model."
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        name = "model.language_model." + name.removeprefix(prefix) if name.startswith(prefix) else name
        tensor = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        if name.endswith("ngram_embedding.weight"):
            shards = tensor.chunk(model.config.split_ngram_parts)
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}shard_{i}.weight": shard for i, shard in enumerate(shards)}
        else:
            tensors[name] = tensor
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes ``tensors`` to safetensors files with their index, in turns: no reader may expect a layer in one file."""
    names = list(tensors)
    weight_map = {}
    for number in range(_FILES):
        file = f"model-{number + 1:05d}-of-{_FILES:05d}.safetensors"
        part = names[number::_FILES]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _write(
    out: Path,
    model: "Qwen4ExpForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    settings: dict,
    result: WarmupResult,
) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_tensors(released_tensors(model), temporary)
        _write_json(temporary / "config.json", full_config(tokenizer))
        end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
        _write_json(
            temporary / "generation_config.json",
            {
                "bos_token_id": end_of_text,
                "eos_token_id": [end_of_turn, end_of_text],
                "pad_token_id": end_of_text,
                "do_sample": True,
                "temperature": 1.0,
            },
        )
        tokenizer.save_pretrained(temporary)
        _write_json(temporary / CARD, settings | {"warmup": asdict(result)})
        for path in temporary.iterdir():
            _fsync(path)
        _fsync(temporary)
        temporary.rename(out)
        _fsync(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_made(out: Path, settings: dict) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        card = json.loads((out / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        card = {}
    if {key: card.get(key) for key in settings} != settings:
        raise FileExistsError(
            f"{out} exists and is not the tiny checkpoint of these settings (seed {settings['seed']}); "
            "remove it or name another folder"
        )
    return True


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
