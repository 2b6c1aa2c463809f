#!/usr/bin/env bash
# The main job: GRPO of a tiny qwen4_exp on two-digit additions, on a machine without a GPU.
#
#   bash recipes/run_arithmetic_tiny_cpu.sh [key.path=value ...]
#
# Three policy workers (Megatron-Core over gloo, EP=3), rollouts by Transformers, fp32. Sets up .venv on the first start.
# Settings go to SkyRL and win over those below. Environment:
#   SEED                   of checkpoint, data and training (default 0)
#   RUN_NAME               folder under outputs/ (default arithmetic-tiny-cpu-seed$SEED); an unfinished run is resumed
#   FRESH=1                start a new run even if an unfinished one of that name is there
#   SKYRL_QWEN38_OUTPUTS   where runs go (default outputs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SKYRL_QWEN38_STARTED_AT=${EPOCHREALTIME/,/.}

SEED=${SEED:-0}
OUTPUTS=${SKYRL_QWEN38_OUTPUTS:-outputs}
bash ci/bootstrap.sh cpu
PYTHON=.venv/bin/python

MODEL=$OUTPUTS/models/tiny-seed$SEED
DATA=$OUTPUTS/data/arithmetic-seed$SEED
[ -e "$MODEL/tiny.json" ] || .venv/bin/skyrl-qwen38 make-tiny "$MODEL" --seed "$SEED"
[ -e "$DATA/heldout.jsonl" ] || $PYTHON -m skyrl_qwen38.arithmetic "$DATA" --seed "$SEED"
RUN=$($PYTHON -m skyrl_qwen38.runs "$OUTPUTS" "${RUN_NAME:-arithmetic-tiny-cpu-seed$SEED}")

if [ -n "${WANDB_API_KEY:-}" ]; then LOGGER=wandb; else LOGGER=tensorboard; fi
export TENSORBOARD_DIR=$RUN/tensorboard WANDB_DIR=$RUN
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0
# A tensor shape that comes once is not worth a cached kernel: without the bound a worker grows by 25 MB a step.
export ONEDNN_PRIMITIVE_CACHE_CAPACITY=8

POLICY=trainer.policy.megatron_config
echo "[set-up] importing SkyRL"
exec $PYTHON -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=skyrl_qwen38.entrypoints.grpo \
  trainer.qwen38.device=cpu trainer.qwen38.run_dir="$RUN" trainer.qwen38.max_logprob_abs_diff=1e-5 trainer.bf16=false \
  trainer.qwen38.distributed_timeout_minutes=3 \
  trainer.policy.model.path="$MODEL" trainer.policy.language_model_only=true trainer.ref.language_model_only=true \
  generator.inference_engine.language_model_only=true trainer.seed="$SEED" \
  data.train_data="['$DATA/train.jsonl']" data.val_data="['$DATA/heldout.jsonl']" \
  data.dataloader.num_workers=0 data.dataloader.persistent_workers=false \
  trainer.strategy=megatron trainer.placement.colocate_all=false trainer.placement.policy_num_nodes=1 \
  trainer.placement.policy_num_gpus_per_node=3 $POLICY.expert_model_parallel_size=3 $POLICY.expert_tensor_parallel_size=1 \
  $POLICY.moe_grouped_gemm=false $POLICY.ddp_config.average_in_collective=false \
  trainer.gradient_checkpointing=false trainer.flash_attn=false trainer.remove_microbatch_padding=true \
  trainer.use_expandable_segments=false trainer.enable_ray_gpu_monitor=false \
  generator.inference_engine.enable_ray_prometheus_stats=false generator.inference_engine.num_engines=1 \
  trainer.algorithm.advantage_estimator=grpo trainer.algorithm.use_kl_loss=false \
  trainer.epochs=100 trainer.max_training_steps=20 trainer.train_batch_size=48 trainer.policy_mini_batch_size=48 \
  trainer.micro_train_batch_size_per_gpu=128 trainer.micro_forward_batch_size_per_gpu=128 \
  trainer.policy.optimizer_config.lr=1e-3 trainer.policy.optimizer_config.num_warmup_steps=0 \
  generator.batched=true generator.n_samples_per_prompt=8 trainer.max_prompt_length=16 generator.max_input_length=16 \
  generator.sampling_params.max_generate_length=8 generator.eval_sampling_params.max_generate_length=8 \
  generator.eval_sampling_params.temperature=0 \
  trainer.eval_batch_size=320 trainer.eval_interval=1 trainer.eval_before_train=true \
  trainer.ckpt_interval=1 trainer.max_ckpts_to_keep=2 trainer.resume_mode=latest \
  trainer.ckpt_path="$RUN/checkpoints" trainer.export_path="$RUN/export" trainer.log_path="$RUN/logs" \
  trainer.project_name=skyrl-qwen38 trainer.run_name="$(basename "$RUN")" trainer.logger=$LOGGER "$@"
