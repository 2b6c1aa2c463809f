"""Field names of Megatron's configuration classes, read from their source.

Importing the classes takes the driver ten seconds and, without a GPU, the CPU stand-ins. Their source is enough: a
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


def _fields(classes: tuple[tuple[str, str, str], ...]) -> frozenset[str]:
    found = [_fields_of_class(*where) for where in classes]
    # A class without fields has moved: better no check than a wrong one.
    return frozenset().union(*found) if all(found) else frozenset()


def _fields_of_class(package: str, relative: str, name: str) -> set[str]:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder, relative)).is_file():
            return {
                node.target.id
                for cls in ast.parse(path.read_text()).body
                if isinstance(cls, ast.ClassDef) and cls.name == name
                for node in cls.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
    return set()
