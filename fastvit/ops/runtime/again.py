"""Keep torch.compile from saving what a backward pass is to compute again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

_LIB = torch.library.Library("fastvit", "FRAGMENT")
_LIB.define("in_backward(Tensor x, Tensor gradient) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIB.impl("in_backward", lambda x, gradient: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("fastvit::in_backward", lambda x, gradient: torch.empty_like(x), lib=_LIB)


def in_backward(x: Tensor, gradient: Tensor) -> Tensor:
    """Return x, from which a backward pass computes something again.

    The compiler has both passes in one graph. It joins equal expressions, and puts into the forward pass, and saves,
    whatever needs no gradient of the output. There this is a copy of x that needs `gradient`."""
    if not is_dynamo_compiling():
        return x
    copy: Tensor = torch.ops.fastvit.in_backward(x, gradient)
    return copy
