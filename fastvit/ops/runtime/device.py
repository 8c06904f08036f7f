"""Return what launchers choose by: target, multiprocessors, precision."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.torch_private import FakeTensor


@functools.cache
def _cuda_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


without_gpu = 4  # multiprocessors without a GPU; few, so that persistent loops iterate in the interpreter


def multiprocessors(index: int | None) -> int:
    """Return the number of streaming multiprocessors."""
    return without_gpu if index is None else _multiprocessors(index)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _target(x: Tensor) -> str:
    return _cuda_arch(x.device.index) if x.is_cuda else "sm_90"


def arch(x: Tensor) -> str:
    """Return the target that launch configs are chosen for: "sm_90", "gfx942", ...; "sm_90" in the interpreter. Raise
    `KernelUnsupported` for NVIDIA GPUs without bfloat16 or asynchronous copies, for which no kernel is compiled."""
    target = _target(x)
    if target.startswith(("sm_5", "sm_6", "sm_7")):
        raise KernelUnsupported(f"{target} is older than sm_80")
    return target


def is_fake(x: Tensor) -> bool:
    """Return whether x has no data. Studies of memory run ops on such tensors; an op that works in equal parts then
    runs one part."""
    return FakeTensor is not None and isinstance(x, FakeTensor)


def float32_precision() -> str:
    """Return PyTorch's precision of float32 matmuls. It has an older and a newer setting, and refuses a mix of both."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def dot_precision(x: Tensor) -> str:
    """Return `tl.dot`'s input_precision for x: float32 follows PyTorch's setting, 16-bit operands are exact anyway.
    Tensor cores truncate TF32 operands, cuBLAS may round them: a product is up to 2^-9 too small (test_tf32.py)."""
    tf32 = x.dtype is torch.float32 and float32_precision() != "highest"
    return "tf32" if tf32 else "ieee"
