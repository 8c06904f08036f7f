"""Find the kernel that `F.scaled_dot_product_attention` chooses."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class SdpaBackend(TorchDispatchMode):
    """Within the context, `name` becomes that of the kernel that `F.scaled_dot_product_attention` has called."""

    name = "math"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        operator = func.__name__
        if operator.startswith("_scaled_dot_product_") and "backward" not in operator:
            self.name = operator.removeprefix("_scaled_dot_product_").split(".")[0].removesuffix("_attention")
        return func(*args, **(kwargs or {}))
