"""timm's blocks of attention and MLP side by side (Dehghani et al. 2023, arXiv:2302.05442): x + both(norm(x)), of whose
four projections into attention and MLP one layer holds all, and of the two out of them one layer perhaps both."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from fastvit import fuse, readers
from fastvit._modules import Unsupported, submodules
from fastvit.fuse import Attention, Half, Linear, Mlp
from fastvit.integrations._plan import Plan
from fastvit.integrations.timm import check_call, mask
from fastvit.readers import ACTIVATIONS, DROP_PATH, DROPOUT, LAYER_SCALE, LINEAR, NORM


class Parallel(NamedTuple):
    """Two halves of the same norm, LayerScale and stochastic depth."""

    attention: Half[Attention]
    mlp: Half[Mlp]


def read_block(block: Any) -> Parallel:
    norm, into, attn_drop, act, mlp_drop, scale, drop_path = submodules(
        block, in_norm=NORM, in_proj=LINEAR, attn_drop=DROPOUT, mlp_act=ACTIVATIONS, mlp_drop=DROPOUT, ls=LAYER_SCALE,
        drop_path=DROP_PATH,
    )  # fmt: skip
    hidden = into.out_features - 3 * into.in_features
    layer = _plain(into)
    qkv, fc1 = _rows(layer, hidden, None), _rows(layer, 0, hidden)
    if block.mlp_bias is not None:
        fc1 = Linear(fc1.weight, block.mlp_bias)
    attention = readers.describe_attention(
        (qkv,), into, block.num_heads, None, attn_drop.p if block.training else 0.0, None, None,
        readers.read_qk_norm(block),
    )  # fmt: skip
    mlp = readers.describe_mlp(into, act, into, mlp_drop, None)
    proj, fc2 = _out_of(block, into.in_features)
    p, scale_by_keep = 0.0, True
    if drop_path.training and type(drop_path) is not nn.Identity:
        p, scale_by_keep = drop_path.drop_prob, drop_path.scale_by_keep
    ends = readers.read_norm(norm), None if type(scale) is nn.Identity else scale.gamma, p, scale_by_keep
    return Parallel(Half(attention._replace(proj=proj), *ends), Half(mlp._replace(fc1=fc1, fc2=fc2), *ends))


def _plain(layer: nn.Module) -> Linear:
    found = readers.read_layer(layer)
    if not isinstance(found, Linear):
        raise Unsupported("an adapter on a layer that is attention's and the MLP's")
    return found


def _rows(layer: Linear, first: int, end: int | None) -> Linear:
    return Linear(layer.weight[first:end], None if layer.bias is None else layer.bias[first:end])


def _out_of(block: Any, D: int) -> tuple[Linear, Linear]:
    """Of attention and of the MLP."""
    if block.out_proj is None:
        proj, fc2 = submodules(block, attn_out_proj=LINEAR, mlp_out_proj=LINEAR)
        return _plain(proj), _plain(fc2)
    (both,) = submodules(block, out_proj=LINEAR)
    weight, bias = _plain(both)
    return Linear(weight[:, :D], bias), Linear(weight[:, D:], None)


def run_block(x: Tensor, block: Parallel, attn_mask: Tensor | None = None) -> Tensor:
    """The MLP's half adds itself to attention's, and both drop the same samples."""
    attention, mlp = block
    if attention.drop_path:
        row_scale = fuse.draw_drop_path(x, attention.drop_path, attention.scale_by_keep)
        attention = attention._replace(drop_path=0.0, row_scale=row_scale)
        mlp = mlp._replace(drop_path=0.0, row_scale=row_scale)
    return fuse.run_mlp_half(x, mlp, residual=fuse.run_attention_half(x, attention, attn_mask=attn_mask))


PLANS = {"timm.models.vision_transformer.ParallelScalingBlock": Plan(read_block, run_block, check_call, mask=mask)}
EMBEDDINGS: dict[str, str] = {}
