"""Read from a tensor's device and dtype what launchers choose by: target, multiprocessors, precision."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastvit.kernels import _tuned
from fastvit.ops.runtime.dispatch import KernelUnsupported, cache_folder
from fastvit.ops.runtime.torch_private import (
    FakeTensor,
)


@functools.cache
def _cuda_arch(index: int) -> str:
    """Also takes over what was tuned for this model of GPU: configs depend on it and on shapes only."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = str(properties.gcnArchName).split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    _tuned.load(arch, properties.name, cache_folder())
    return arch


without_gpu = 4  # multiprocessors, where there is no GPU; in the interpreter few, so that persistent loops iterate


def multiprocessors(index: int | None) -> int:
    """Streaming multiprocessors of a GPU."""
    return without_gpu if index is None else _multiprocessors(index)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _target(x: Tensor) -> str:
    return _cuda_arch(x.device.index) if x.is_cuda else "sm_90"


def arch(x: Tensor) -> str:
    """The target that launch configs are chosen for: "sm_90", "gfx942", ...; the interpreter takes Hopper's. Raises
    `KernelUnsupported` for NVIDIA GPUs without bfloat16 or asynchronous copies, for which no kernel is compiled."""
    found = _target(x)
    if found.startswith(("sm_5", "sm_6", "sm_7")):
        raise KernelUnsupported(f"{found} is older than sm_80")
    return found


def stat_dtype(x: Tensor) -> torch.dtype:
    """Of statistics, softmax and sums over x: float32, or float64 for float64."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def is_fake(x: Tensor) -> bool:
    """Whether x has no data: a study of memory runs ops on it. Where an op works in parts that need the same memory,
    one part is enough."""
    return FakeTensor is not None and isinstance(x, FakeTensor)


def float32_precision() -> str:
    """PyTorch's setting for matmuls of float32, by either of its ways, which it refuses to see mixed."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def dot_precision(x: Tensor) -> str:
    """`tl.dot`'s input_precision for x: float32 follows PyTorch's setting, 16-bit operands are exact either way. Tensor
    cores cut TF32 operands off where cuBLAS may round them: a product is up to 2^-9 too small (test_tf32.py)."""
    tf32 = x.dtype is torch.float32 and float32_precision() != "highest"
    return "tf32" if tf32 else "ieee"
