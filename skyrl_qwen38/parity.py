"""The trainer's model against Transformers, on the same tokens: what ``skyrl-qwen38 parity`` runs.

Transformers gets each document alone, in a process of its own that nothing is redirected in. The Megatron model runs
in EP processes over gloo, on the CPU and in fp32 whatever the machine has; every rank packs all documents into one
row, each rank in another order, so that their exchanges differ. All of them are compared.
"""

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, chain
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skyrl_qwen38.checkpoint.index import CheckpointIndex
from skyrl_qwen38.model_folder import open_model

_TIMEOUT = timedelta(minutes=15)  # of the whole comparison
_GROUP_TIMEOUT = timedelta(minutes=5)  # of one collective; ranks import Megatron at different speeds before the first
_PROCESS_BYTES = 1200 * 2**20  # an interpreter with torch, and Megatron or Transformers, imported


@dataclass(frozen=True)
class _Task:
    """What every process of the comparison is told.

    A process writes ``<its name>.safetensors`` into ``folder``: of document i ``logprobs.i`` ``[tokens - 1]``, of each
    token given those before it, ``last.i`` ``[V]``, after its last token, and where ``layers`` is set
    ``stream.l.i`` ``[tokens, n*H]``, behind layer l. Or ``<its name>.error``, one sentence.
    """

    model: str
    documents: list[list[int]]
    ep: int
    layers: bool
    folder: str


def run_parity(model: str, documents: list[list[int]], ep: int, layers: bool) -> dict[str, Any]:
    """Compares log-probs, and with ``layers`` the residual streams behind each layer.

    Each document gives one log-prob a token: of its successor, and at the last position, which has none, of the token
    that the reference finds most likely. Differences are absolute, the largest over all ranks.

    Args:
        model: folder of a ``qwen4_exp`` checkpoint.
        documents: token ids.
        ep: expert-parallel ranks.
        layers: also fill ``layers``.

    Returns:
        ``logprob_abs_diff_max``, ``logprob_abs_diff_mean``, ``documents`` (``tokens``, ``abs_diff_max`` of each),
        ``layers`` (``layer`` from 0, ``kind``, ``stream_diff`` of each; else empty), ``ep``.

    Raises:
        ValueError: the checkpoint, the documents or ``ep`` do not suit this, or memory does not suffice.
        RuntimeError: a process failed, died or took too long; none is left behind.
    """
    _check(model, documents, ep)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        task = _Task(model, documents, ep, layers, folder)
        ranks = [f"rank {rank}" for rank in range(ep)]
        _run({"reference": (_reference, task), **{name: (_rank, task, r) for r, name in enumerate(ranks)}}, folder)
        reference, *found = (load_file(Path(folder, f"{name}.safetensors")) for name in ("reference", *ranks))
    differences = [
        torch.cat([_logprob_differences(reference, other, document) for other in found])
        for document in range(len(documents))
    ]
    every = torch.cat(differences)
    return {
        "logprob_abs_diff_max": every.max().item(),
        "logprob_abs_diff_mean": every.mean().item(),
        "documents": [
            {"tokens": len(document), "abs_diff_max": difference.max().item()}
            for document, difference in zip(documents, differences, strict=True)
        ],
        "layers": _stream_differences(reference, found, len(documents), _layer_kinds(model)) if layers else [],
        "ep": ep,
    }


def _logprob_differences(reference: dict[str, Tensor], found: dict[str, Tensor], document: int) -> Tensor:
    likeliest = reference[f"last.{document}"].argmax()
    wanted, got = (
        torch.cat([side[f"logprobs.{document}"], side[f"last.{document}"][likeliest, None]])
        for side in (reference, found)
    )
    return (got.double() - wanted.double()).abs()


def _stream_differences(
    reference: dict[str, Tensor], found: list[dict[str, Tensor]], documents: int, kinds: list[str]
) -> list[dict[str, Any]]:
    def largest(layer: int) -> float:
        names = [f"stream.{layer}.{document}" for document in range(documents)]
        # torch.stack keeps a nan, which max() of floats may lose.
        return torch.stack([(other[n] - reference[n]).abs().max() for other in found for n in names]).max().item()

    return [{"layer": layer, "kind": kind, "stream_diff": largest(layer)} for layer, kind in enumerate(kinds)]


