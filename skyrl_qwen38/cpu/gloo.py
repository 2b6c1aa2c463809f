"""nccl process groups of torch.distributed, carried by gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

REASONS: dict[str, str] = {
    "torch.distributed.init_process_group": "SkyRL asks for 'cpu:gloo,cuda:nccl'; every group is gloo",
    "torch.distributed.new_group": "megatron.core asks for nccl groups with nccl options",
    "torch.distributed.barrier": "device_ids= is for nccl only",
    "torch.distributed.all_to_all_single": "the MoE dispatcher moves split sizes to a list only on a GPU",
}


def _split_sizes(sizes: Sequence[int] | torch.Tensor | None) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


def redirect() -> None:
    """Replaces every name of :data:`REASONS`, in ``torch.distributed`` and where it is defined."""
    init_process_group, new_group = dist.init_process_group, dist.new_group
    barrier, all_to_all_single = dist.barrier, dist.all_to_all_single

    @functools.wraps(init_process_group)
    def init_process_group_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init_process_group("gloo", *args, **kwargs)

    @functools.wraps(new_group)
    def new_group_gloo(
        ranks: list[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> dist.ProcessGroup:
        kwargs.pop("device_id", None)
        return new_group(ranks, timeout, "gloo", None, *args, **kwargs)

    @functools.wraps(barrier)
    def barrier_gloo(group: dist.ProcessGroup | None = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    @functools.wraps(all_to_all_single)
    def all_to_all_single_gloo(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | torch.Tensor | None = None,
        input_split_sizes: Sequence[int] | torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        out_sizes, in_sizes = _split_sizes(output_split_sizes), _split_sizes(input_split_sizes)
        return all_to_all_single(output, input, out_sizes, in_sizes, *args, **kwargs)

    replacements: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("init_process_group", init_process_group_gloo),
        ("new_group", new_group_gloo),
        ("barrier", barrier_gloo),
        ("all_to_all_single", all_to_all_single_gloo),
    )
    for name, replacement in replacements:
        setattr(dist, name, replacement)
        setattr(distributed_c10d, name, replacement)
