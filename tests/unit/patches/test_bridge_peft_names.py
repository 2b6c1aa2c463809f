"""Gradients of shared expert adapters over EP=2, with Megatron-Bridge's own adapter class and megatron-core's DDP."""

from importlib import import_module

import pytest
import torch

from skyrl_qwen38 import patching
from skyrl_qwen38.patches.bridge_peft_names import (
    PATCH,
    _sum_over_expert_parallel,
    enable_expert_parallel_grad_sync_in_finalize,
    finalize_model_grads_with_expert_adapter_sync,
)

EP = 2
IN, OUT, RANK = 6, 4, 2
GROUPED = "decoder.layers.0.mlp.experts.linear_fc1"
ONE_EXPERT = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1"

Tensors = list[torch.Tensor]


def _weights() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(RANK, IN, generator=generator), torch.randn(OUT, RANK, generator=generator)]


def _inputs(rank: int, micro_batch: int) -> torch.Tensor:
    return torch.randn(3, IN, generator=torch.Generator().manual_seed(10 * rank + micro_batch))


def _reference(ranks: range, micro_batches: int) -> Tensors:
    """Sum over `ranks` of the gradients of Σ (x Aᵀ Bᵀ)², from the formula, in float64."""
    a, b = (weight.double().requires_grad_() for weight in _weights())
    for rank in ranks:
        for micro_batch in range(micro_batches):
            (_inputs(rank, micro_batch).double() @ a.T @ b.T).square().sum().backward()
    return [a.grad.float(), b.grad.float()]


def _adapter(base_linear: str) -> torch.nn.Module:
    """LoRA pair of an expert linear, equal on all ranks, in Megatron's groups of this process."""
    from skyrl_qwen38 import cpu

    cpu.install()
    from megatron.bridge.peft.utils import ParallelLinearAdapter
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(expert_model_parallel_size=EP)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    adapter = ParallelLinearAdapter(
        IN,
        OUT,
        RANK,
        base_linear_name=base_linear,
        activation="identity",
        is_expert=True,
        model_parallel_config=TransformerConfig(
            num_layers=1, hidden_size=IN, num_attention_heads=1, num_moe_experts=4, expert_model_parallel_size=EP
        ),
        alpha=RANK,
    )
    for parameter, weight in zip(adapter.parameters(), _weights(), strict=True):
        parameter.data = weight
    return adapter


def _backward(adapter: torch.nn.Module, rank: int, micro_batches: int) -> None:
    for micro_batch in range(micro_batches):
        adapter(_inputs(rank, micro_batch)).square().sum().backward()


def _grads(adapter: torch.nn.Module) -> Tensors:
    return [weight.grad.clone() for weight in adapter.parameters()]


def _assert_close(actual: Tensors, expected: Tensors) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def _before_and_after(rank: int, world_size: int, base_linear: str) -> tuple[Tensors, Tensors]:
    adapter = _adapter(base_linear)
    patching.apply([PATCH], "trainer", {})
    try:
        utils = import_module("megatron.bridge.peft.utils")
        utils.enable_expert_parallel_grad_sync_in_finalize([adapter])
        assert utils.finalize_model_grads_with_expert_adapter_sync is finalize_model_grads_with_expert_adapter_sync
    finally:
        patching.undo("bridge_peft_names")
    _backward(adapter, rank, micro_batches=2)
    before = _grads(adapter)
    _sum_over_expert_parallel([adapter])
    return before, _grads(adapter)


def test_gradients_stay_local_in_backward_and_are_summed_over_ep_at_the_end(ranks):
    for rank, (before, after) in enumerate(ranks.run(_before_and_after, GROUPED, world_size=EP, timeout=200)):
        _assert_close(before, _reference(range(rank, rank + 1), 2))
        _assert_close(after, _reference(range(EP), 2))


def test_an_adapter_of_one_expert_is_left_alone(ranks):
    for rank, (_, after) in enumerate(ranks.run(_before_and_after, ONE_EXPERT, world_size=EP, timeout=200)):
        _assert_close(after, _reference(range(rank, rank + 1), 2))


def _unpatched(rank: int, world_size: int) -> tuple[list[str], Tensors]:
    adapter = _adapter(GROUPED)
    _backward(adapter, rank, micro_batches=1)
    utils = import_module("megatron.bridge.peft.utils")
    ours = (enable_expert_parallel_grad_sync_in_finalize, finalize_model_grads_with_expert_adapter_sync)
    return [function.__name__ for function in ours if not hasattr(utils, function.__name__)], _grads(adapter)


def test_without_the_patch_the_names_are_missing_and_every_backward_runs_a_collective(ranks):
    """Why the patch exists; when this fails, upstream has changed and the ledger says what to do."""
    for missing, grads in ranks.run(_unpatched, world_size=EP, timeout=200):
        assert len(missing) == 2
        _assert_close(grads, _reference(range(EP), 1))


def _rank_without_micro_batches(rank: int, world_size: int) -> Tensors:
    adapter = _adapter(GROUPED)
    enable_expert_parallel_grad_sync_in_finalize(adapter)
    _backward(adapter, rank, micro_batches=2 if rank == 0 else 0)
    _sum_over_expert_parallel(adapter)
    return _grads(adapter)


def test_a_rank_without_micro_batches_takes_part(ranks):
    """With the hooks of released Megatron-Bridge its peer would wait in backward for ever."""
    for after in ranks.run(_rank_without_micro_batches, world_size=EP, timeout=200):
        _assert_close(after, _reference(range(1), 2))


def _through_ddp(rank: int, world_size: int, overlap: bool, distributed_optimizer: bool) -> Tensors:
    """The call that SkyRL makes, on a DDP-wrapped model; the gradients that the optimizer's shards hold together."""
    adapter = _adapter(GROUPED)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(adapter.config)
            self.adapter = adapter
            self.share_embeddings_and_output_weights = False

    model = DistributedDataParallel(
        adapter.config,
        DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, use_distributed_optimizer=distributed_optimizer, average_in_collective=False
        ),
        Model(),
    )
    enable_expert_parallel_grad_sync_in_finalize([model])
    model.zero_grad_buffer()
    with model.no_sync():
        _backward(adapter, rank, micro_batches=1)
    adapter(_inputs(rank, 1)).square().sum().backward()
    finalize_model_grads_with_expert_adapter_sync([model])

    (buffer,) = model.expert_parallel_buffers
    group = parallel_state.get_expert_data_parallel_group()
    shards = buffer.grad_data.chunk(group.size()) if distributed_optimizer else [buffer.grad_data] * group.size()
    collected = [torch.empty_like(shards[0]) for _ in shards]
    torch.distributed.all_gather(collected, shards[group.rank()].clone(), group=group)
    whole = torch.cat(collected) if distributed_optimizer else collected[0]
    places = [(*buffer.param_index_map[weight][:2], weight.shape) for weight in adapter.parameters()]
    return [whole[start:stop].view(shape) for start, stop, shape in places]


@pytest.mark.parametrize("overlap", [False, True], ids=["after-backward", "overlapped"])
@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("world_size", [EP, pytest.param(2 * EP, marks=pytest.mark.full)], ids=["edp1", "edp2"])
def test_the_optimizer_gets_the_sum_over_ep_and_edp(ranks, overlap, distributed_optimizer, world_size):
    # DDP scales the gradients of expert parameters by 1 / (all data-parallel ranks).
    expected = [grad / world_size for grad in _reference(range(world_size), 2)]
    for grads in ranks.run(_through_ddp, overlap, distributed_optimizer, world_size=world_size, timeout=290):
        _assert_close(grads, expected)
