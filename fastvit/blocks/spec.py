"""The two halves of a pre-norm transformer block, described by tensors and numbers.

    x + drop_path(layer_scale * attention(norm(x)))    layer_norm_attention
    x + drop_path(layer_scale * mlp(norm(x)))          layer_norm_mlp

Probabilities are those that apply now: 0.0 in evaluation. `run.py` runs these descriptions; the readers make them from
modules, ours and those of other libraries.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from torch import Tensor, nn

from fastvit.ops import Norm

Branch = TypeVar("Branch", "AttentionSpec", "MlpSpec")


class PlainLinear(NamedTuple):
    """weight (out, in), bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None


class AdaptedLinear(NamedTuple):
    """A linear layer that is more than weight and bias, quantised or with LoRA's adapters: its module is called between
    fused ops."""

    module: nn.Module


LinearSpec = PlainLinear | AdaptedLinear


class AttentionSpec(NamedTuple):
    """Multi-head self-attention. qkv: one packed layer (3 * H * d, D), or three for q, k and v; scale: None for
    d**-0.5; attn_drop: of the attention probabilities; proj_drop: behind the projection; scale_norm: before it;
    qk_norm: of q and of k, each over a head, or over all of them; kv_heads: of k and v, a divisor of num_heads."""

    qkv: tuple[LinearSpec, ...]
    proj: LinearSpec
    num_heads: int
    scale: float | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    scale_norm: Norm | None = None
    qk_norm: tuple[Norm, Norm] | None = None
    kv_heads: int = 0  # as many as q where 0
    in_steps: bool = False  # whether no op has all of it: kv_heads, or norms over all heads


class MlpSpec(NamedTuple):
    """activation: as `ops.mlp` names it; act: the same, or the gate's, as a module, behind a Call. drop1: behind the
    activation, 0.0 or equal to drop2; drop2: behind fc2. If gated, fc1 is the gate's layer beside the value's, or both
    in one, the gate's rows first or last. inner_norm: before fc2."""

    fc1: LinearSpec
    fc2: LinearSpec
    activation: str
    act: nn.Module
    drop1: float = 0.0
    drop2: float = 0.0
    value: LinearSpec | None = None
    gate_last: bool = False
    inner_norm: Norm | None = None


class HalfSpec(NamedTuple, Generic[Branch]):
    """x + drop_path(layer_scale * branch(norm(x))). norm: with the weight None for ones, and then the eps None for
    PyTorch's; scale_by_keep: whether samples that drop_path keeps are divided by 1 - drop_path; row_scale: its draw,
    (B,), where that is made already and drop_path is 0."""

    branch: Branch
    norm: Norm
    layer_scale: Tensor | None = None
    drop_path: float = 0.0
    scale_by_keep: bool = True
    row_scale: Tensor | None = None


BlockSpec = tuple[HalfSpec[AttentionSpec], HalfSpec[MlpSpec]]
