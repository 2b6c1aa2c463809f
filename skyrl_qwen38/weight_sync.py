"""What the first weight sync must account for, whichever engine received it.

Imports no library, so that the driver can read a worker's error without importing Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence


class WeightSyncError(RuntimeError):
    """The rollout engine does not hold the weights that the trainer sent."""


def check_first_sync(missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Every tensor of the engine was received or is declared frozen, and every one sent has its place.

    Args:
        missing: names of tensors that the engine holds and was not sent.
        unexpected: names that it was sent and does not hold.
    Raises:
        WeightSyncError: with the names.
    """
    from skyrl_qwen38.qwen4_exp.bridge import is_frozen_hf_name

    stale = [name for name in missing if not is_frozen_hf_name(name)]
    if stale or unexpected:
        raise WeightSyncError(
            f"weight sync is incomplete: the engine holds {len(stale)} tensors that are not frozen and were not sent "
            f"({', '.join(stale[:3]) or 'none'}), and {len(unexpected)} tensors were sent that it does not hold "
            f"({', '.join(unexpected[:3]) or 'none'}); the bridge's mapping_registry must cover them"
        )
