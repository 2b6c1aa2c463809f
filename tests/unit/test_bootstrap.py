"""The set-up script, as far as it goes without installing anything."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bootstrap(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "ci/bootstrap.sh", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"]} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_python_312_one_sentence_says_so(tmp_path):
    shutil.copytree(ROOT / "ci", tmp_path / "ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "cat", "sha256sum", "cut", "df", "awk", "grep", "rm"):
        (tools / name).symlink_to(shutil.which(name))
    result = bootstrap(tmp_path, "cpu", PATH=str(tools), HOME=str(tmp_path), PYENV_ROOT=str(tmp_path / "none"))
    assert result.returncode == 1
    assert result.stderr.startswith("error: no Python 3.12 with venv was found")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def test_a_second_start_does_nothing():
    result = bootstrap(ROOT, "cpu")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_bad_usage_shows_the_modes():
    result = bootstrap(ROOT, "windows")
    assert result.returncode == 2
    assert "ci/bootstrap.sh cpu" in result.stderr
