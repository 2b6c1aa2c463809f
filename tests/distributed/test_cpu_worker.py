"""The CPU policy worker on three ranks, EP=3, with a real rollout engine on rank 0 and without Ray."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skyrl_qwen38.arithmetic import questions
from tests.ranks import RankError, RankPool

RANKS = 3
ROLLOUTS = 16  # a rank


def _settings(checkpoint: Path, bf16: bool) -> list[str]:
    policy = "trainer.policy.megatron_config"
    return [
        f"trainer.policy.model.path={checkpoint}",
        f"trainer.bf16={str(bf16).lower()}",
        "trainer.qwen38.device=cpu",
        "trainer.qwen38.distributed_timeout_minutes=2",
        "trainer.strategy=megatron",
        "trainer.placement.colocate_all=false",
        f"trainer.placement.policy_num_gpus_per_node={RANKS}",
        f"{policy}.expert_model_parallel_size={RANKS}",
        f"{policy}.moe_grouped_gemm=false",
        f"{policy}.ddp_config.average_in_collective=false",
        "trainer.policy.language_model_only=true",
        "generator.inference_engine.language_model_only=true",
        "trainer.flash_attn=false",
        "trainer.gradient_checkpointing=false",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.train_batch_size=16",
        "trainer.policy_mini_batch_size=16",
        "generator.n_samples_per_prompt=3",
        "trainer.policy.optimizer_config.lr=1e-3",
        "trainer.policy.optimizer_config.num_warmup_steps=0",
        "trainer.logger=console",
        "trainer.max_prompt_length=16",
        "generator.max_input_length=16",
        "generator.sampling_params.max_generate_length=6",
    ]


class _LocalClient:
    """The rollout client's one call, answered by an engine in this process; keeps what was sent."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.sent = engine, {}

    async def load_weights(self, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.sent = weights
        return self.engine.load_weights(weights)


class _Run:
    """Worker, engine and one batch of rollouts on this rank."""

    def __init__(self, rank: int, checkpoint: Path, bf16: bool) -> None:
        os.environ["SKYRL_QWEN38_DEVICE"] = "cpu"
        from skyrl_qwen38.config import parse_args
        from skyrl_qwen38.cpu.rollout import TransformersEngine
        from skyrl_qwen38.cpu.worker import CpuPolicyWorker

        self.cfg = parse_args(_settings(checkpoint, bf16))
        address = {"master_addr": "127.0.0.1", "master_port": 1}  # not used: the pool's group is there already
        self.worker = CpuPolicyWorker(
            cfg=self.cfg.trainer, world_size=RANKS, rank=rank, local_rank=rank, sequence_parallel_size=1, **address
        )
        self.worker.init_worker_process_group()
        self.worker.init_model(str(checkpoint), num_training_steps=10)
        dtype = self.cfg.generator.inference_engine.model_dtype
        self.client = _LocalClient(TransformersEngine(str(checkpoint), dtype, seed=0) if rank == 0 else None)
        self.rank = rank

    def sync(self) -> None:
        engine = self.cfg.generator.inference_engine
        if not hasattr(self.worker, "_sync_checked"):
            asyncio.run(self.worker.init_weight_sync_state(self.client, engine))
        asyncio.run(self.worker.broadcast_to_inference_engines(None, engine))

    def rollouts(self) -> Any:
        """Answers to this rank's questions, as SkyRL's trainer hands a rank its part."""
        from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
        from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

        from skyrl_qwen38.cpu.rollout import Request

        asked = [[{"role": "user", "content": q.text}] for q in questions("train")[: RANKS * ROLLOUTS]]
        prompts = self.worker.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        holder: list = [None]
        if self.rank == 0:
            requests = [Request(tuple(prompt), f"{i}") for i, prompt in enumerate(prompts)]
            holder = [self.client.engine.generate(requests, {"max_tokens": 6, "temperature": 1.0})]
        dist.broadcast_object_list(holder, src=0)
        own = holder[0][self.rank :: RANKS]
        sequences, attention_mask, response_mask, _, loss_mask, logprobs, *_ = (
            convert_prompts_responses_to_batch_tensors(
                0,
                prompts[self.rank :: RANKS],
                [r.token_ids for r in own],
                [[0.0] * len(r.token_ids) for r in own],
                [[1] * len(r.token_ids) for r in own],
                [r.logprobs for r in own],
            )
        )
        batch = TrainingInputBatch(
            {
                "sequences": sequences,
                "attention_mask": attention_mask,
                "response_mask": response_mask,
                "loss_mask": loss_mask,
                "rollout_logprobs": logprobs,
                "action_log_probs": logprobs.clone(),
                "advantages": torch.randn(loss_mask.shape, generator=torch.Generator().manual_seed(self.rank)),
            }
        )
        batch.metadata = {"response_length": response_mask.shape[1], "global_step": 1}
        return batch

    def difference(self) -> float:
        """Mean |log-prob difference| of the response tokens of all ranks."""
        batch = self.rollouts()
        trained = self.worker._forward_logprobs(batch.select(["sequences", "attention_mask"], ["response_length"]))
        differences = (batch["rollout_logprobs"] - trained)[batch["loss_mask"] > 0].abs()
        total = torch.tensor([differences.sum(), differences.numel()])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def step(self) -> float:
        self.worker.forward_backward(self.rollouts())
        return self.worker.optim_step()


def _time_limit() -> float:
    """Seconds after which a collective of the expert-parallel group gives up."""
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _train(rank: int, world_size: int, checkpoint: Path, bf16: bool) -> dict[str, Any]:
    run = _Run(rank, checkpoint, bf16)
    run.sync()
    differences = [run.difference()]
    norm = run.step()
    stale = run.difference()
    run.sync()
    differences.append(run.difference())
    model, optimizers = run.worker.actor_module[0], run.worker.optimizer.chained_optimizers
    return {
        "differences": differences,
        "stale": stale,
        "norm": norm,
        "parameters": {str(p.dtype) for p in model.parameters()},
        "main gradients": {str(p.main_grad.dtype) for p in model.parameters() if p.requires_grad},
        "adam": {str(v.dtype) for o in optimizers for s in o.optimizer.state.values() for v in s.values()},
        "adam states": sum(len(o.optimizer.state) for o in optimizers),
        "sent": {str(tensor.dtype) for tensor in run.client.sent.values()},
        "names": sorted(run.client.sent),
        "time limit": _time_limit(),
    }


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tiny_checkpoint: Path) -> list[dict[str, Any]]:
    return ranks.run(_train, tiny_checkpoint, False, world_size=RANKS, timeout=240)


