"""Let the backward pass of a block compute again instead of saving: parts of its halves, by an attribute of the block's
instance, or all of it, by a forward of the instance."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from fastvit.blocks.stand_in import put_on, take_off


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
    """Return what the parts of a block recompute: its attribute, or the default."""
    # Dynamo guards a missing attribute, but no missing key; outside of it, a missing attribute takes 1 us
    return getattr(module, ATTRIBUTE, DEFAULT) if is_dynamo_compiling() else module.__dict__.get(ATTRIBUTE, DEFAULT)


def recompute_all(block: nn.Module) -> None:
    """Let the backward pass run the whole block again, whatever its forward is."""
    put_on(block, partial(_checkpointed, block, vars(block).get("forward")))


def recomputes_all(module: nn.Module) -> bool:
    """Tell whether `recompute_all` set the forward of the module's instance."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _checkpointed


def is_fitted(module: nn.Module) -> bool:
    """Tell whether `recompute_all` or the attribute says what the module recomputes."""
    return recomputes_all(module) or ATTRIBUTE in vars(module)


def recompute_as_by_default(block: nn.Module) -> None:
    """Undo `recompute_all`, and remove the attribute."""
    vars(block).pop(ATTRIBUTE, None)
    if recomputes_all(block):
        take_off(block)


def _checkpointed(block: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward, and again in the backward pass. forward: its instance's own, None for its class's."""
    run = partial(type(block).forward, block) if forward is None else forward
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    return checkpoint(run, *args, use_reentrant=False, **kwargs)
