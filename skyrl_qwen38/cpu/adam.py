"""torch's AdamW under megatron.core's distributed optimizer, which is written for Transformer Engine's FusedAdam.

FusedAdam counts steps once per parameter group, torch's AdamW once per parameter. Loading a checkpoint trips over the
difference twice; both functions are called around it. (megatron-core 0.19.2, ``optimizer/distrib_optimizer.py``:
``state_dict`` and ``load_state_dict``.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer


def _torch_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    chained: list[DistributedOptimizer] = (
        optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    )
    return (part.optimizer for part in chained if part.optimizer is not None)


def create_state(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter without state the state of step 0: ``state_dict`` asserts that a step is there."""
    for adam in _torch_optimizers(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter a step counter of its own.

    ``load_state_dict`` puts one tensor into the state of all parameters; AdamW then counts it up once a parameter, and
    the bias correction of the next update is that of a much later step, without an error.
    """
    for adam in _torch_optimizers(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()