def test_fp32_means_fp32_everywhere(trained):
    for result in trained:
        for what in ("parameters", "main gradients", "adam"):
            assert result[what] == {"torch.float32"}, what
        assert result["adam states"] > 0
    assert trained[0]["sent"] == {"torch.float32", "torch.int64"}


def test_trainer_and_engine_agree_before_and_after_a_step(trained):
    for result in trained:
        assert result["norm"] > 0
        assert max(result["differences"]) <= 1e-5
        assert result["stale"] > 1e-3, "the step changed the trainer's model, and only the sync brings it to the engine"


def test_every_trained_tensor_is_sent_and_only_rank_0_sends(trained):
    assert sum(".mlp.experts." in name for name in trained[0]["names"]) == 8  # packed: two a layer
    assert not any("ngram_embedding" in name for name in trained[0]["names"])
    assert trained[1]["names"] == trained[2]["names"] == []


def test_a_collective_gives_up_after_the_configured_minutes(trained):
    assert {result["time limit"] for result in trained} == {120.0}


def test_bf16_stays_within_its_bound(ranks: RankPool, tiny_checkpoint: Path):
    for result in ranks.run(_train, tiny_checkpoint, True, world_size=RANKS, timeout=240):
        assert result["parameters"] == {"torch.bfloat16"}
        assert max(result["differences"]) <= 0.01


def _trap(rank: int, world_size: int, checkpoint: Path, trap: str) -> float:
    """The difference with one of the faults that raise no error of their own."""
    run = _Run(rank, checkpoint, False)
    export = run.worker.bridge.export_hf_weights
    if trap == "experts of one rank":
        # What a bridge sends that gathers no experts over EP: its own, in the places of all.
        def own_experts(model: Any, **settings: Any) -> Any:
            for name, tensor in export(model, **settings):
                yield name, torch.cat([tensor[:2]] * RANKS) if ".mlp.experts." in name else tensor

        run.worker.bridge.export_hf_weights = own_experts
    if trap == "rotary frequencies" and rank == 0:
        run.client.engine.model.model.rotary_emb.inv_freq.zero_()
    from skyrl_qwen38.qwen4_exp.qsa import attention

    attend, functional = attention.F.scaled_dot_product_attention, attention.F
    if trap == "bidirectional mask":
        attention.F = SimpleNamespace(
            scaled_dot_product_attention=lambda *tensors, is_causal, **kw: attend(*tensors, is_causal=False, **kw)
        )
    try:
        run.sync()
        return run.difference()
    finally:
        attention.F = functional


