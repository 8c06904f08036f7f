"""SAM's encoder in transformers (version 5), those with the same code, and VitDet: layers over a grid, (B, H, W, D)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from fastvit.blocks import grid, read, run
from fastvit.blocks.grid import GridAttention, GridBlock, Positions
from fastvit.blocks.read import LINEAR, NORM
from fastvit.blocks.recompute import DEFAULT, Recompute
from fastvit.blocks.spec import AttentionSpec, HalfSpec, MlpSpec
from fastvit.blocks.submodules import CannotFuse, submodules
from fastvit.integrations.forward import ClassHandler
from fastvit.integrations.transformers.classes import qualified
from fastvit.integrations.transformers.hooks import LayerSpec, attention_of, check_version, checkpoint_of

_SAM = {  # files, and prefixes of the classes
    "sam": "Sam",
    "sam_hq": "SamHQ",
    "deepseek_ocr2": "DeepseekOcr2Sam",
    "unlimited_ocr": "UnlimitedOcrSam",
    "got_ocr2": "GotOcr2",
    "pp_formulanet": "PPFormulaNet",
    "slanext": "SLANeXt",
}


def read_attention(attn: Any) -> GridAttention:
    p = attn.dropout if attn.training and "Sdpa" not in type(attn).__name__ else 0.0  # SDPA's drops no probabilities
    return _described_attention(attn, attn.num_attention_heads, p, attn.use_rel_pos)


def read_vitdet_attention(attn: Any) -> GridAttention:
    return _described_attention(attn, attn.num_heads, 0.0, attn.use_relative_position_embeddings)


def _described_attention(attn: Any, num_heads: int, p: float, has_positions: bool) -> GridAttention:
    check_version()
    qkv, proj = submodules(attn, qkv=LINEAR, proj=LINEAR)
    if qkv.out_features != 3 * proj.in_features:
        raise CannotFuse(f"qkv has {qkv.out_features} outputs for {proj.in_features} inputs of proj")
    attention = read.describe_attention((read.read_layer(qkv),), proj, num_heads, attn.scale, p, None)
    if not has_positions:
        return GridAttention(attention, Positions())
    grid.check_relative_positions(attention)
    return GridAttention(attention, Positions((attn.rel_pos_h, attn.rel_pos_w)))


def read_mlp(mlp: Any) -> MlpSpec:
    if "lin1" in mlp._modules:
        fc1, act, fc2 = submodules(mlp, lin1=LINEAR, act=read.ACTIVATIONS, lin2=LINEAR)
        return read.describe_mlp(fc1, act, fc2, None, None)
    fc1, act, fc2, drop = submodules(mlp, fc1=LINEAR, act=read.ACTIVATIONS, fc2=LINEAR, drop=read.DROPOUT)
    return read.describe_mlp(fc1, act, fc2, drop, drop)


def read_layer(file: str, prefix: str, layer: Any) -> LayerSpec[GridBlock]:
    norm1, norm2 = submodules(layer, layer_norm1=NORM, layer_norm2=NORM)
    (mlp,) = submodules(layer, mlp={qualified(file, f"{prefix}MLPBlock")})
    attention = read_attention(attention_of(layer, "attn", *_attentions(file, prefix)))
    return _described(layer, attention, norm1, norm2, mlp, 0.0)


def read_vitdet_layer(layer: Any) -> LayerSpec[GridBlock]:
    if layer.use_residual_block:
        raise CannotFuse("convolutions after its MLP")
    norm1, norm2 = submodules(layer, norm1=NORM, norm2=NORM)
    mlp, drop_path = submodules(
        layer, mlp={_VITDET_MLP}, drop_path={nn.Identity, qualified("vitdet", "VitDetDropPath")}
    )
    attention = read_vitdet_attention(attention_of(layer, "attention", _VITDET_ATTENTION))
    return _described(layer, attention, norm1, norm2, mlp, read.read_drop_path(drop_path)[0])


def _described(
    layer: Any, grid_attention: GridAttention, norm1: Any, norm2: Any, mlp: nn.Module, drop_path: float
) -> LayerSpec[GridBlock]:
    attention, positions = grid_attention
    first: HalfSpec[AttentionSpec] = HalfSpec(attention, read.read_norm(norm1), None, drop_path)
    second: HalfSpec[MlpSpec] = HalfSpec(read_mlp(mlp), read.read_norm(norm2), None, drop_path)
    window = (layer.window_size, layer.window_size) if layer.window_size else None
    return LayerSpec(GridBlock(first, positions, second, window), checkpoint_of(layer))


def check_call(module: Any, hidden_states: Any, output_attentions: Any = None) -> Any:
    if output_attentions:
        raise CannotFuse("the argument output_attentions")
    return hidden_states


def check_vitdet_call(module: Any, hidden_state: Any, output_attentions: Any = None) -> Any:
    return check_call(module, hidden_state, output_attentions)


def run_layer(x: Tensor, layer: LayerSpec[GridBlock], recompute: Recompute = DEFAULT) -> Tensor:
    forward = partial(grid.run_block, block=layer.block, recompute=recompute)
    return forward(x) if layer.checkpoint is None else layer.checkpoint(forward, x)


def run_vitdet_layer(x: Tensor, layer: LayerSpec[GridBlock], recompute: Recompute = DEFAULT) -> tuple[Tensor]:
    """Run a layer of (B, D, H, W)."""
    return (run_layer(x.permute(0, 2, 3, 1), layer, recompute).permute(0, 3, 1, 2),)


def run_sdpa_attention(x: Tensor, attn: GridAttention) -> tuple[Tensor, None]:
    return grid.run_attention(x, attn), None


def run_vitdet_attention(x: Tensor, attn: GridAttention) -> tuple[Tensor]:
    return (grid.run_attention(x, attn),)


def _attentions(file: str, prefix: str) -> list[str]:
    return [qualified(file, f"{prefix}Vision{kind}Attention") for kind in ("", "Sdpa")]


_VITDET_ATTENTION, _VITDET_MLP = qualified("vitdet", "VitDetAttention"), qualified("vitdet", "VitDetMlp")
HANDLERS: dict[type | str, ClassHandler] = {
    qualified("vitdet", "VitDetLayer"): ClassHandler(
        read_vitdet_layer, run_vitdet_layer, check_call, ndim=4, takes_recompute=True
    ),
    _VITDET_ATTENTION: ClassHandler(read_vitdet_attention, run_vitdet_attention, check_vitdet_call, ndim=4),
    _VITDET_MLP: ClassHandler(read_mlp, run.run_mlp, ndim=None),
}
EMBEDDINGS = {qualified("vitdet", "VitDetEmbeddings"): "projection"}
for _file, _prefix in _SAM.items():
    HANDLERS[qualified(_file, f"{_prefix}VisionLayer")] = ClassHandler(
        partial(read_layer, _file, _prefix), run_layer, check_call, ndim=4, takes_recompute=True
    )
    # the other attention returns its weights as well
    HANDLERS[_attentions(_file, _prefix)[1]] = ClassHandler(read_attention, run_sdpa_attention, check_call, ndim=4)
    HANDLERS[qualified(_file, f"{_prefix}MLPBlock")] = ClassHandler(read_mlp, run.run_mlp, ndim=None)
    EMBEDDINGS[qualified(_file, f"{_prefix}PatchEmbeddings")] = "projection"
