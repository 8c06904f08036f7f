"""The two halves of a transformer block, described by tensors and numbers. A pre-norm block is

    x + drop_path(layer_scale * attention(norm(x)))    layer_norm_attention
    x + drop_path(layer_scale * mlp(norm(x)))          layer_norm_mlp

and a post-norm block norm(x + drop_path(layer_scale * attention(x))), then the same of the MLP.

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
    """A linear layer whose module is called between fused ops: it is quantised, has LoRA adapters, or its weight is
    sparse."""

    module: nn.Module


LinearSpec = PlainLinear | AdaptedLinear


class AttentionSpec(NamedTuple):
    """Multi-head self-attention.

    qkv: one packed layer (3 * H * d, D), or three layers for q, k and v. scale: None for d**-0.5. attn_drop, proj_drop:
    dropout of the probabilities, and after the projection. scale_norm: a norm before the projection. qk_norm: norms of
    q and k, over each head or over all heads. kv_heads: heads of k and v, a divisor of num_heads; 0 for num_heads.
    in_steps: whether no op has all of it, because of kv_heads or norms over all heads. adapted: whether a layer is an
    AdaptedLinear. cu_seqlens, max_seqlen: of x (T, D), the tokens of several sequences, as in `ops.attention_varlen`;
    None for x (B, N, D)."""

    qkv: tuple[LinearSpec, ...]
    proj: LinearSpec
    num_heads: int
    scale: float | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    scale_norm: Norm | None = None
    qk_norm: tuple[Norm, Norm] | None = None
    kv_heads: int = 0
    in_steps: bool = False
    adapted: bool = False
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None


class MlpSpec(NamedTuple):
    """Two linear layers with an activation between them, or a gated MLP.

    activation: its name in `ops.mlp`. act: the activation, or the gate's, as a module. drop1, drop2: dropout after the
    activation, which is 0.0 or equal to drop2, and after fc2. value: a gated MLP's second layer, if fc1 is the gate's
    alone; None if fc1 holds both, with the gate's rows last if gate_last. inner_norm: a norm before fc2.
    adapted: whether a layer is an AdaptedLinear."""

    fc1: LinearSpec
    fc2: LinearSpec
    activation: str
    act: nn.Module
    drop1: float = 0.0
    drop2: float = 0.0
    value: LinearSpec | None = None
    gate_last: bool = False
    inner_norm: Norm | None = None
    adapted: bool = False


class HalfSpec(NamedTuple, Generic[Branch]):
    """x + drop_path(layer_scale * branch(norm(x))), or norm(x + drop_path(layer_scale * branch(x))).

    norm: a weight of None stands for ones, and an eps of None for PyTorch's default. scale_by_keep: divide the samples
    that drop_path keeps by 1 - drop_path. row_scale: DropPath factors (B,), or (T,) for x (T, D), drawn by the caller;
    drop_path must then be 0."""

    branch: Branch
    norm: Norm
    layer_scale: Tensor | None = None
    drop_path: float = 0.0
    scale_by_keep: bool = True
    row_scale: Tensor | None = None


BlockSpec = tuple[HalfSpec[AttentionSpec], HalfSpec[MlpSpec]]