def _check(model: str, documents: list[list[int]], ep: int) -> None:
    """Refuses what would fail, or fill the machine, minutes later."""
    facts = open_model(model, setting="--model")
    if not Path(model).is_dir():
        raise ValueError(f"--model={model} is not a folder: download the checkpoint and name its folder.")
    if facts.num_experts % ep:
        raise ValueError(f"--ep={ep} does not divide the {facts.num_experts} experts of {model}: choose one that does.")
    if not documents or not all(documents):
        raise ValueError("There is no document, or one without a token: give each at least one token id.")
    for number, document in enumerate(documents):
        for token in document:
            if not 0 <= token < facts.vocab_size:
                raise ValueError(
                    f"Document {number} has the token id {token}, outside the vocabulary of {facts.vocab_size}: "
                    "use this checkpoint's tokenizer."
                )
    needed = _needed_bytes(CheckpointIndex.open(model), sum(map(len, documents)), facts.vocab_size, ep)
    available = psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            f"Comparing {model} at EP={ep} in fp32 needs about {needed / 2**30:.1f} GiB of memory and "
            f"{available / 2**30:.1f} GiB are available: use a smaller checkpoint, a slice of this one for example."
        )


def _needed_bytes(index: CheckpointIndex, tokens: int, vocab_size: int, ep: int) -> int:
    """Of Transformers and all ranks at once, in fp32; a rank holds its part of the experts and of the table.

    While it loads, a rank also keeps the packed experts of all layers as they are stored.
    """
    fp32 = {"table": 0, "experts": 0, "rest": 0}
    stored_table = stored_packed = 0
    for name, tensor in index.items():
        if name.startswith(("mtp.", "model.visual.")):
            continue
        kind = "table" if ".ngram_embedding." in name else "experts" if ".mlp.experts." in name else "rest"
        fp32[kind] += 4 * torch.Size(tensor.shape).numel()
        stored_table += tensor.nbytes if kind == "table" else 0
        stored_packed += tensor.nbytes if kind == "experts" and len(tensor.shape) == 3 else 0
    transformers = sum(fp32.values())
    megatron = stored_table + fp32["experts"] + ep * (fp32["rest"] + stored_packed)
    logits = 3 * 4 * tokens * vocab_size
    return transformers + megatron + (ep + 1) * (_PROCESS_BYTES + logits)


def _text_config(model: str) -> dict[str, Any]:
    config = json.loads(Path(model, "config.json").read_text())
    return config.get("text_config", config)


def _layer_kinds(model: str) -> list[str]:
    """In the release's spelling."""
    return [kind.replace("qwen_sparse_attention", "full_attention") for kind in _text_config(model)["layer_types"]]


def _run(processes: dict[str, tuple], folder: str) -> None:
    """Runs ``function(*args)`` in a process each, by name, until all have ended well; else ends them all and raises."""
    context = multiprocessing.get_context("spawn")
    running = {
        name: context.Process(target=_guarded, args=(name, folder, *call), name=name, daemon=True)
        for name, call in processes.items()
    }
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    try:
        for process in running.values():
            process.start()
        while running:
            ended = wait([process.sentinel for process in running.values()], timeout=deadline - time.monotonic())
            if not ended:
                raise RuntimeError(
                    f"The comparison was given up after {_TIMEOUT.total_seconds() / 60:.0f} minutes: "
                    f"{', '.join(running)} had not ended."
                )
            for name, process in list(running.items()):
                if process.sentinel in ended:
                    process.join()
                    if process.exitcode:
                        raise RuntimeError(_why_it_failed(name, process.exitcode, Path(folder, f"{name}.error")))
                    del running[name]
    finally:
        for process in running.values():
            if process.pid is not None:
                process.kill()
                process.join()


def _why_it_failed(name: str, exit_code: int, error: Path) -> str:
    if error.exists():
        return f"The comparison failed in its process {name!r}: {error.read_text()}"
    memory = ", as the system does when memory runs out" if exit_code == -9 else ""
    return f"The comparison's process {name!r} ended with status {exit_code}{memory}."


