"""The package as it is installed: `patches/` is importable as `skyrl_qwen38.patches` from a wheel and in place."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

IMPORT = """
import sys
from skyrl_qwen38 import patches
print(patches.__file__)
print(*(patch.name for patch in patches.ALL_PATCHES))
"""


def run_python(code: str, *flags: str, cwd: str = "/") -> list[str]:
    command = [sys.executable, *flags, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=True)
    return result.stdout.splitlines()


def test_in_place_the_patches_are_those_of_the_repository():
    file, names = run_python(IMPORT)
    assert Path(file) == ROOT / "patches" / "__init__.py"
    assert names.split() == ["bridge_peft_names", "qwen4_exp_bridge", "ple_row_shard"]


def test_every_package_of_the_tree_is_declared():
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "skyrl_qwen38").rglob("*.py")} | {
        "skyrl_qwen38.patches"
    }
    assert found == declared


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git would take, so that no leftover of another build is in it; without the network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, capture_output=True, text=True, cwd=ROOT, check=True).stdout.split("\0")
    for name in filter(None, names):
        if name.split("/")[0] in {"skyrl_qwen38", "patches", "pyproject.toml", "README.md", "LICENSE"}:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    result = subprocess.run(build, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


def test_a_wheel_holds_every_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "skyrl_qwen38").rglob("*.py")} | {
        f"skyrl_qwen38/patches/{file.name}" for file in (ROOT / "patches").glob("*.py")
    }
    assert modules <= names
    assert not any(name.startswith(("patches/", "tests/", "recipes/")) for name in names)


def test_the_patches_are_importable_from_a_wheel(wheel, tmp_path):
    """Installed alone into a folder that comes before everything else; -S and -P keep the editable install out."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    site = [path for path in sys.path if path.endswith("site-packages")]
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; sys.path += {site!r}\n{IMPORT}"
    file, names = run_python(code, "-S", "-P")
    assert Path(file) == tmp_path / "skyrl_qwen38" / "patches" / "__init__.py"
    assert names.split() == ["bridge_peft_names", "qwen4_exp_bridge", "ple_row_shard"]


@pytest.mark.full
def test_pip_installs_the_wheel_with_its_console_script(wheel, tmp_path):
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    result = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (target / "bin" / "skyrl-qwen38").is_file()
    assert (target / "skyrl_qwen38" / "patches" / "__init__.py").is_file()
