"""SkyRL's Megatron workers, patched before anything of them is built.

Importing this module prepares the process, because the import of SkyRL's worker below needs it prepared: on a machine
without a GPU the CPU redirections come first, then the patch that supplies two names to Megatron-Bridge. Ray imports
it when it creates the actor. The other patches are applied when the worker is constructed.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from typing import Any
from unittest import mock

from skyrl_qwen38 import patching
from skyrl_qwen38.config import DEVICE_VARIABLE, MASTER_PORT_VARIABLE
from skyrl_qwen38.patches import ALL_PATCHES, IMPORT_TIME_PATCHES

if os.environ.get(DEVICE_VARIABLE) == "cpu":
    from skyrl_qwen38 import cpu

    cpu.install()
patching.apply(IMPORT_TIME_PATCHES, "trainer", patching.patch_flags_from_environment(IMPORT_TIME_PATCHES))

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import (  # noqa: E402
    MegatronPolicyWorkerBase,
    MegatronRefWorkerBase,
)


class _PatchedWorker:
    """Applies the patches of ``cfg.qwen38.patches`` before anything of a SkyRL worker is built."""

    def __init__(self, **kwargs: Any) -> None:
        settings = kwargs["cfg"].qwen38
        _show_own_log()
        self._patch_reports = patching.apply(ALL_PATCHES, "trainer", vars(settings.patches), settings)
        super().__init__(**kwargs)

    def init_worker_process_group(self) -> None:
        # SkyRL gives a time limit to the default group only; the groups that the model uses get theirs here.
        limited = functools.partial(
            parallel_state.initialize_model_parallel,
            distributed_timeout_minutes=self.cfg.qwen38.distributed_timeout_minutes,
        )
        with mock.patch.object(parallel_state, "initialize_model_parallel", limited):
            super().init_worker_process_group()

    def patch_reports(self) -> list[patching.PatchReport]:
        """The verdict on every trainer patch in this process."""
        return self._patch_reports


def _show_own_log() -> None:
    """What this package has to say at level INFO goes to the worker's standard error, once."""
    own = logging.getLogger("skyrl_qwen38")
    if not own.handlers:
        own.setLevel(logging.INFO)
        own.addHandler(logging.StreamHandler())


class PolicyWorker(_PatchedWorker, MegatronPolicyWorkerBase):
    """SkyRL's Megatron policy worker, patched."""

    @torch.no_grad()
    def load_checkpoint(self, ckpt_dir: str, **kwargs: Any) -> Any:
        # The distributed optimizer copies into its main parameters; in fp32 those are views of the model's own, and
        # autograd refuses that.
        return super().load_checkpoint(ckpt_dir, **kwargs)

    @staticmethod
    def _get_free_port() -> int:
        # SkyRL takes any free port; MASTER_PORT of the user, checked by the driver, wins.
        wanted = int(os.environ.get(MASTER_PORT_VARIABLE, "0"))
        with socket.socket() as free:
            free.bind(("", wanted))
            return free.getsockname()[1]


class RefWorker(_PatchedWorker, MegatronRefWorkerBase):
    """SkyRL's Megatron reference worker, patched: it builds the same model."""
