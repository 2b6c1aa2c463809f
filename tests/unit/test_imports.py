"""Imports point one way: `entrypoints -> workers -> patches -> qwen4_exp -> ple` and `cli -> checkpoint -> ple`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "skyrl_qwen38"

# Part -> parts of the project that it may import besides itself. The others drive the run and may import any.
ALLOWED = {
    "ple": set(),
    "checkpoint": {"arithmetic", "ple"},
    "qwen4_exp": {"checkpoint", "ple"},
    "patching": set(),
    "patches": {"patching", "ple", "qwen4_exp"},
    "workers": {"config", "cpu", "patches", "patching", "ple", "qwen4_exp"},
}

# Part -> libraries that it may not import.
FORBIDDEN = {
    "ple": {"megatron", "skyrl", "skyrl_gym", "ray", "vllm", "transformers"},
    "checkpoint": {"megatron", "skyrl", "skyrl_gym", "ray", "vllm"},
    "qwen4_exp": {"skyrl", "skyrl_gym", "ray", "vllm", "transformers"},
    "patching": {"megatron", "skyrl", "skyrl_gym", "ray", "vllm", "torch", "transformers"},
}

# The places that choose the device; they import the CPU package inside a condition on it.
MAY_CHOOSE_CPU = {"cli", "launch", "parity", "trainer", "workers", "entrypoints"}


def sources() -> Iterator[tuple[str, Path]]:
    """(part, file) of every module of the project; the part is the name directly below the package."""
    for file in sorted((ROOT / PACKAGE).rglob("*.py")):
        yield file.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py"), file
    for file in sorted((ROOT / "patches").rglob("*.py")):
        yield "patches", file


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names imported anywhere in a tree, those inside functions too; the project's own imports are absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str | None:
    """The part of the project that a dotted name is in."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == PACKAGE and rest else None


def violations(part: str, source: str) -> list[str]:
    """What a module of `part` imports and must not."""

    def wrong(name: str) -> bool:
        target = part_of(name)
        return (
            name.partition(".")[0] in FORBIDDEN.get(part, ())
            or (part in ALLOWED and target not in ALLOWED[part] | {part, None})
            or (target == "cpu" and part not in MAY_CHOOSE_CPU | {"cpu"})
        )

    return [name for name in imported(ast.parse(source)) if wrong(name)]


@pytest.mark.parametrize(
    ("part", "file"), list(sources()), ids=lambda value: value.stem if isinstance(value, Path) else value
)
def test_imports_point_one_way(part, file):
    assert violations(part, file.read_text()) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("ple", "import megatron.core"),
        ("ple", "def f():\n    from skyrl.train import config"),
        ("ple", "from skyrl_qwen38 import qwen4_exp"),
        ("qwen4_exp", "from skyrl_qwen38.patches import ALL_PATCHES"),
        ("qwen4_exp", "from skyrl_qwen38 import cpu"),
        ("checkpoint", "import ray"),
        ("checkpoint", "from skyrl_qwen38.qwen4_exp.bridge import x"),
        ("config", "import skyrl_qwen38.cpu"),
        ("patches", "from skyrl_qwen38.workers import PolicyWorker"),
    ],
)
def test_the_check_finds_a_wrong_import(part, source):
    assert violations(part, source)


def cpu_imports_outside_a_condition(source: str) -> list[int]:
    """Lines that import the CPU package where neither a function nor a condition guards them."""
    lines = []

    def visit(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom) and not guarded:
            lines.extend([node.lineno] * any(part_of(name) == "cpu" for name in imported(node)))
        guards = isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, guarded or guards)

    visit(ast.parse(source), False)
    return lines


@pytest.mark.parametrize(
    ("part", "file"),
    [(part, file) for part, file in sources() if part != "cpu"],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_the_cpu_package_is_imported_under_a_condition_only(part, file):
    assert cpu_imports_outside_a_condition(file.read_text()) == []


def test_the_condition_check_finds_a_bare_import():
    assert cpu_imports_outside_a_condition("import os\nfrom skyrl_qwen38 import cpu\n") == [2]
    assert cpu_imports_outside_a_condition("if x:\n    from skyrl_qwen38 import cpu\n") == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ple", ("skyrl_qwen38.cpu", "megatron", "skyrl", "ray", "vllm", "transformers")),
        ("checkpoint.index", ("skyrl_qwen38.cpu", "megatron", "skyrl", "ray", "vllm")),
        ("patching", ("skyrl_qwen38.cpu", "megatron", "skyrl", "ray", "vllm", "torch", "rich")),
        ("patches", ("skyrl_qwen38.cpu", "megatron", "skyrl", "ray", "vllm")),
        ("cli", ("skyrl_qwen38.cpu", "megatron", "skyrl", "ray", "vllm", "torch")),
        ("config", ("skyrl_qwen38.cpu", "megatron", "ray", "vllm", "torch")),
    ],
)
def test_what_importing_a_part_loads(module, absent):
    code = f"import sys, skyrl_qwen38.{module}; print([m for m in {absent!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/")
    assert result.stderr == ""
    assert result.stdout.strip() == "[]"
