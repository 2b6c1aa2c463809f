"""Tiny random `qwen4_exp` checkpoints in the two layouts that exist: text-only with an expert per tensor, and released
(packed experts, `model.language_model.` prefix, vision and MTP tensors beside)."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NUM_EXPERTS = 12
NUM_LAYERS = 4
EOS = 2
VOCAB = 512
DENSE_LIMIT = 64 + 4 - 1


def text_config(**changes):
    """The tiny configuration: [DeltaNet, DeltaNet + PLE, DeltaNet, QSA], 16 n-gram heads, 12 experts."""
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    values = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "output_gate_type": "sigmoid",
        "eos_token_id": EOS,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "hc_count": 4,
        "hc_lowrank": 8,
        "ple_layer_ids": [2],
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": 101,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    return Qwen4ExpTextConfig(**(values | changes))


def make_text_checkpoint(folder: Path, seed: int = 0, **changes) -> Path:
    """Every tensor random: zero norms and convolutions would hide whole branches of the model. In fp32, of values that
    bf16 holds, so that both dtypes can be compared."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    torch.manual_seed(seed)
    model = Qwen4ExpForCausalLM(text_config(**changes)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if "conv1d" in name else 0.08))
            if name.endswith("A_log"):  # slow decays: a state that leaks across documents must show
                parameter.copy_(torch.linspace(-4, 0, parameter.numel()))
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return folder


def make_released_checkpoint(text: Path, folder: Path) -> Path:
    """The same weights as the release lays them out."""
    source = load_file(text / "model.safetensors")
    tensors = {}
    for name, tensor in source.items():
        if ".experts." not in name:
            prefixed = "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name
            tensors[prefixed] = tensor.clone()
    for layer in range(NUM_LAYERS):
        experts = f"layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([source[f"model.{experts}{e}.{part}_proj.weight"] for e in range(NUM_EXPERTS)])
            for part in ("gate", "up", "down")
        )
        tensors[f"model.language_model.{experts}gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"model.language_model.{experts}down_proj"] = down
    tensors["mtp.fc_hidden.weight"] = torch.ones(4, 4)
    tensors["model.visual.pos_embed.weight"] = torch.ones(4, 4)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": json.loads((text / "config.json").read_text()),
        "image_token_id": VOCAB - 4,
        "video_token_id": VOCAB - 3,
        "vision_start_token_id": VOCAB - 2,
        "vision_end_token_id": VOCAB - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
