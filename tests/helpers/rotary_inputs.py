"""Tables and layouts for the tests of rotary positions, and parameters of norms of q and k."""

import pytest
import torch
from oracle import inputs

from fastvit import ops

EPS = 1e-5  # of norms of q and k
SPELLINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def table(*shape, device, dtype=torch.float32, seed=0):
    """Return (sin, cos) of angles that all differ, so that an entry from the wrong place shows."""
    angles = inputs("normal", *shape, dtype=torch.float64, device=device, seed=30 + seed) * 3
    return angles.sin().to(dtype), angles.cos().to(dtype)


def widened(rotary, x):
    """Return the tables in the dtype of what they are multiplied with."""
    if rotary is None:
        return None
    sin, cos = (t.to(torch.promote_types(t.dtype, x.dtype)) for t in rotary[:2])
    return rotary._replace(sin=sin, cos=cos)


def norm_shapes(d, kind):
    """Return the shapes of the parameters of two norms. kind: "layer", "rms" or "no bias"."""
    names = ("q_weight", "k_weight") if kind != "layer" else ("q_weight", "q_bias", "k_weight", "k_bias")
    return dict.fromkeys(names, (d,))


def norms(kind, q_weight, k_weight, q_bias=None, k_bias=None, eps=EPS):
    kind = "rms" if kind == "rms" else "layer"
    return ops.Norm(q_weight, q_bias, eps, kind), ops.Norm(k_weight, k_bias, eps, kind)


LAYOUTS = {
    "head_strided": lambda t: t.transpose(-2, -3).contiguous().transpose(-2, -3),
    "element_strided": lambda t: t.transpose(-1, 1).contiguous().transpose(-1, 1),
    "sliced": lambda t: torch.cat([torch.full_like(t, torch.nan), t], -2)[..., t.shape[-2] :, :],
    "odd_offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "batch_expanded": lambda t: t[:1].expand_as(t),
}
