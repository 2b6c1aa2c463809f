"""Facts about the installed Megatron, read from its source.

Importing its classes takes the driver ten seconds and, without a GPU, the CPU stand-ins. Their source is enough: a
dataclass field is an annotated name in a class body.
"""

import ast
import functools
import importlib.util
from pathlib import Path

# SkyRL documents this one for the same place, though it belongs to Hugging Face's configuration.
_OF_SKYRL = frozenset({"rope_parameters"})
_PROVIDER_CLASSES = (
    ("megatron", "core/model_parallel_config.py", "ModelParallelConfig"),
    ("megatron", "core/transformer/transformer_config.py", "TransformerConfig"),
    ("megatron", "bridge/models/gpt_provider.py", "GPTModelProvider"),
    ("skyrl_qwen38", "qwen4_exp/provider.py", "Qwen4ExpProvider"),
)
_OPTIMIZER_CLASSES = (("megatron", "core/optimizer/optimizer_config.py", "OptimizerConfig"),)


@functools.cache
def provider_fields() -> frozenset[str]:
    """Fields of the model provider; empty if Megatron's source is not where it is expected."""
    names = _fields(_PROVIDER_CLASSES)
    return names | _OF_SKYRL if names else names


@functools.cache
def optimizer_fields() -> frozenset[str]:
    """Fields of Megatron's `OptimizerConfig`; empty if its source is not where it is expected."""
    return _fields(_OPTIMIZER_CLASSES)


def lacks_peft_names() -> bool:
    """Megatron-Bridge is installed without a function that SkyRL's Megatron worker imports."""
    file = _find("megatron", "bridge/peft/utils.py")
    return file is not None and "def finalize_model_grads_with_expert_adapter_sync(" not in file.read_text()


def lacks_qwen4_exp() -> bool:
    """Megatron-Bridge is installed without a bridge of its own for `qwen4_exp`."""
    folder = _find("megatron", "bridge/models")
    return folder is not None and not any(folder.rglob("qwen4_exp*"))


def _fields(classes: tuple[tuple[str, str, str], ...]) -> frozenset[str]:
    found = [_fields_of_class(*where) for where in classes]
    # A class without fields has moved: better no check than a wrong one.
    return frozenset().union(*found) if all(found) else frozenset()


def _fields_of_class(package: str, relative: str, name: str) -> set[str]:
    file = _find(package, relative)
    return {
        node.target.id
        for cls in (ast.parse(file.read_text()).body if file else [])
        if isinstance(cls, ast.ClassDef) and cls.name == name
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _find(package: str, relative: str) -> Path | None:
    """A file or folder of a package, which may be spread over several folders; nothing of it is imported."""
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders if (path := Path(folder, relative)).exists()), None)
