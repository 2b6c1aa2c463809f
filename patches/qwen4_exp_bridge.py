"""Registers the `qwen4_exp` bridge and provider with Megatron-Bridge.

SkyRL ships bridges of its own in a package that imports all of them at once; with a released megatron-bridge one of
those imports fails and, silently, none is registered. So ours is registered here, and asserted to be listed.
"""

from typing import Any

from skyrl_qwen38.patching import Changes, Fingerprint, Patch, Target

ARCHITECTURES = ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM")
"""`config.architectures[0]` of the released checkpoint and of a text-only one."""


def missing_architectures() -> list[str]:
    """Those of `ARCHITECTURES` for which Megatron-Bridge lists no bridge."""
    from megatron.bridge import AutoBridge

    listed = set(AutoBridge.list_supported_models())
    return [name for name in ARCHITECTURES if name not in listed]


def _apply(changes: Changes, settings: Any) -> None:
    from skyrl_qwen38.qwen4_exp import bridge

    changes.on_undo(bridge.unregister_bridges)
    bridge.register_bridges()
    if missing := missing_architectures():
        raise RuntimeError(f"Megatron-Bridge does not list {' and '.join(missing)} after they were registered")


PATCH = Patch(
    name="qwen4_exp_bridge",
    why="released Megatron-Bridge has no bridge and provider for qwen4_exp",
    scope="trainer",
    targets=(
        Target(
            "megatron.bridge.models.conversion.model_bridge.MegatronModelBridge.register_bridge",
            # A public decorator: its signature is the contract, its body may change.
            {"megatron-bridge 0.6.2": Fingerprint("(kw source, kw target, kw provider=…, kw model_type=…)")},
        ),
        Target("megatron.bridge.AutoBridge.list_supported_models", {"megatron-bridge 0.6.2": Fingerprint("()")}),
    ),
    landed=lambda: not missing_architectures(),
    apply=_apply,
)