@pytest.mark.parametrize("trap", ["bidirectional mask", "experts of one rank", "rotary frequencies"])
def test_each_silent_trap_shows_in_the_difference(ranks: RankPool, tiny_checkpoint: Path, trap):
    assert max(ranks.run(_trap, tiny_checkpoint, trap, world_size=RANKS, timeout=240)) > 1e-4


def _incomplete_sync(rank: int, world_size: int, checkpoint: Path) -> None:
    run = _Run(rank, checkpoint, False)
    export = run.worker.bridge.export_hf_weights
    run.worker.bridge.export_hf_weights = lambda model, **kw: (
        (name, tensor) for name, tensor in export(model, **kw) if not name.endswith("layers.3.self_attn.o_proj.weight")
    )
    run.sync()


def test_a_tensor_that_is_not_sent_stops_every_rank_at_the_first_sync(ranks: RankPool, tiny_checkpoint: Path):
    with pytest.raises(RankError) as raised:
        ranks.run(_incomplete_sync, tiny_checkpoint, world_size=RANKS, timeout=240)
    assert len(raised.value.errors) == RANKS
    assert "o_proj.weight" in str(raised.value)
    assert "not frozen and were not sent" in str(raised.value)


def _optimizer_state(rank: int, world_size: int, checkpoint: Path) -> dict[str, Any]:
    run = _Run(rank, checkpoint, False)
    from skyrl_qwen38.cpu import adam

    parts = run.worker.optimizer.chained_optimizers
    steps = lambda: [state["step"] for part in parts for state in part.optimizer.state.values()]  # noqa: E731
    seen = {}
    try:
        parts[0].state_dict()
    except AssertionError:
        seen["fresh"] = "refused"
    adam.create_state(run.worker.optimizer)
    seen["created"] = {step.item() for step in steps()}
    parts[0].state_dict()
    run.sync()
    run.step()
    for part in parts:
        part.load_state_dict(part.state_dict())
    seen["shared"] = len(steps()) - len({step.data_ptr() for step in steps()})
    adam.separate_steps(run.worker.optimizer)
    seen["still shared"] = len(steps()) - len({step.data_ptr() for step in steps()})
    run.step()
    seen["counted"] = {step.item() for step in steps()}
    return seen


def test_adam_has_a_state_before_the_first_step_and_counts_each_step_once_after_loading(
    ranks: RankPool, tiny_checkpoint: Path
):
    for seen in ranks.run(_optimizer_state, tiny_checkpoint, world_size=RANKS, timeout=240):
        assert seen["fresh"] == "refused"
        assert seen["created"] == {0.0}
        assert seen["shared"] > 0, "megatron.core gives every parameter its own counter: cpu/adam.py can go"
        assert seen["still shared"] == 0
        assert seen["counted"] == {2.0}


def _two_steps(run: _Run) -> list[float]:
    run.sync()
    return [measure for _ in range(2) for measure in (run.step(), run.difference())]


def _save_and_go_on(rank: int, world_size: int, checkpoint: Path, folder: Path) -> list[float]:
    run = _Run(rank, checkpoint, False)
    run.sync()
    run.step()
    run.worker.save_checkpoint(str(folder), tokenizer=run.worker.tokenizer)
    return _two_steps(run)


def _resume(rank: int, world_size: int, checkpoint: Path, folder: Path) -> list[float]:
    run = _Run(rank, checkpoint, False)
    run.worker.load_checkpoint(str(folder), load_optimizer_states=True, load_lr_scheduler_states=True)
    return _two_steps(run)


def test_a_resumed_worker_goes_on_bit_for_bit(ranks: RankPool, tiny_checkpoint: Path, tmp_path: Path):
    arguments = (tiny_checkpoint, tmp_path / "step_1")
    unbroken = ranks.run(_save_and_go_on, *arguments, world_size=RANKS, timeout=240)
    assert ranks.run(_resume, *arguments, world_size=RANKS, timeout=240) == unbroken
