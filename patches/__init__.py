"""The patches of skyrl-qwen38: one module a patch, each with one `PATCH`; `README.md` is their ledger.

Importing this package or one of its modules imports no library that is patched: what a patch needs of a library it
imports when it is applied.
"""

from skyrl_qwen38.patching import Patch

from . import bridge_peft_names, ple_row_shard, qwen4_exp_bridge

ALL_PATCHES: tuple[Patch, ...] = (bridge_peft_names.PATCH, qwen4_exp_bridge.PATCH, ple_row_shard.PATCH)
"""Every patch, in the order in which they are applied and reported."""

IMPORT_TIME_PATCHES: tuple[Patch, ...] = (bridge_peft_names.PATCH,)
"""Those without which SkyRL's Megatron worker cannot be imported; applied before it is, the others when it is built."""
