"""Measures the memory of a step: it runs, and the device's allocator is read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fastvit.study.memory.peak import peak_bytes
from fastvit.study.memory.step import DTYPES, Setting, Step, Together, images_of
from fastvit.study.sources.model_source import ModelSource


def measure(
    source: ModelSource, provider: str, image_size: tuple[int, int], batch: int, setting: Setting, device: torch.device,
    patch_size: tuple[int, int] | None = None, together: Together = (),
    prepare: Callable[[nn.Module], object] = lambda _: None,
) -> int:  # fmt: skip
    """Run a step and return its peak in bytes: what exists before the step, and the most that it allocates on top.

    Args:
        provider: of PROVIDERS, or "compile": SDPA under torch.compile.
        together: as in `plan`.
        prepare: called with the model before the step.
    """
    dtype = DTYPES[setting.dtype]
    with device:
        model = source.build("sdpa" if provider == "compile" else provider, image_size, patch_size).to(dtype)
        pixels = images_of(model, batch, image_size, dtype, together)
    prepare(model)
    if provider == "compile":
        model.compile()
    step = Step(model, pixels, setting, gpu=device.type == "cuda")
    with torch.enable_grad():
        step.make_state()
        step.run()  # caches and lazy initialisation do not count
        for p in step.parameters:
            p.grad = None
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in step.tensors()}
        return sum(held.values()) + peak_bytes(step.run, device)
