"""What a machine without a GPU needs so that SkyRL's Megatron strategy runs on it.

Imported and installed exactly when ``trainer.qwen38.device=cpu``. Three parts, each a list of names with the reason
for each: :mod:`.torch_cuda` (CUDA calls and device names), :mod:`.gloo` (nccl process groups), :mod:`.stand_ins`
(packages that build only with CUDA). :mod:`.rollout` generates with Transformers instead of vLLM and :mod:`.worker`
sends it the weights. Nothing here changes what is computed.
"""

from __future__ import annotations

import os

_installed = False


def install() -> None:
    """Redirects CUDA, nccl and the CUDA-only packages of this process to the CPU, once.

    Call it before megatron or SkyRL's Megatron workers are imported: they bind several of the names at import.
    """
    global _installed
    if _installed:
        return
    # megatron.core wraps small functions in torch.compile; one compilation costs more than the whole tiny run.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from skyrl_qwen38.cpu import gloo, stand_ins, torch_cuda

    torch_cuda.redirect()
    gloo.redirect()
    stand_ins.install()
    _installed = True


def redirected_names() -> dict[str, str]:
    """Every name that a CPU run replaces (or stands in for), with the reason."""
    from skyrl_qwen38.cpu import cluster, gloo, stand_ins, torch_cuda

    return {**torch_cuda.REASONS, **gloo.REASONS, **stand_ins.REASONS, **cluster.REASONS}
