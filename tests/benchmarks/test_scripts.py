"""Every benchmark runs in its quick form and writes what its readers expect; times are not looked at."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(
    path.name for path in Path(__file__).parent.glob("*.py") if path.name.startswith(("bench_", "simulate_"))
)


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_quick_form_writes_machine_cells_and_targets(script, tmp_path):
    command = [sys.executable, str(Path(__file__).parent / script), "--quick", "--json", str(tmp_path / "out.json")]
    finished = subprocess.run(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=280, check=False
    )
    assert finished.returncode == 0, finished.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written) == {"machine", "cells", "targets"}
    assert written["machine"]["cores"] > 0
    assert written["cells"]
    for target in written["targets"].values():
        assert set(target) == {"wanted", "measured", "met"}


def test_every_script_is_found():
    assert SCRIPTS == ["bench_ple_load.py", "bench_ple_lookup.py", "bench_qsa.py", "simulate_exchange.py"]
