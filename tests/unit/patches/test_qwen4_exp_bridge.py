"""Registration of the `qwen4_exp` bridges with the installed Megatron-Bridge."""

from importlib import import_module
from typing import Any

import pytest


def _prepare() -> tuple[Any, Any, Any]:
    from skyrl_qwen38 import cpu

    cpu.install()
    from megatron.bridge import AutoBridge

    return AutoBridge, import_module("skyrl_qwen38.patching"), import_module("skyrl_qwen38.patches.qwen4_exp_bridge")


def _registered_and_back(rank: int, world_size: int) -> dict[str, Any]:
    auto_bridge, patching, module = _prepare()
    before = auto_bridge.list_supported_models()
    verdicts = [str(report) for _ in range(2) for report in patching.apply([module.PATCH], "trainer", {})]
    with_patch = auto_bridge.list_supported_models()
    patching.undo("qwen4_exp_bridge")
    return {
        "verdicts": verdicts,
        "new": set(with_patch) - set(before),
        "after": auto_bridge.list_supported_models() == before,
    }


def test_both_architectures_are_listed_and_taken_back(ranks):
    (result,) = ranks.run(_registered_and_back, world_size=1, timeout=200)
    assert result["verdicts"] == ["applied", "applied"]
    assert result["new"] == {"Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"}
    assert result["after"]


def _silent_registration(rank: int, world_size: int) -> tuple[str, int]:
    _, patching, module = _prepare()
    bridge = import_module("skyrl_qwen38.qwen4_exp.bridge")
    registered, bridge.register_bridges = bridge.register_bridges, lambda: None
    try:
        patching.apply([module.PATCH], "trainer", {})
    except patching.PatchError as error:
        return str(error), len(patching._applied)
    finally:
        bridge.register_bridges = registered
    return "", -1


def test_a_registration_that_does_nothing_is_an_error(ranks):
    """What SkyRL's own package does with released wheels, silently."""
    ((sentence, applied),) = ranks.run(_silent_registration, world_size=1, timeout=200)
    assert "does not list Qwen4ExpForConditionalGeneration and Qwen4ExpForCausalLM" in sentence
    assert applied == 0


def _already_upstream(rank: int, world_size: int) -> list[str]:
    _, patching, module = _prepare()
    bridge = import_module("skyrl_qwen38.qwen4_exp.bridge")
    bridge.register_bridges()  # as if Megatron-Bridge had done it
    try:
        return [str(report) for report in patching.apply([module.PATCH], "trainer", {})]
    finally:
        bridge.unregister_bridges()


def test_a_bridge_of_upstream_is_left_in_place(ranks):
    (verdicts,) = ranks.run(_already_upstream, world_size=1, timeout=200)
    assert verdicts == ["not needed (upstream has it)"]


@pytest.mark.parametrize("name", ["Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"])
def test_architectures_are_those_of_transformers(name):
    import transformers

    assert name in import_module("skyrl_qwen38.patches.qwen4_exp_bridge").ARCHITECTURES
    assert hasattr(transformers, name)
