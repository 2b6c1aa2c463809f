"""The tiny checkpoint: the released layout, loadable by Transformers, warmed up and yet with something to learn."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from skyrl_qwen38.arithmetic import questions
from skyrl_qwen38.checkpoint import tiny
from skyrl_qwen38.checkpoint.index import CheckpointIndex, refuse_remote_code
from skyrl_qwen38.checkpoint.tiny import build_model, make_tiny
from skyrl_qwen38.checkpoint.tiny_tokenizer import build_tokenizer
from skyrl_qwen38.checkpoint.warmup import short_documents

pytest.importorskip("transformers", reason="the cpu extra is not installed")

LAYER = "model.language_model.layers."
TABLE = f"{LAYER}1.ple.ple_embedding."


def folder_digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def load(folder: Path, dtype: torch.dtype = torch.float32):
    from transformers import Qwen4ExpForCausalLM

    return Qwen4ExpForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not warmed up: what tests of the layout need."""
    return make_tiny(tmp_path_factory.mktemp("cold") / "tiny", seed=1, warmup_steps=0)


@pytest.fixture
def warm(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint


def test_names_dtypes_and_shapes_are_the_released_ones(cold):
    h, n, rank, e, inner, shared, qkv, value = 64, 4, 16, 6, 32, 64, 160, 96
    hyper = {"hc_norm": (n * h,), "input_mix_weight_down": (rank, n * h), "input_mix_weight_up": (n * h, rank)}
    wanted = {
        "lm_head.weight": (320, h),
        "model.language_model.embed_tokens.weight": (320, h),
        **{f"model.language_model.hyper_connection_mixer.{name}.weight": shape for name, shape in hyper.items()},
        f"{LAYER}1.ple.key_proj.weight": (n * h, h),
        f"{LAYER}1.ple.value_proj.weight": (h, h),
        **{f"{LAYER}1.ple.norm_{name}.weight": (n * h,) for name in ("key", "query", "conv")},
        f"{LAYER}1.ple.conv1d.weight": (n * h, 1, 4),
        f"{TABLE}layer_multipliers": (3,),
        f"{TABLE}ngram_heads_vocab_sizes": (16,),
        f"{TABLE}ngram_heads_offsets": (16,),
        **{f"{TABLE}ngram_embedding.shard_{i}.weight": (20096 // 8, 4) for i in range(8)},
    }
    for i in range(4):
        for block in ("attn", "mlp"):
            parts = hyper | {"block_inject_weight": (n, n * h)}
            wanted |= {f"{LAYER}{i}.{block}_hyper_connection.{name}.weight": parts[name] for name in parts}
        wanted |= {
            f"{LAYER}{i}.mlp.gate.weight": (e, h),
            f"{LAYER}{i}.mlp.experts.gate_up_proj": (e, 2 * inner, h),
            f"{LAYER}{i}.mlp.experts.down_proj": (e, h, inner),
            f"{LAYER}{i}.mlp.shared_expert.gate_proj.weight": (shared, h),
            f"{LAYER}{i}.mlp.shared_expert.up_proj.weight": (shared, h),
            f"{LAYER}{i}.mlp.shared_expert.down_proj.weight": (h, shared),
            f"{LAYER}{i}.mlp.shared_expert_gate.weight": (1, h),
        }
    for i in range(3):
        wanted |= {
            f"{LAYER}{i}.linear_attn.in_proj_qkv.weight": (qkv, h),
            f"{LAYER}{i}.linear_attn.in_proj_z.weight": (value, h),
            f"{LAYER}{i}.linear_attn.in_proj_b.weight": (6, h),
            f"{LAYER}{i}.linear_attn.in_proj_a.weight": (6, h),
            f"{LAYER}{i}.linear_attn.conv1d.weight": (qkv, 1, 4),
            f"{LAYER}{i}.linear_attn.A_log": (6,),
            f"{LAYER}{i}.linear_attn.dt_bias": (6,),
            f"{LAYER}{i}.linear_attn.norm.weight": (16,),
            f"{LAYER}{i}.linear_attn.out_proj.weight": (h, value),
        }
    wanted |= {
        f"{LAYER}3.self_attn.q_proj.weight": (4 * 32 * 2, h),
        f"{LAYER}3.self_attn.k_proj.weight": (2 * 32, h),
        f"{LAYER}3.self_attn.v_proj.weight": (2 * 32, h),
        f"{LAYER}3.self_attn.o_proj.weight": (h, 4 * 32),
        f"{LAYER}3.self_attn.q_norm.weight": (32,),
        f"{LAYER}3.self_attn.k_norm.weight": (32,),
        f"{LAYER}3.self_attn.indexer.index_qk_proj.weight": (3 * 16, h),
        f"{LAYER}3.self_attn.indexer.q_layernorm.weight": (16,),
        f"{LAYER}3.self_attn.indexer.k_layernorm.weight": (16,),
    }
    index = CheckpointIndex.open(cold)
    assert {name: entry.shape for name, entry in index.items()} == wanted
    integers = {name for name, entry in index.items() if entry.dtype == "I64"}
    assert integers == {
        f"{TABLE}{name}" for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    }
    assert {entry.dtype for name, entry in index.items() if name not in integers} == {"BF16"}


def test_the_table_and_a_layer_lie_in_several_files(cold):
    index = CheckpointIndex.open(cold)
    for part in (TABLE, f"{LAYER}3."):
        assert len({entry.file for name, entry in index.items() if name.startswith(part)}) >= 2
    refuse_remote_code(cold)


def test_config_is_spelt_as_released(cold):
    config = json.loads((cold / "config.json").read_text())
    text = config["text_config"]
    assert config["architectures"] == ["Qwen4ExpForConditionalGeneration"]
    assert (config["model_type"], text["model_type"]) == ("qwen4_exp", "qwen4_exp_text")
    assert text["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert text["ple_layer_ids"] == [2]
    assert text["output_gate_type"] == "sigmoid"
    assert isinstance(text["eos_token_id"], int)
    assert text["num_experts"] % 3 == 0
    assert 20096 % 3 != 0


@pytest.mark.parametrize("auto", [False, True])
def test_transformers_loads_every_tensor(cold, auto):
    from transformers import AutoModelForCausalLM, Qwen4ExpForCausalLM

    loader = AutoModelForCausalLM if auto else Qwen4ExpForCausalLM
    model, info = loader.from_pretrained(cold, dtype=torch.float32, output_loading_info=True)
    assert type(model) is Qwen4ExpForCausalLM
    assert {key: list(value) for key, value in info.items() if value} == {}
    index = CheckpointIndex.open(cold)
    shards = []
    for i in range(8):
        entry = index[f"{TABLE}ngram_embedding.shard_{i}.weight"]
        with safe_open(entry.file, "pt") as file:
            shards.append(file.get_tensor(f"{TABLE}ngram_embedding.shard_{i}.weight"))
    table = model.model.layers[1].ple.ple_embedding.ngram_embedding.weight
    assert torch.equal(table, torch.cat(shards).float())


def test_no_embedding_row_is_zero(cold):
    """Transformers would zero the row of a padding id, and RMSNorm's gradient at zero is 1000."""
    rows = load(cold)[0].model.embed_tokens.weight
    assert rows.norm(dim=-1).min() > 0.1


@pytest.mark.parametrize("text", ["#### 12", "47 + 38", "Ünïcode, \n tabs\t and  spaces", "#### -1,234.5"])
def test_the_tokenizer_gives_back_what_it_was_given(cold, text):
    from transformers import AutoTokenizer

    for tokenizer in (build_tokenizer(), AutoTokenizer.from_pretrained(cold)):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True) == text


def test_tokenizer_ids(cold):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cold)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "47 + 38"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokenizer.convert_ids_to_tokens(prompt) == ["<|user|>", "4", "7", "Ġ+Ġ", "3", "8", "<|assistant|>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("#### 12")) == ["####Ġ", "1", "2"]
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<|im_end|>", "<|endoftext|>", 320)
    assert all(tokenizer.decode([token]) for token in range(320))
    assert tokenizer.unk_token is not None


def test_a_seed_gives_the_same_bytes_and_another_seed_other_weights(cold, tmp_path):
    assert folder_digest(make_tiny(tmp_path / "again", seed=1, warmup_steps=0)) == folder_digest(cold)
    other = folder_digest(make_tiny(tmp_path / "other", seed=2, warmup_steps=0))
    assert {name for name, digest in folder_digest(cold).items() if other[name] != digest} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tiny.json",
    }


def test_a_few_warmup_steps_repeat_exactly(cold, tmp_path):
    one, two = (make_tiny(tmp_path / name, seed=1, warmup_steps=2) for name in ("one", "two"))
    assert folder_digest(one) == folder_digest(two)
    assert folder_digest(one) != folder_digest(cold)


def test_warm_up_trains_every_tensor_but_the_table_and_the_indexer(warm):
    """The indexer's choice has no gradient."""
    before, after = build_model(build_tokenizer(), seed=0).state_dict(), load(warm)[0].state_dict()
    before = {
        name: tensor.bfloat16().float() if tensor.is_floating_point() else tensor for name, tensor in before.items()
    }
    same = {name for name in after if torch.equal(before[name], after[name])}
    assert same == {name for name in after if ".ple_embedding." in name or ".indexer." in name}


def test_short_documents_save_work_and_change_nothing(cold):
    from transformers.models.qwen4_exp import modeling_qwen4_exp

    model = load(cold)[0].eval()
    indexer = model.model.layers[3].self_attn.indexer
    tokens = torch.randint(320, (3, 11), generator=torch.Generator().manual_seed(0))
    replaced = (modeling_qwen4_exp.torch_chunk_gated_delta_rule, model.config._experts_implementation, indexer.forward)
    with torch.no_grad():
        wanted = model(tokens).logits
        with short_documents(model):
            saved = model(tokens).logits
    assert (saved - wanted).abs().max() < 1e-6
    assert replaced == (
        modeling_qwen4_exp.torch_chunk_gated_delta_rule,
        model.config._experts_implementation,
        indexer.forward,
    )


def test_a_second_call_does_nothing_and_other_settings_are_refused(tmp_path, monkeypatch):
    out = make_tiny(tmp_path / "tiny", seed=1, warmup_steps=0)
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    monkeypatch.setattr(tiny, "build_model", lambda *_: pytest.fail("built a model that is there already"))
    assert make_tiny(out, seed=1, warmup_steps=0) == out
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    with pytest.raises(FileExistsError, match="not the tiny checkpoint of these settings"):
        make_tiny(out, seed=2, warmup_steps=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(FileExistsError, match="remove it or name another folder"):
        make_tiny(tmp_path / "mine", seed=1, warmup_steps=0)


@pytest.mark.parametrize("step", ["save_file", "_fsync", "_write_json"])
def test_an_interrupted_call_leaves_nothing(tmp_path, monkeypatch, step):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_tiny(tmp_path / "tiny", seed=1, warmup_steps=0)
    assert list(tmp_path.iterdir()) == []


def test_warm_up_leaves_something_to_learn(warm):
    """Greedy answers of Transformers' own generate on held-out questions, scored by skyrl-gym's environment."""
    skyrl_gym = pytest.importorskip("skyrl_gym", reason="the cpu extra is not installed")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(warm)
    model = load(warm)[0].eval()
    asked = questions("heldout")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in asked
    ]
    tokens = torch.tensor(prompts)
    answers = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False, pad_token_id=0
    )[:, tokens.shape[1] :]
    rewards = torch.tensor(
        [
            skyrl_gym.make("gsm8k", extras={"reward_spec": {"method": "rule", "ground_truth": str(q.answer)}}).step(
                tokenizer.decode(answer, skip_special_tokens=True)
            )["reward"]
            for q, answer in zip(asked, answers, strict=True)
        ]
    )
    carries = torch.tensor([question.carries for question in asked])
    assert 0.2 < rewards.mean() < 0.6
    assert rewards[~carries].mean() > 0.9
    assert rewards[carries].mean() < 0.3
    card = json.loads((warm / "tiny.json").read_text())
    assert card["warmup"]["accuracy"] == pytest.approx(rewards.mean().item(), abs=0.1)