def _guarded(name: str, folder: str, function: Callable[..., dict[str, Tensor]], *args: Any) -> None:
    """The life of one process."""
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            tensors = function(*args)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, Path(folder, f"{name}.safetensors"))
    except Exception as error:
        Path(folder, f"{name}.error").write_text(" ".join(str(error).split()) or type(error).__name__)
        sys.exit(1)


def _reference(task: _Task) -> dict[str, Tensor]:
    """Transformers on each document alone."""
    from transformers import AutoConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    config = AutoConfig.from_pretrained(task.model).get_text_config()
    # Of the attention implementations that PyTorch has on a CPU, the one that padding leaves no nan in.
    model, loading = Qwen4ExpForCausalLM.from_pretrained(
        task.model, config=config, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    if missing := loading["missing_keys"]:
        raise ValueError(f"Transformers misses {len(missing)} tensors of the checkpoint, {min(missing)} among them.")
    tensors: dict[str, Tensor] = {}
    streams = _record_streams(model.model.layers if task.layers else [])
    for number, document in enumerate(task.documents):
        tensors |= _scores(number, document, model(torch.tensor([document])).logits[0])
        tensors |= {f"stream.{layer}.{number}": stream[0] for layer, stream in streams.items()}
    return tensors


def _rank(task: _Task, rank: int) -> dict[str, Tensor]:
    """The trainer's model on all documents in one row, the row of rank r beginning with document r."""
    model = _megatron_model(task, rank)
    from megatron.core.packed_seq_params import PackedSeqParams

    count = len(task.documents)
    order = [(rank + place) % count for place in range(count)]
    lengths = [len(task.documents[number]) for number in order]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packing = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    row = torch.tensor([list(chain.from_iterable(task.documents[number] for number in order))])
    streams = _record_streams(model.decoder.layers if task.layers else [])
    logits = model(row, None, None, packed_seq_params=packing)[0]
    tensors: dict[str, Tensor] = {}
    for number, scores in zip(order, logits.split(lengths), strict=True):
        tensors |= _scores(number, task.documents[number], scores)
    for layer, stream in streams.items():
        parts = stream[:, 0].split(lengths)
        tensors |= {f"stream.{layer}.{number}": part for number, part in zip(order, parts, strict=True)}
    return tensors


def _megatron_model(task: _Task, rank: int) -> Any:
    """Built as a policy worker builds it: patched, through Megatron-Bridge, with the n-gram table split by rows."""
    import logging

    import torch.distributed as dist

    from skyrl_qwen38 import cpu, patching
    from skyrl_qwen38.config import Qwen38Config
    from skyrl_qwen38.patches import ple_row_shard, qwen4_exp_bridge

    logging.disable(logging.WARNING)
    cpu.install()
    patching.apply([qwen4_exp_bridge.PATCH, ple_row_shard.PATCH], "trainer", {}, Qwen38Config())
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state, tensor_parallel

    rendezvous = f"file://{task.folder}/rendezvous"
    dist.init_process_group("gloo", rendezvous, rank=rank, world_size=task.ep, timeout=_GROUP_TIMEOUT)
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=task.ep, distributed_timeout_minutes=_GROUP_TIMEOUT.total_seconds() / 60
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    provider = AutoBridge.from_hf_pretrained(task.model).to_megatron_provider()
    provider.expert_model_parallel_size = task.ep
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, bf16=False)
    return model.eval()


def _record_streams(layers: Any) -> dict[int, Tensor]:
    """Fills the returned dictionary with each layer's output, from now on in every forward."""
    streams: dict[int, Tensor] = {}

    def hook(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            streams[layer] = output[0] if isinstance(output, tuple) else output

        return record

    for number, layer in enumerate(layers):
        layer.register_forward_hook(hook(number))
    return streams


def _scores(number: int, document: list[int], logits: Tensor) -> dict[str, Tensor]:
    logprobs = logits.float().log_softmax(-1)  # [tokens, V]
    successors = torch.tensor(document[1:], dtype=torch.int64)
    return {
        f"logprobs.{number}": logprobs[:-1].gather(1, successors[:, None])[:, 0],
        f"last.{number}": logprobs[-1].clone(),
    }
