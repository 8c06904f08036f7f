"""Scratch memory of PyTorch's convolutions on a CPU, as far as their arguments tell it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastvit.ops.runtime.torch_private import select_conv_backend

_FORWARD, _BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_FEW = 4  # channels, as of images, of which oneDNN makes no copy
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Scratch(NamedTuple):
    """Sizes in bytes.

    Attributes:
        before: groups that are held one after the other, each as a whole, before there is an output.
        with_outputs: those that are held next to the outputs.
    """

    before: tuple[tuple[int, ...], ...] = ()
    with_outputs: tuple[int, ...] = ()


def scratch_of(func: Any, args: tuple[Any, ...], out: Any) -> Scratch:
    """Return the scratch memory of a convolution, or of its gradients, on a CPU; none for other functions.

    oneDNN, which computes in float32, and in 16 bits where the CPU can, works on copies of the input, the weight and
    the output in a layout of its own; in channels_last on copies of the weight only. PyTorch's own convolution copies
    every window of the input, and makes channels_last tensors contiguous. The copies were counted on one CPU with
    AVX-512, where SAM's peaks are exact. oneDNN chooses by CPU, threads and shape: kernels of 16 x 16 from 64 channels
    to 256 take several times as much, other channels_last ones up to 30 % more, grouped ones less or more.
    """
    if select_conv_backend is None or func not in (_FORWARD, _BACKWARD):
        return Scratch()
    backward = func is _BACKWARD
    (x, weight), y = args[1:3] if backward else args[:2], args[0] if backward else out
    options = args[4:10] if backward else args[3:9]
    backend = select_conv_backend(x, weight, None, *options, None).name
    x_bytes, weight_bytes, y_bytes = (t.numel() * t.itemsize for t in (x, weight, y))
    channels_last = _is_channels_last(x) or _is_channels_last(weight)
    if backend.startswith("Slow"):
        windows = x.shape[1] * math.prod(weight.shape[2:]) * y_bytes // y.shape[1]
        return Scratch((), (windows,) * (weight[0, 0].numel() > 1) + (x_bytes, weight_bytes) * channels_last)
    if backend != "Mkldnn":
        return Scratch()
    if channels_last:
        return Scratch((), (weight_bytes,) * (3 if backward else 2))
    input_copy = (x_bytes,) * (x.shape[1] > _FEW)
    if not backward:
        return Scratch((), (*input_copy, weight_bytes))
    wants_dx, wants_dweight, _ = args[10]
    before_dx = ((y_bytes, weight_bytes, x_bytes),) * wants_dx
    before_dweight = ((y_bytes, *input_copy, weight_bytes, *(x_bytes,) * wants_dx),) * wants_dweight
    return Scratch(before_dx + before_dweight, (weight_bytes,) * wants_dweight)


def _is_channels_last(tensor: Tensor) -> bool:
    form = _CHANNELS_LAST.get(tensor.dim())
    return form is not None and tensor.is_contiguous(memory_format=form) and not tensor.is_contiguous()
