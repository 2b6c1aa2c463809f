"""The bound on the log-prob difference: a run stops when trainer and rollout engine compute different models."""

from __future__ import annotations

LOGPROB_DIFFERENCE = "policy/rollout_train_logprobs_abs_diff_mean"
"""SkyRL's metric: mean over the response tokens of a step of |training log-prob - rollout log-prob|."""


class LogprobMismatch(RuntimeError):
    """The trainer and the rollout engine do not compute the same model."""


def check_logprob_difference(step: int, difference: float | None, bound: float) -> None:
    """Compares one step's difference with the bound.

    Args:
        step: for the message.
        difference: the metric :data:`LOGPROB_DIFFERENCE`, None if no token was trained on.
        bound: ``trainer.qwen38.max_logprob_abs_diff``.
    Raises:
        LogprobMismatch: ``difference`` exceeds ``bound`` or is NaN.
    """
    if difference is not None and not difference <= bound:
        raise LogprobMismatch(
            f"step {step}: the mean log-prob difference between trainer and rollout engine is {difference:.2e}, above "
            f"trainer.qwen38.max_logprob_abs_diff={bound:g}; compare both with `skyrl-qwen38 parity`"
        )
