"""What the backward pass of a block computes again instead of saving it, as an attribute of the block's instance."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.compiler import is_dynamo_compiling


class Recompute(NamedTuple):
    """`recompute` of the ops of a block.

    attention: of `ops.layer_norm_attention`.
    mlp: of `ops.layer_norm_mlp`.
    """

    attention: str = "none"
    mlp: str = "activation"


DEFAULT = Recompute()
ATTRIBUTE = "fastvit_recompute"  # of a block's instance: a Recompute; DEFAULT where it is absent


def recompute_of(module: nn.Module) -> Recompute:
    # Dynamo guards a missing attribute, but no missing key; outside of it, a missing attribute takes 1 us
    found = getattr(module, ATTRIBUTE, DEFAULT) if is_dynamo_compiling() else module.__dict__.get(ATTRIBUTE, DEFAULT)
    return found
