"""The CPU redirections, each in a worker of the pool: they are for the life of a process."""

from pathlib import Path

import torch

import skyrl_qwen38.cpu
from tests.ranks import RankPool


def _devices(rank: int, world_size: int) -> dict[str, str]:
    skyrl_qwen38.cpu.install()
    device = torch.cuda.current_device()
    made = {
        "zeros, an index": torch.zeros(2, device=device),
        "empty, a name": torch.empty(2, device="cuda"),
        "arange, a numbered name": torch.arange(2, device="cuda:0"),
        "tensor, a device": torch.tensor([1.0], device=torch.device("cuda")),
        "new_empty": torch.zeros(2).new_empty((1,), device=device),
        "to": torch.zeros(2).to("cuda"),
        "cuda": torch.zeros(2).cuda(),
        "Module.cuda": torch.nn.Linear(1, 1).cuda().weight,
    }
    like = [name for name in dir(torch) if name.endswith("_like") and not name.startswith("_")]
    assert len(like) == 7
    values = {"full_like": (1,), "randint_like": (5,)}
    made |= {name: getattr(torch, name)(torch.zeros(2), *values.get(name, ()), device="cuda") for name in like}
    return {name: str(tensor.device) for name, tensor in made.items()}


def test_every_way_to_name_a_gpu_means_the_cpu(ranks: RankPool):
    (devices,) = ranks.run(_devices, world_size=1)
    assert set(devices.values()) == {"cpu"}, devices


def _meta_and_dtype(rank: int, world_size: int) -> list[str]:
    skyrl_qwen38.cpu.install()
    with torch.device("meta"):
        made = [torch.empty(1), torch.arange(1), torch.zeros(1), torch.nn.Linear(1, 1).weight]
    return [tensor.device.type for tensor in made] + [torch.zeros(1).type(), torch.zeros(1).bfloat16().type()]


def test_a_meta_context_still_makes_meta_tensors_and_dtypes_keep_their_cuda_names(ranks: RankPool):
    (answers,) = ranks.run(_meta_and_dtype, world_size=1)
    assert answers == ["meta"] * 4 + ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"]


def _rotary_frequencies(rank: int, world_size: int, path: str, forget_wrappers: bool) -> torch.Tensor:
    skyrl_qwen38.cpu.install()
    from transformers import AutoModelForCausalLM

    constructors = torch.utils._device._device_constructors
    if forget_wrappers:  # what wrapping the factories alone would leave behind
        known = {function for function in constructors() if not hasattr(function, "__wrapped__")}
        torch.utils._device._device_constructors = lambda: known
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    finally:
        torch.utils._device._device_constructors = constructors
    return model.model.rotary_emb.inv_freq.clone()


def test_rotary_frequencies_of_transformers_are_those_of_the_formula(ranks: RankPool, tiny_checkpoint: Path):
    (frequencies,) = ranks.run(_rotary_frequencies, str(tiny_checkpoint), False, world_size=1, timeout=120)
    # theta^(-2i/d) with theta 1e7 and rotary width d = 8
    expected = 1e7 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(frequencies.double(), expected, rtol=1e-6, atol=0)


def _split_sizes(rank: int, world_size: int) -> list[int]:
    skyrl_qwen38.cpu.install()
    mine = torch.full((3,), rank)
    received = torch.empty(3, dtype=mine.dtype)
    counts = torch.tensor([1, 2]) if rank == 0 else torch.tensor([2, 1])
    torch.distributed.all_to_all_single(received, mine, counts, counts)
    return received.tolist()


def test_all_to_all_takes_split_sizes_as_tensors(ranks: RankPool):
    assert ranks.run(_split_sizes, world_size=2) == [[0, 1, 1], [0, 0, 1]]


def test_every_redirected_name_says_why():
    reasons = skyrl_qwen38.cpu.redirected_names()
    assert len(reasons) > 30
    assert all(len(why) > 5 for why in reasons.values()), reasons


def _install_late(rank: int, world_size: int) -> str:
    import sys
    from types import ModuleType

    from skyrl_qwen38.cpu import stand_ins

    name = "megatron.bridge.peft.lora_layers"
    before = sys.modules.get(name)
    sys.modules[name] = ModuleType(name)
    try:
        stand_ins.install()
    except RuntimeError as error:
        return str(error)
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
    return ""


def test_installing_after_the_import_that_needs_it_is_an_error(ranks: RankPool):
    (sentence,) = ranks.run(_install_late, world_size=1)
    assert "megatron.bridge.peft.lora_layers" in sentence
    assert "call it first" in sentence
