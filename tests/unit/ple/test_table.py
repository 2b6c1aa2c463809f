"""The table in a single process, without torch.distributed."""

import ast
import sys
from pathlib import Path

import pytest
import torch

from skyrl_qwen38 import ple
from skyrl_qwen38.ple import HeadShardedTable, NgramHasher, RankFailure, RowShardedTable, TableSource


@pytest.mark.parametrize("kind", [RowShardedTable, HeadShardedTable])
def test_rows_without_a_process_group(table_checkpoint, tiny_hasher, kind):
    assert not torch.distributed.is_initialized()
    folder, whole = table_checkpoint()
    table = kind.load(TableSource.open(folder), tiny_hasher)
    ids = torch.tensor([[5, 6, 2, 7], [8, 8, 8, 8]])
    rows = table.start(ids).wait()
    assert torch.equal(rows, whole[tiny_hasher.row_ids(ids)])
    assert not rows.requires_grad
    assert table.stats()["bytes_sent"] == table.stats()["bytes_received"] == 0


def test_the_table_is_nothing_that_a_module_would_train_or_save(table_checkpoint, tiny_hasher):
    module = torch.nn.Module()
    module.table = RowShardedTable.load(table_checkpoint()[0], tiny_hasher)
    assert list(module.parameters()) == list(module.buffers()) == list(module.modules())[1:] == []
    assert module.state_dict() == {}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ngram_vocab_size_base": 503}, "has 2304 rows, but its configuration gives"),
        ({"seed": 1}, "layer_multipliers"),
        ({"vocab_size": 520}, "layer_multipliers"),
    ],
)
def test_a_table_of_another_configuration_is_refused(table_checkpoint, changed, message):
    arguments = {"vocab_size": 512, "eos_token_id": 2, "ngram_vocab_size_base": 101} | changed
    with pytest.raises(RankFailure, match=message):
        RowShardedTable.load(table_checkpoint()[0], NgramHasher(**arguments))


def test_the_package_imports_no_trainer():
    """Torch, the readers of its files and small tools suffice: a benchmark or a tool uses the table by itself."""
    readers = {"safetensors", "huggingface_hub", "httpx", "filelock", "psutil", "tqdm"}
    allowed = {"torch", *readers, *sys.stdlib_module_names}
    for path in Path(ple.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            for name in names:
                assert name.startswith("skyrl_qwen38.ple") or name.split(".")[0] in allowed, f"{path} imports {name}"
