"""Supplies two functions of `megatron.bridge.peft.utils` that SkyRL imports and released megatron-bridge lacks.

A *shared expert adapter* is one LoRA pair for all experts of a grouped linear. It is replicated over the
expert-parallel (EP) group, while megatron-core's DDP reduces the gradient of an expert parameter over the
expert-data-parallel group only; so somebody has to sum it over EP:

    g = scale · Σ_{r ∈ EP} Σ_{d ∈ EDP} g_{r,d}

Released megatron-bridge does it in a tensor hook, once a micro-batch. That runs a collective inside backward, so a rank
with fewer micro-batches than its peers hangs them, and it sums a dummy where gradient accumulation is fused. The two
functions move the sum to the end of the optimizer step: the first drops those hooks, the second sums.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from skyrl_qwen38.patching import Changes, Fingerprint, Patch, Target

_UTILS = "megatron.bridge.peft.utils"
_ADAPTER = f"{_UTILS}.ParallelLinearAdapter"
_NAMES = ("enable_expert_parallel_grad_sync_in_finalize", "finalize_model_grads_with_expert_adapter_sync")

Model = torch.nn.Module | Sequence[torch.nn.Module]


def enable_expert_parallel_grad_sync_in_finalize(model: Model) -> None:
    """Drop the hooks that sum a shared expert adapter's gradient over EP in every backward pass.

    Args:
        model: the model, or its pipeline chunks, with adapters in place. Calling it twice does nothing more.
    """
    hook = _adapter_class()._allreduce_shared_expert_grad
    for _, weight in _shared_expert_weights(model):
        # register_hook's handle was thrown away; deleting the entry is what the handle's remove() does.
        hooks = weight._backward_hooks or {}
        for key in [key for key, bound in hooks.items() if getattr(bound, "__func__", None) is hook]:
            del hooks[key]


def finalize_model_grads_with_expert_adapter_sync(model: Model, num_tokens: torch.Tensor | None = None) -> None:
    """`megatron.core.distributed.finalize_model_grads`, then the sum of shared expert adapters' gradients over EP.

    The sum comes last because with `overlap_grad_reduce` DDP's own reduction has started during backward. It is
    linear, and peers of an EP group hold the same shard of the same buffer layout, so adding their reduced shards is
    the reduction of the sums. Outside its shard a rank adds values that the optimizer never reads.

    Args:
        model: DDP-wrapped model chunks.
        num_tokens: as in `finalize_model_grads`: divides the gradients under `calculate_per_token_loss`.
    """
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(list(_chunks(model)), num_tokens)
    _sum_over_expert_parallel(model)


def _sum_over_expert_parallel(model: Model) -> None:
    """One all-reduce a group and dtype. The list is made from modules, never from data: equal on all ranks."""
    buckets: dict[tuple[Any, torch.dtype], list[torch.Tensor]] = {}
    for group, weight in _shared_expert_weights(model):
        if group is None or group.size() == 1 or not weight.requires_grad:
            continue
        grad = getattr(weight, "main_grad", None)
        if grad is None:  # not wrapped in DDP
            if weight.grad is None:  # no token of this rank reached the experts; its peers still count on the call
                weight.grad = torch.zeros_like(weight)
            grad = weight.grad
        buckets.setdefault((group, grad.dtype), []).append(grad)
    for (group, _), grads in buckets.items():
        flat = _flatten_dense_tensors(grads)
        torch.distributed.all_reduce(flat, group=group)
        for grad, summed in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(summed)


def _shared_expert_weights(model: Model) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """(EP group, weight) of every shared expert adapter, in module order."""
    adapter_class = _adapter_class()
    for chunk in _chunks(model):
        for module in chunk.modules():
            if isinstance(module, adapter_class) and module._uses_grouped_expert_sharding():
                yield module.ep_group, module.linear_in.weight
                yield module.ep_group, module.linear_out.weight


def _chunks(model: Model) -> Sequence[torch.nn.Module]:
    return [model] if isinstance(model, torch.nn.Module) else model


def _adapter_class() -> Any:
    return importlib.import_module(_UTILS).ParallelLinearAdapter


def _landed() -> bool:
    utils = importlib.import_module(_UTILS)
    return all(hasattr(utils, name) for name in _NAMES)


def _apply(changes: Changes, settings: Any) -> None:
    for function in (enable_expert_parallel_grad_sync_in_finalize, finalize_model_grads_with_expert_adapter_sync):
        changes.add(f"{_UTILS}.{function.__name__}", function)


_KNOWN = "megatron-bridge 0.6.2"

PATCH = Patch(
    name="bridge_peft_names",
    why="two functions that SkyRL imports and released Megatron-Bridge lacks: expert adapters' gradients over EP",
    scope="trainer",
    targets=(
        Target(f"{_ADAPTER}._uses_grouped_expert_sharding", {_KNOWN: Fingerprint("(self)", "5b030e6b6f9e8732")}),
        Target(f"{_ADAPTER}._allreduce_shared_expert_grad", {_KNOWN: Fingerprint("(self, grad)", "60535adb3f0d7fe8")}),
        Target(
            f"{_ADAPTER}._register_shared_expert_grad_sync_hooks", {_KNOWN: Fingerprint("(self)", "6f81f51facaeb1f6")}
        ),
        Target(
            "megatron.core.distributed.finalize_model_grads",
            {"megatron-core 0.19.2": Fingerprint("(model, num_tokens=…, pg_collection=…, force_all_reduce=…)")},
        ),
    ),
    landed=_landed,
    apply=_apply,
)
