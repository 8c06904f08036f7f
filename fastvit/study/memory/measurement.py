"""The memory of a step, measured: it runs, and the device's allocator keeps the record."""

from __future__ import annotations

import torch

from fastvit.study.memory.peak import peak_bytes
from fastvit.study.memory.plan import DTYPES, Setting, Step
from fastvit.study.sources.model_source import Subject, channels, images


def measure(
    subject: Subject, provider: str, image_size: tuple[int, int], batch: int, setting: Setting, device: torch.device,
    patch_size: tuple[int, int] | None = None,
) -> int:  # fmt: skip
    """The peak of a real step in bytes, with everything that `memory/plan.py` counts: what is there before the step and
    the most that it allocates over that. provider: or "compile", SDPA under torch.compile."""
    dtype = DTYPES[setting.dtype]
    with device:
        model = subject.build("sdpa" if provider == "compile" else provider, image_size, patch_size).to(dtype)
        pixels = images(batch, image_size, dtype, channels(model))
    if provider == "compile":
        model.compile()
    step = Step(model, pixels, setting, gpu=device.type == "cuda")
    with torch.enable_grad():
        step.make_state()
        step.run()  # caches, and what is initialised when it is first wanted, do not count
        for p in step.parameters:
            p.grad = None
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in step.tensors()}
        return sum(held.values()) + peak_bytes(step.run, device)
