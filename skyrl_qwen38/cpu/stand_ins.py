"""Packages that build only with CUDA, for the few import statements that insist on them.

A stand-in is visible only while the module that insists is being executed: a permanent one would make megatron.core
believe that Transformer Engine is there, and choose its layers.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

REASONS: dict[str, str] = {
    "transformer_engine.pytorch": "megatron.bridge.peft.lora_layers and its TE layer spec name classes of it in "
    "annotations and as base classes; none is used",
    "nvidia_resiliency_ext": "SkyRL's Megatron strategy constructs its AsyncCallsQueue; only asynchronous saves use it",
    "megatron.bridge.peft.utils.HAVE_TE*": "megatron.core defines TE's classes as None, which the bridge takes for "
    "available and passes to isinstance()",
    "megatron.bridge.peft.module_matcher.HAVE_TE*": "the same",
}


def _package(*names: str) -> dict[str, ModuleType]:
    """Empty modules for the dotted ``names`` (parents first), each an attribute of its parent."""
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


def _transformer_engine() -> dict[str, ModuleType]:
    modules = _package("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
    pytorch, ops = modules["transformer_engine.pytorch"], modules["transformer_engine.pytorch.ops"]
    for name in ("Linear", "LayerNormLinear", "TransformerLayer"):
        setattr(pytorch, name, type(name, (), {}))
    ops.Sequential = type("Sequential", (), {})
    return modules


class _AsyncCallsQueue:
    """The queue of asynchronous checkpoint writes, of which there are none."""

    def __init__(self, persistent: bool = False) -> None:
        pass

    def schedule_async_request(self, request: Any) -> None:
        raise RuntimeError(
            "asynchronous checkpoints need nvidia_resiliency_ext: set "
            "trainer.policy.megatron_config.async_dist_ckpt_save=false"
        )

    def maybe_finalize_async_calls(self, blocking: bool = False) -> list[int]:
        return []

    def close(self) -> None:
        pass


def _nvidia_resiliency_ext() -> dict[str, ModuleType]:
    root = "nvidia_resiliency_ext"
    modules = _package(
        root, f"{root}.checkpointing", f"{root}.checkpointing.async_ckpt", f"{root}.checkpointing.async_ckpt.core"
    )
    modules[f"{root}.checkpointing.async_ckpt.core"].AsyncCallsQueue = _AsyncCallsQueue
    return modules


# Module that insists on a package -> maker of the package's stand-in.
_DURING_IMPORT: dict[str, Callable[[], dict[str, ModuleType]]] = {
    "megatron.bridge.peft.lora_layers": _transformer_engine,
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec": _transformer_engine,
    "skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy": _nvidia_resiliency_ext,
}
# Modules that take megatron.core's None for a class of Transformer Engine.
_MISLED_ABOUT_TE = ("megatron.bridge.peft.utils", "megatron.bridge.peft.module_matcher")


class _Loader:
    """Executes a module with stand-ins in place, and corrects its flags afterwards."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        make = _DURING_IMPORT.get(module.__name__)
        stand_ins = {n: m for n, m in make().items() if n not in sys.modules} if make else {}
        sys.modules.update(stand_ins)
        try:
            self._loader.exec_module(module)
        finally:
            for name in stand_ins:
                del sys.modules[name]
        if module.__name__ in _MISLED_ABOUT_TE:
            for name in vars(module):
                if name.startswith("HAVE_TE"):
                    setattr(module, name, False)


class _Finder:
    """Finds the modules above as Python would, and wraps their loaders."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Registers the stand-ins of packages that are not installed.

    Raises:
        RuntimeError: a module that needs one was imported before.
    """
    absent = {_transformer_engine: "transformer_engine", _nvidia_resiliency_ext: "nvidia_resiliency_ext"}
    absent = {make: package for make, package in absent.items() if importlib.util.find_spec(package) is None}
    names = {name for name, make in _DURING_IMPORT.items() if make in absent}
    if _transformer_engine in absent:
        names.update(_MISLED_ABOUT_TE)
    too_late = sorted(names & sys.modules.keys())
    if too_late:
        raise RuntimeError(f"skyrl_qwen38.cpu.install() came after the import of {too_late[0]}: call it first")
    sys.meta_path.insert(0, _Finder(names))
