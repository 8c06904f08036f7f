"""Tables, dtypes and layouts for the tests of rotary positions."""

import pytest
import torch
from oracle import inputs

SPELLINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def table(*shape, device, dtype=torch.float32, seed=0):
    """Return (sin, cos) of angles that all differ, so that an entry from the wrong place shows."""
    angles = inputs("normal", *shape, dtype=torch.float64, device=device, seed=30 + seed) * 3
    return angles.sin().to(dtype), angles.cos().to(dtype)


LAYOUTS = {
    "head_strided": lambda t: t.transpose(-2, -3).contiguous().transpose(-2, -3),
    "element_strided": lambda t: t.transpose(-1, 1).contiguous().transpose(-1, 1),
    "sliced": lambda t: torch.cat([torch.full_like(t, torch.nan), t], -2)[..., t.shape[-2] :, :],
    "odd_offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "batch_expanded": lambda t: t[:1].expand_as(t),
}
