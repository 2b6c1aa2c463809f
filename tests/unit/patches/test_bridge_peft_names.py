"""Gradients of shared expert adapters over EP=2, with Megatron-Bridge's own adapter class and megatron-core's DDP."""

import pytest
import torch

EP = 2
IN, OUT, RANK = 6, 4, 2


def _set_up() -> None:
    from skyrl_qwen38 import cpu

    cpu.install()
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=EP)


def _adapter(base_linear: str, seed: int = 0) -> torch.nn.Module:
    """LoRA pair of an expert linear; equal on all ranks."""
    from megatron.bridge.peft.utils import ParallelLinearAdapter
    from megatron.core import tensor_parallel
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor_parallel.model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        num_layers=1, hidden_size=IN, num_attention_heads=1, num_moe_experts=4, expert_model_parallel_size=EP
    )
    adapter = ParallelLinearAdapter(
        IN,
        OUT,
        RANK,
        base_linear_name=base_linear,
        activation="identity",
        is_expert=True,
        model_parallel_config=config,
        alpha=RANK,
    )
    generator = torch.Generator().manual_seed(seed)
    for weight in adapter.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    return adapter


def _inputs(rank: int, micro_batch: int) -> torch.Tensor:
    return torch.randn(3, IN, generator=torch.Generator().manual_seed(10 * rank + micro_batch))


def _grads(adapter: torch.nn.Module, attribute: str = "grad") -> list[torch.Tensor]:
    return [getattr(weight, attribute).clone() for weight in adapter.parameters()]


def _own_grads(rank: int, base_linear: str, micro_batches: int) -> list[torch.Tensor]:
    """Reference: the two matrices as plain tensors, in float64, without Megatron."""
    from itertools import starmap

    adapter = _adapter(base_linear)
    a, b = (w.detach().double().requires_grad_() for w in (adapter.linear_in.weight, adapter.linear_out.weight))
    sum(
        (x.double() @ a.T @ b.T).square().sum() for x in starmap(_inputs, [(rank, m) for m in range(micro_batches)])
    ).backward()
    return [a.grad.float(), b.grad.float()]


def _backward(adapter: torch.nn.Module, rank: int, micro_batches: int) -> None:
    for micro_batch in range(micro_batches):
        adapter(_inputs(rank, micro_batch)).square().sum().backward()


def _summed_once_at_the_end(rank: int, world_size: int, base_linear: str) -> dict[str, list[torch.Tensor]]:
    _set_up()
    from skyrl_qwen38.patches import bridge_peft_names

    from skyrl_qwen38 import patching

    patching.apply([bridge_peft_names.PATCH], "trainer", {})
    try:
        from megatron.bridge.peft.utils import enable_expert_parallel_grad_sync_in_finalize

        adapter = _adapter(base_linear)
        enable_expert_parallel_grad_sync_in_finalize([adapter])
        _backward(adapter, rank, micro_batches=2)
        before = _grads(adapter)
        bridge_peft_names._sum_over_expert_parallel([adapter])
        reference = [_own_grads(r, base_linear, 2) for r in range(world_size)]
        return {"before": before, "after": _grads(adapter), "own": reference[rank], "sum": _total(reference)}
    finally:
        patching.undo("bridge_peft_names")


def _total(per_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [sum(grads) for grads in zip(*per_rank, strict=True)]


def _assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base_linear", ["decoder.layers.0.mlp.experts.linear_fc1"])
def test_gradients_stay_local_in_backward_and_are_summed_over_ep_at_the_end(ranks, base_linear):
    for result in ranks.run(_summed_once_at_the_end, base_linear, world_size=EP, timeout=150):
        _assert_close(result["before"], result["own"])
        _assert_close(result["after"], result["sum"])


def test_an_adapter_of_one_expert_is_left_alone(ranks):
    for result in ranks.run(
        _summed_once_at_the_end, "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1", world_size=EP, timeout=150
    ):
        _assert_close(result["before"], result["own"])
        _assert_close(result["after"], result["own"])


def _unpatched(rank: int, world_size: int) -> tuple[str, bool]:
    _set_up()
    from importlib import import_module

    adapter = _adapter("decoder.layers.0.mlp.experts.linear_fc1")
    _backward(adapter, rank, micro_batches=1)
    summed_in_backward = torch.allclose(adapter.linear_out.weight.grad, _own_grads(rank, "x.experts.linear_fc1", 1)[1])
    try:
        import_module("megatron.bridge.peft.utils").finalize_model_grads_with_expert_adapter_sync
    except AttributeError as error:
        return str(error), not summed_in_backward
    return "", not summed_in_backward


def test_without_the_patch_the_names_are_missing_and_every_backward_runs_a_collective(ranks):
    """Why the patch exists; when this fails, upstream has changed and the ledger says what to do."""
    for missing, summed_in_backward in ranks.run(_unpatched, world_size=EP, timeout=150):
        assert "finalize_model_grads_with_expert_adapter_sync" in missing
        assert summed_in_backward


def _rank_without_tokens(rank: int, world_size: int) -> dict[str, list[torch.Tensor]]:
    _set_up()
    from skyrl_qwen38.patches import bridge_peft_names

    name = "decoder.layers.0.mlp.experts.linear_fc2"
    adapter = _adapter(name)
    bridge_peft_names.enable_expert_parallel_grad_sync_in_finalize(adapter)
    _backward(adapter, rank, micro_batches=2 if rank == 0 else 0)
    bridge_peft_names._sum_over_expert_parallel(adapter)
    return {"after": _grads(adapter), "sum": _own_grads(0, name, 2)}


def test_a_rank_without_micro_batches_takes_part(ranks):
    """With the hooks of released Megatron-Bridge its peer would wait in backward for ever."""
    for result in ranks.run(_rank_without_tokens, world_size=EP, timeout=150):
        _assert_close(result["after"], result["sum"])


def _through_ddp(
    rank: int, world_size: int, overlap: bool, distributed_optimizer: bool
) -> dict[str, list[torch.Tensor]]:
    """The whole call that SkyRL makes, on a model that DDP wraps as SkyRL's does."""
    _set_up()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import MegatronModule
    from skyrl_qwen38.patches import bridge_peft_names

    name = "decoder.layers.0.mlp.experts.linear_fc1"
    adapter = _adapter(name)

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
    adapter.config.finalize_model_grads_func = None
    bridge_peft_names.enable_expert_parallel_grad_sync_in_finalize([model])
    model.zero_grad_buffer()
    with model.no_sync():
        adapter(_inputs(rank, 0)).square().sum().backward()
    adapter(_inputs(rank, 1)).square().sum().backward()
    bridge_peft_names.finalize_model_grads_with_expert_adapter_sync([model])
    # DDP scales the gradient of expert parameters by 1 / (all data-parallel ranks).
    expected = [grad / world_size for grad in _total([_own_grads(r, name, 2) for r in range(world_size)])]
    return {"after": _grads(adapter, "main_grad"), "sum": expected}


@pytest.mark.parametrize("overlap", [False, True], ids=["after-backward", "overlapped"])
@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_the_optimizer_gets_the_sum_over_ep_through_ddp(ranks, overlap, distributed_optimizer):
    for result in ranks.run(_through_ddp, overlap, distributed_optimizer, world_size=EP, timeout=150):
        _assert_close(result["after"], result["sum"])
