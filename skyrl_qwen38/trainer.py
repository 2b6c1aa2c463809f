"""SkyRL's GRPO experiment for `qwen4_exp`: which workers, which rollout engine, and what is reported of each step.

Runs in SkyRL's entry task. What happens is told to the driver as events, dictionaries with a ``kind``: ``phase`` (what
is being set up), ``patches``, ``start`` (the step that training goes on from) and ``log`` (the metrics of a step).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl
from skyrl.train.utils.trainer_utils import cleanup_old_checkpoints

from skyrl_qwen38 import workers  # prepares this process too: SkyRL imports its Megatron workers here
from skyrl_qwen38.logprob_bound import LOGPROB_DIFFERENCE, check_logprob_difference

Emit = Callable[[dict[str, Any]], None]


class EventCallback(TrainingCallback):
    """Tells the driver where training starts and what each step logged."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def on_train_start(self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl) -> None:
        step, total = callback_input.global_step, callback_input.total_steps
        self._emit({"kind": "start", "step": step, "total_steps": total})

    def on_log(self, trainer: RayPPOTrainer, callback_input: CallbackInput, control: TrainingControl) -> None:
        metrics = {name: float(value) for name, value in callback_input.logs.items() if isinstance(value, int | float)}
        self._emit({"kind": "log", "step": callback_input.global_step, "metrics": metrics})


class Qwen38Trainer(RayPPOTrainer):
    """SkyRL's trainer with this project's workers; it stops when trainer and rollout disagree."""

    def __init__(self, emit: Emit, **kwargs: Any) -> None:
        super().__init__(**kwargs, callbacks=[EventCallback(emit)])
        self._emit = emit

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        if self.cfg.trainer.qwen38.device == "cpu":
            from skyrl_qwen38.cpu.worker import CpuPolicyWorker as policy
            from skyrl_qwen38.cpu.worker import CpuRefWorker as reference
        else:
            policy, reference = workers.PolicyWorker, workers.RefWorker
        placement = self.cfg.trainer.placement
        count = placement.policy_num_nodes * placement.policy_num_gpus_per_node
        self._emit({"kind": "phase", "text": f"starting {count} policy workers and loading the model into Megatron"})
        super().build_models(ray.remote(num_gpus=1)(policy), CriticWorker, ray.remote(num_gpus=1)(reference))
        groups = [group for group in (self.policy_model, self.ref_model) if group is not None]
        actors = [actor for group in groups for actor in group._actor_handlers]
        reports = ray.get([actor.patch_reports.remote() for actor in actors])
        self._emit({"kind": "patches", "reports": reports})

    def init_weight_sync_state(self) -> None:
        self._emit({"kind": "phase", "text": "sending the weights to the rollout engine"})
        super().init_weight_sync_state()

    def _cleanup_old_checkpoints(self) -> None:
        # SkyRL runs this in a Ray task on every node, which imports all of it anew; a CPU run has one node, this one.
        if self.cfg.trainer.qwen38.device == "cpu":
            cleanup_old_checkpoints(self.cfg.trainer.ckpt_path, self.cfg.trainer.max_ckpts_to_keep)
        else:
            super()._cleanup_old_checkpoints()

    def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
        training_input = super().fwd_logprobs_values_reward(training_input)
        bound = self.cfg.trainer.qwen38.max_logprob_abs_diff
        check_logprob_difference(self.global_step, self.all_metrics.get(LOGPROB_DIFFERENCE), bound)
        return training_input


class Qwen38Experiment(BasePPOExp):
    """SkyRL's experiment, with the CPU's rollout engine and datasets where ``trainer.qwen38.device=cpu``."""

    def __init__(self, cfg: SkyRLTrainConfig, emit: Emit) -> None:
        self._emit = emit
        self._on_cpu = cfg.trainer.qwen38.device == "cpu"
        super().__init__(cfg)

    def _dataset(self, files: list[str]) -> PromptDataset:
        trainer = self.cfg.trainer
        # SkyRL's eight preprocessing processes cost more than they save where importing is most of the work.
        return PromptDataset(files, self.tokenizer, trainer.max_prompt_length, num_workers=0)

    def get_train_dataset(self) -> PromptDataset:
        return self._dataset(self.cfg.data.train_data) if self._on_cpu else super().get_train_dataset()

    def get_eval_dataset(self) -> PromptDataset | None:
        wanted = self.cfg.trainer.eval_interval > 0 and self.cfg.data.val_data
        return self._dataset(self.cfg.data.val_data) if self._on_cpu and wanted else super().get_eval_dataset()

    def get_inference_client(self) -> Any:
        if not self._on_cpu:
            return super().get_inference_client()
        from skyrl_qwen38.cpu.rollout import start_engine

        self._emit({"kind": "phase", "text": "starting the rollout engine (Transformers)"})
        engine = self.cfg.generator.inference_engine
        return start_engine(self.cfg.trainer.policy.model.path, engine.model_dtype, self.cfg.trainer.seed)

    def get_generator(self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: Any) -> GeneratorInterface:
        if not self._on_cpu:
            return super().get_generator(cfg, tokenizer, inference_engine_client)
        from skyrl_qwen38.cpu.rollout import RolloutGenerator

        return RolloutGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=cfg.trainer.policy.model.path,
        )

    def get_trainer(self, **kwargs: Any) -> Qwen38Trainer:
        return Qwen38Trainer(self._emit, **kwargs)
