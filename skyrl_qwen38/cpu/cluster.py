"""A local Ray cluster whose "GPUs" are slots for policy workers, and what must be there before it starts."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import ray
from skyrl.env_vars import SKYRL_DUMP_INFRA_LOG_TO_STDOUT
from skyrl.train.utils import utils as skyrl_utils

from skyrl_qwen38.overrides import ConfigError

REASONS: dict[str, str] = {
    "ray.init": "a local cluster with one logical GPU a policy worker and a small object store (only while SkyRL calls "
    "it)",
    "skyrl.train.utils.utils.peer_access_supported": "asks for two real GPUs for three minutes, then gives up",
}

# Measured (README, "Memory"): a policy worker peaks near 1.6 GiB, engine, entry task and driver near 1 GiB each.
_GIB_PER_PROCESS = 1.6
_DISK_GIB = 2.0
_OBJECT_STORE_BYTES = 256 * 2**20


class MachineTooSmall(ConfigError):
    """Not enough memory or disk for the run."""


def check_machine(workers: int, folder: Path) -> None:
    """Refuses to start a run that this machine cannot hold.

    Args:
        workers: of the policy and the reference model.
        folder: of the run; the nearest existing parent's disk counts.
    Raises:
        MachineTooSmall: with what is needed and what is there.
    """
    needed = _GIB_PER_PROCESS * (workers + 3)
    available = psutil.virtual_memory().available / 2**30
    if available < needed:
        raise MachineTooSmall(
            f"{workers} workers need about {needed:.1f} GiB of memory and {available:.1f} GiB are free: close "
            "other programs, or set trainer.placement.policy_num_gpus_per_node and the EP size lower"
        )
    disk = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(disk).free / 2**30
    if free < _DISK_GIB:
        raise MachineTooSmall(
            f"{disk} has {free:.1f} GiB free and a run needs {_DISK_GIB:.0f} GiB for its checkpoints: free some, or "
            "set SKYRL_QWEN38_OUTPUTS to another disk"
        )


@contextlib.contextmanager
def local_cluster(workers: int) -> Iterator[None]:
    """While open, SkyRL's ``initialize_ray`` starts a local cluster for ``workers`` policy workers."""
    # One slot for the entry task, one for each policy worker, one spare.
    resources = {
        "num_cpus": workers + 2,
        "num_gpus": workers,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    original = ray.init

    @functools.wraps(original)
    def init(*args: object, **kwargs: object) -> object:
        # Everything that a worker prints is in the log file; what is left is raylet chatter.
        kwargs["log_to_driver"] = SKYRL_DUMP_INFRA_LOG_TO_STDOUT
        # Ray would count the GPUs that this variable shows and refuse to promise more.
        hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        try:
            return original(*args, **({} if os.environ.get("RAY_ADDRESS") else resources), **kwargs)
        finally:
            if hidden is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = hidden

    with (
        mock.patch.object(ray, "init", init),
        mock.patch.object(skyrl_utils, "peer_access_supported", return_value=False),
    ):
        yield
