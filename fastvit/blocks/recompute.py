"""What a block computes again in its backward pass, as an attribute of the module."""

from __future__ import annotations

from typing import NamedTuple


class Recompute(NamedTuple):
    """attention, mlp: `recompute` of `ops.layer_norm_attention` and of `ops.layer_norm_mlp`."""

    attention: str = "none"
    mlp: str = "activation"


DEFAULT = Recompute()
ATTRIBUTE = "fastvit_recompute"  # of a block's instance; absent: DEFAULT
