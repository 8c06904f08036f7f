"""Choose the kernel of `F.scaled_dot_product_attention`, and find the one that it chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode


class SdpaBackend(TorchDispatchMode):
    """Within the context, `name` becomes that of the kernel that `F.scaled_dot_product_attention` has called."""

    name = "math"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        operator = func.__name__
        if operator.startswith("_scaled_dot_product_") and "backward" not in operator:
            self.name = operator.removeprefix("_scaled_dot_product_").split(".")[0].removesuffix("_attention")
        return func(*args, **(kwargs or {}))


BY_NAME = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # providers: "sdpa" with one kernel


def kernel_of(provider: str) -> contextlib.AbstractContextManager[None]:
    """Within the context SDPA runs the provider's kernel, or raises RuntimeError if it cannot."""
    return sdpa_kernel(BY_NAME[provider]) if provider in BY_NAME else contextlib.nullcontext()


def with_kernel(provider: str, step: Callable[[], object]) -> Callable[[], object]:
    """Return the step within `kernel_of(provider)`."""
    return sdpa_kernel(BY_NAME[provider])(step) if provider in BY_NAME else step
