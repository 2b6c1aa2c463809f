"""An error of one rank becomes an error of all of them, so that none waits for a peer that has stopped."""

from collections.abc import Callable

import torch.distributed as dist


class RankFailure(RuntimeError):
    """Something failed on some ranks of a group, and all of them raise this.

    Attributes:
        failures: global rank → what failed there.
    """

    def __init__(self, failures: dict[int, str]):
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in failures.items()))
        self.failures = failures

    def __reduce__(self):
        return RankFailure, (self.failures,)


def world_size_of(group: dist.ProcessGroup | None) -> int:
    """Ranks of the group; without one, of the default group; 1 where nothing is initialised."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank in the group, as `world_size_of` understands it."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def agree[T](group: dist.ProcessGroup | None, action: Callable[[], T]) -> T:
    """Does `action`, which makes no collective call, on every rank of the group, and raises on all if one failed.

    One collective (none for a single rank). Where the action itself failed here, that is the new error's cause.

    Raises:
        RankFailure: the action raised on at least one rank.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    raise_together(group, error)
    return result


def raise_together(group: dist.ProcessGroup | None, error: Exception | None) -> None:
    """Raises a `RankFailure` on all ranks if `error` is given on one. One collective; none for a single rank."""
    causes = gather_objects(group, None if error is None else str(error) or repr(error))
    failures = {global_rank(group, rank): cause for rank, cause in enumerate(causes) if cause is not None}
    if failures:
        raise RankFailure(failures) from error


def agree_on(group: dist.ProcessGroup | None, what: str, value: object) -> None:
    """Raises on all ranks if they do not all have the same value. One collective; none for a single rank.

    Raises:
        RankFailure: naming each rank's value.
    """
    values = gather_objects(group, value)
    if any(other != values[0] for other in values):
        raise RankFailure({global_rank(group, rank): f"{what} is {other}" for rank, other in enumerate(values)})


def gather_objects[T](group: dist.ProcessGroup | None, value: T) -> list[T]:
    """The values of all ranks of the group, in rank order."""
    if world_size_of(group) == 1:
        return [value]
    values: list[T | None] = [None] * world_size_of(group)
    dist.all_gather_object(values, value, group=group)
    return values


def global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """The number that the whole job gives a rank of the group."""
    return dist.get_global_rank(group, rank) if group is not None else rank
