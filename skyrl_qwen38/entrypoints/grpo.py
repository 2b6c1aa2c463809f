"""GRPO of `qwen4_exp`: SkyRL's entry point with ``trainer.override_entrypoint=skyrl_qwen38.entrypoints.grpo``."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from skyrl_qwen38.config import ConfigError, parse_args
from skyrl_qwen38.launch import launch


def main() -> None:
    """Validates the settings of the command line, trains, and exits: 0 done, 1 failed, 2 bad settings."""
    try:
        cfg = parse_args(sys.argv[1:])
        status = launch(cfg, Path(cfg.trainer.qwen38.run_dir))
    except ConfigError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        status = 2
    sys.exit(status)
