"""CUDA calls and device names of torch, answered by the CPU.

Megatron-Core and SkyRL name the device they want in three ways: ``"cuda"``, an integer from
``torch.cuda.current_device()``, or a method (``Tensor.cuda``). All three come to mean the CPU here. Streams and events
become inert, because everything on a CPU is already in order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

# Functions of torch.cuda, with the answer each gives on a CPU and who asks.
_FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "is_available": (lambda: False, "a GPU of this machine is not used"),
    "device_count": (lambda: 1, "SkyRL seeds the generators only if it is positive, and divides by it"),
    "current_device": (lambda: 0, "device= of most factory calls in megatron.core"),
    "set_device": (lambda device: None, "SkyRL's workers, before the process group"),
    "synchronize": (lambda device=None: None, "timers and weight sync"),
    "empty_cache": (lambda: None, "SkyRL, after each phase"),
    "current_stream": (lambda device=None: _STREAM, "the MoE token dispatcher and DDP"),
    "default_stream": (lambda device=None: _STREAM, "the gradient buckets of DDP"),
    "stream": (lambda stream: contextlib.nullcontext(stream), "shared-expert overlap, DDP"),
    "is_current_stream_capturing": (lambda: False, "megatron.core's CUDA-graph checks"),
    "get_rng_state": (lambda device=None: torch.get_rng_state(), "megatron.core's RNG tracker and recompute"),
    "set_rng_state": (lambda state, device=None: torch.set_rng_state(state), "the same"),
    "manual_seed": (lambda seed: torch.default_generator.manual_seed(int(seed)), "megatron.core's RNG tracker"),
    "manual_seed_all": (lambda seed: torch.default_generator.manual_seed(int(seed)), "SkyRL's set_seed"),
    "_lazy_call": (lambda callback, **_: callback(), "megatron.core sets RNG states through it"),
    "max_memory_allocated": (lambda device=None: 0, "memory reports"),
    "memory_allocated": (lambda device=None: 0, "memory reports"),
    "memory_reserved": (lambda device=None: 0, "memory reports"),
    "reset_peak_memory_stats": (lambda device=None: None, "memory reports"),
}

REASONS: dict[str, str] = {
    **{f"torch.cuda.{name}": why for name, (_, why) in _FUNCTIONS.items()},
    "torch.cuda.random.*": "megatron.core imports the RNG functions from there",
    "torch.cuda.Stream, torch.cuda.Event, torch.cuda.device": "constructed without a check for a GPU",
    "torch.cuda.default_generators": "megatron.core indexes it by device",
    "torch.<factory>(device=)": "zeros, empty, arange …: device='cuda' or an integer means the CPU",
    "torch.<factory>_like(device=)": "megatron.core's exchange of a loaded checkpoint",
    "torch.Tensor.new_empty, new_zeros, new_ones, new_full, new_tensor": "device= in megatron.core's all-to-all",
    "torch.Tensor.to, torch.Tensor.cuda": "moves to the GPU stay where they are",
    "torch.Tensor.type": "the distributed optimizer recognises dtypes by the name torch.cuda.FloatTensor",
    "torch.load(map_location=)": "checkpoints loaded to the GPU",
    "torch.autocast": "autocast('cuda') means autocast('cpu')",
}


class _Stream:
    """A stream of a device on which everything is already in order."""

    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: _Stream | None = None) -> None:
        pass

    def wait(self, stream: _Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _Device(contextlib.nullcontext):
    """``with torch.cuda.device(i):`` without a device to select."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.idx = 0


_STREAM = _Stream()


def _to_cpu(device: Any) -> Any:
    """Maps a CUDA device, however it is written, to the CPU and leaves everything else as it is."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    names_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if is_index or names_cuda else device


def _with_cpu_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _to_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return wrapper


def _redirect_factories() -> None:
    # torch recognises the factories that obey `with torch.device("meta"):` by identity, in a cached set. The wrappers
    # must be members: otherwise Transformers builds on meta, materialises nothing, and its rotary frequencies are
    # whatever the memory held.
    constructors = set(torch.utils._device._device_constructors())
    for name in dir(torch):
        function = getattr(torch, name)
        if callable(function) and function in constructors:
            wrapper = _with_cpu_device(function)
            setattr(torch, name, wrapper)
            constructors.add(wrapper)
        elif name.endswith("_like") and not name.startswith("_"):
            setattr(torch, name, _with_cpu_device(function))
    torch.utils._device._device_constructors = lambda: constructors


def _redirect_tensor_methods() -> None:
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, _with_cpu_device(getattr(torch.Tensor, name)))
    tensor_to, tensor_type, torch_load = torch.Tensor.to, torch.Tensor.type, torch.load

    @functools.wraps(tensor_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (_to_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        return tensor_to(self, *args, **kwargs)

    @functools.wraps(torch.Tensor.cuda)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    @functools.wraps(tensor_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = tensor_type(self, *args, **kwargs)
        asks_for_the_name = not args and not kwargs
        return answer.replace("torch.", "torch.cuda.", 1) if asks_for_the_name else answer

    @functools.wraps(torch_load)
    def load(*args: Any, **kwargs: Any) -> Any:
        if "map_location" in kwargs:
            kwargs["map_location"] = _to_cpu(kwargs["map_location"])
        return torch_load(*args, **kwargs)

    torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type, torch.load = to, cuda, type_, load


def _redirect_autocast() -> None:
    autocast_init = torch.autocast.__init__

    @functools.wraps(autocast_init)
    def init(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast_init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init


def redirect() -> None:
    """Replaces every name of :data:`REASONS` in this process."""
    for name, (function, _) in _FUNCTIONS.items():
        setattr(torch.cuda, name, function)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.device = _Stream, _Event, _Device
    torch.cuda.default_generators = (torch.default_generator,)
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_autocast()
