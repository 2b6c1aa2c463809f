"""Splits the n-gram table over the expert-parallel group by contiguous rows instead of by heads.

The split by heads needs EP to divide the heads (16 in the released model) and keeps whole heads on a rank; the split by
rows works with any EP. The two return equal rows for equal ids, so only where the rows live differs.
"""

from typing import Any

from skyrl_qwen38.patching import Changes, Fingerprint, Patch, Target

_BUILD = "skyrl_qwen38.qwen4_exp.provider.build_ple_table"


def _apply(changes: Changes, settings: Any) -> None:
    from skyrl_qwen38.ple import RowShardedTable

    storage = settings.ple.storage

    def build_ple_table(source: Any, hasher: Any, group: Any) -> RowShardedTable:
        return RowShardedTable.load(source, hasher, group=group, storage=storage)

    changes.replace(_BUILD, build_ple_table)


PATCH = Patch(
    name="ple_row_shard",
    why="splits the n-gram table over EP by rows, which works for any EP; the split by heads needs EP to divide them",
    scope="trainer",
    targets=(Target(_BUILD, {"skyrl-qwen38": Fingerprint("(source, hasher, group)")}),),
    apply=_apply,
)
