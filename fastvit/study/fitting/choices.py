"""The choices of what a block recomputes in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import nn

from fastvit.blocks.recompute import ATTRIBUTE, DEFAULT, Recompute, recompute_all, recompute_as_by_default
from fastvit.integrations.forward import ClassHandler, fused_forward
from fastvit.modules.block import Block
from fastvit.modules.eva import EvaBlock


class Choice(NamedTuple):
    """Says what one block recomputes.

    Attributes:
        attention, mlp: `recompute` of `ops.layer_norm_attention` and of `ops.layer_norm_mlp`.
        block: the whole block instead, by torch.utils.checkpoint without reentry.
    """

    attention: str = "none"
    mlp: str = "none"
    block: bool = False

    def __str__(self) -> str:
        if self.block:
            return "the whole block"
        *others, last = [*_ATTENTION[self.attention], *_MLP[self.mlp]] or ["nothing"]
        return f"{', '.join(others)} and {last}" if others else last


NOTHING = Choice()
BY_DEFAULT = Choice(*DEFAULT)
BLOCK = Choice(block=True)
_QKV = ("q", "k", "v")
_ATTENTION = {"none": (), "attention": ("attention",), "qkv": _QKV, "all": (*_QKV, "attention")}
_MLP = {"none": (), "activation": ("the MLP's activation",), "all": ("fc1",)}
# The activation takes no matmul, so that nothing is gained by keeping it while something else is recomputed
_HALVES = tuple(Choice(attention, mlp) for attention in _ATTENTION for mlp in ("activation", "all"))


def choices_of(block: nn.Module) -> tuple[Choice, ...]:
    """Return what the block may recompute: parts of its halves if it runs as fused halves, else only all of it."""
    return (NOTHING, *_HALVES, BLOCK) if has_halves(block) else (NOTHING, BLOCK)


def has_halves(block: nn.Module) -> bool:
    """Tell whether the block runs as two halves that can recompute parts: ours, or an accelerated one."""
    forward = vars(block).get("forward")
    if isinstance(forward, partial) and forward.func is fused_forward:
        handler: ClassHandler = forward.args[0]
        return handler.takes_recompute
    return type(block) in (Block, EvaBlock)


def put_on(block: nn.Module, choice: Choice) -> None:
    """Let the block recompute this, and nothing else."""
    recompute_as_by_default(block)
    if choice.block:
        recompute_all(block)
    elif has_halves(block) and (choice.attention, choice.mlp) != DEFAULT:
        setattr(block, ATTRIBUTE, Recompute(choice.attention, choice.mlp))
