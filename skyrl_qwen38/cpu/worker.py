"""The workers of a machine without a GPU: they send weights to the rollout actor and keep them in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from skyrl_qwen38.cpu import adam
from skyrl_qwen38.cpu.rollout import RolloutClient
from skyrl_qwen38.weight_sync import WeightSyncError, check_first_sync
from skyrl_qwen38.workers import PolicyWorker, RefWorker


class _WeightsStay:
    """megatron.core copies weights "to the CPU" and frees the originals. Here the copy is an alias of the original."""

    def offload_to_cpu(self, offload_optimizer: bool = True, offload_model: bool = True) -> None: ...
    def backload_to_gpu(self, backload_optimizer: bool = True, backload_model: bool = True) -> None: ...


class CpuRefWorker(_WeightsStay, RefWorker):
    """SkyRL's Megatron reference worker on a CPU."""


class CpuPolicyWorker(_WeightsStay, PolicyWorker):
    """SkyRL's Megatron policy worker with what a CPU changes: weight sync, offload and the state of AdamW."""

    async def init_weight_sync_state(self, inference_engine_client: RolloutClient, inference_engine_cfg: Any) -> None:
        self._weight_sync_inference_client = inference_engine_client
        self._sync_checked = False
        dist.barrier()

    async def _sync_weights_to_inference_engines(
        self, inference_engine_client: RolloutClient, inference_engine_cfg: Any
    ) -> None:
        dtype = getattr(torch, inference_engine_cfg.model_dtype)
        weights = {}
        # The export gathers over the ranks: every rank walks it to the end, rank 0 keeps what it yields.
        for name, weight in self.bridge.export_hf_weights(self.actor_module, show_progress=False):
            if self._rank == 0:
                weights[name] = weight.detach().to(dtype if weight.is_floating_point() else weight.dtype, copy=True)
        error = None
        if self._rank == 0:
            try:
                report = await inference_engine_client.load_weights(weights)
                if not self._sync_checked:
                    check_first_sync(report["missing"], report["unexpected"])
                self._sync_checked = True
            except Exception as reason:
                error = f"{reason}"
        # All ranks learn how it went before any of them goes on.
        outcome = [error]
        dist.broadcast_object_list(outcome, src=0)
        if outcome[0] is not None:
            raise WeightSyncError(outcome[0])

    def load_checkpoint(self, ckpt_dir: str, **kwargs: Any) -> Any:
        adam.create_state(self.optimizer)
        states = super().load_checkpoint(ckpt_dir, **kwargs)
        adam.separate_steps(self.optimizer)
        return states
