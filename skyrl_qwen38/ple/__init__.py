"""The n-gram (PLE) embedding table of qwen4_exp: hashing, and a frozen table split over ranks. Needs torch only."""

from skyrl_qwen38.ple.agreement import RankFailure
from skyrl_qwen38.ple.checkpoint_files import TableSourceError
from skyrl_qwen38.ple.hashing import NgramHasher
from skyrl_qwen38.ple.head_sharded import HeadShardedTable
from skyrl_qwen38.ple.partition import RowPartition
from skyrl_qwen38.ple.source import TableSource
from skyrl_qwen38.ple.table import RowShardedTable

__all__ = [
    "HeadShardedTable",
    "NgramHasher",
    "RankFailure",
    "RowPartition",
    "RowShardedTable",
    "TableSource",
    "TableSourceError",
]
