"""Read timm's blocks of attention and MLP in parallel (Dehghani et al. 2023, arXiv:2302.05442) and run them:
x + attention(norm(x)) + mlp(norm(x)). One layer holds fc1, q, k and v; the two output projections may be one too."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from fastvit.blocks import read, run
from fastvit.blocks.read import ACTIVATIONS, DROP_PATH, DROPOUT, LAYER_SCALE, LINEAR, NORM
from fastvit.blocks.read_mlp import describe_mlp
from fastvit.blocks.spec import AttentionSpec, HalfSpec, MlpSpec, PlainLinear
from fastvit.blocks.submodules import CannotFuse, submodules

_BLOCK = {
    "in_norm": NORM, "in_proj": LINEAR, "attn_drop": DROPOUT, "mlp_act": ACTIVATIONS, "mlp_drop": DROPOUT,
    "ls": LAYER_SCALE, "drop_path": DROP_PATH,
}  # fmt: skip


class Parallel(NamedTuple):
    """Two halves of the same norm, LayerScale and stochastic depth."""

    attention: HalfSpec[AttentionSpec]
    mlp: HalfSpec[MlpSpec]


def read_block(block: Any) -> Parallel:
    norm, into, attn_drop, act, mlp_drop, scale, drop_path = submodules(block, _BLOCK)
    qk_norm = read.read_qk_norm(block)
    D = into.in_features
    rows = into.out_features - 3 * D, 3 * D
    weight, bias = _plain(into)
    weights = weight.split(rows)  # one gradient of the layer's size in autograd; slices would have one each
    fc1, qkv = map(PlainLinear, weights, (None, None) if bias is None else bias.split(rows))
    if block.mlp_bias is not None:
        if bias is not None:
            raise CannotFuse("two biases, in_proj.bias and mlp_bias")
        fc1 = PlainLinear(fc1.weight, block.mlp_bias)
    training = block.training if block.__dict__.get("fused_attn") else attn_drop.training  # timm's
    attention = read.describe_attention(
        (qkv,), into, block.num_heads, None, attn_drop.p if training else 0.0, None, None, qk_norm
    )
    mlp = describe_mlp(into, act, into, mlp_drop, None)
    proj, fc2 = _out_of(block, D)
    layer_scale = None if type(scale) is nn.Identity else scale.gamma
    rest = read.read_norm(norm), layer_scale, *read.read_drop_path(drop_path)
    return Parallel(HalfSpec(attention._replace(proj=proj), *rest), HalfSpec(mlp._replace(fc1=fc1, fc2=fc2), *rest))


def _plain(layer: nn.Module) -> PlainLinear:
    linear = read.read_layer(layer)
    if not isinstance(linear, PlainLinear):
        raise CannotFuse("an adapter or a quantised weight on a layer that is attention's and the MLP's")
    return linear


def _out_of(block: Any, D: int) -> tuple[PlainLinear, PlainLinear]:
    """Return the output projections of attention and of the MLP."""
    if block.out_proj is None:
        proj, fc2 = submodules(block, attn_out_proj=LINEAR, mlp_out_proj=LINEAR)
        return _plain(proj), _plain(fc2)
    (both,) = submodules(block, out_proj=LINEAR)
    weight, bias = _plain(both)
    proj, fc2 = weight.split((D, weight.shape[1] - D), dim=1)
    return PlainLinear(proj, bias), PlainLinear(fc2, None)


def run_block(x: Tensor, block: Parallel, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Run both halves: the MLP's result is added to attention's, and both drop the same samples."""
    attention, mlp = block
    if attention.drop_path:
        row_scale = run.draw_drop_path(x, attention.drop_path, attention.scale_by_keep)
        attention = attention._replace(drop_path=0.0, row_scale=row_scale)
        mlp = mlp._replace(drop_path=0.0, row_scale=row_scale)
    attended = run.run_attention_half(x, attention, attn_mask=attn_mask, is_causal=is_causal)
    return run.run_mlp_half(x, mlp, residual=attended)
