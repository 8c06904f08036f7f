"""timm's Vision Transformers: vit, deit, deit3, dinov2, CLIP and SigLIP towers, and other models with their blocks;
EVA, EVA-02, DINOv3, Perception Encoder, ROPE-ViT and DeepSeek's vision encoder, with and without rotary positions; over
a grid, SAM's encoder with relative or rotary positions, Swin and S3 with attention within shifted windows.

EVA's blocks with norms after their branches (`EvaBlockPostNorm`) run their own forward; the modules in them are fused.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from fastvit.blocks import grid, read, read_timm, run, windows
from fastvit.blocks.grid import GridAttention, GridBlock, Positions
from fastvit.blocks.read import DROP_PATH, LAYER_SCALE, MLP, NORM
from fastvit.blocks.read_mlp import read_mlp
from fastvit.blocks.spec import AttentionSpec
from fastvit.blocks.submodules import CannotFuse, Classes, submodules
from fastvit.blocks.windows import WindowBlock
from fastvit.integrations.forward import Call, ClassHandler, checked_mask
from fastvit.integrations.libraries import timm_parallel
from fastvit.ops import Rotary
from fastvit.ops.runtime.backend import is_jit_tracing
from fastvit.ops.runtime.device import is_fake

_SAM, _SWIN = "timm.models.vision_transformer_sam", "timm.models.swin_transformer"
_SAM_ATTENTION: Classes = {f"{_SAM}.Attention"}
_SAM_HALF: dict[str, Classes] = {"attn": _SAM_ATTENTION, "norm1": NORM, "ls1": LAYER_SCALE, "drop_path1": DROP_PATH}
_SWIN_HALF: dict[str, Classes] = {"attn": {f"{_SWIN}.WindowAttention"}, "norm1": NORM, "drop_path1": DROP_PATH}
_SHIFT_BIAS = -100.0  # as `SwinTransformerBlock.get_attn_mask` has it


def read_call(module: nn.Module, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Call:
    if is_causal and attn_mask is not None:  # timm's own forward raises or ignores the mask
        raise CannotFuse("a mask and is_causal")
    return x, {"attn_mask": checked_mask(attn_mask, x.shape[1]), "is_causal": bool(is_causal)}


def read_eva_call(
    module: nn.Module, x: Tensor, rope: Tensor | None = None, attn_mask: Any = None, is_causal: bool = False
) -> Call:
    positions = read_timm.rotary(module, x, rope)
    if positions is not None and x.shape[1] != positions.num_prefix_tokens + positions.sin.shape[-2]:
        raise CannotFuse(f"rotary positions for {positions.sin.shape[-2]} of {x.shape[1]} tokens")
    _, options = read_call(module, x, attn_mask, is_causal)
    return x, {**options, "rotary": positions}


def read_sam_attention(attn: Any) -> GridAttention:
    attention = read_timm.read_attention(attn)
    positions = Positions()
    if attn.use_rel_pos:
        grid.check_relative_positions(attention)
        positions = Positions((attn.rel_pos_h, attn.rel_pos_w))
    elif attn.rope is not None:
        (rope,) = submodules(attn, rope={"timm.layers.pos_embed_sincos.RotaryEmbeddingCat"})
        sin, cos = rope.get_embed().chunk(2, dim=-1)
        positions = Positions(rotary=Rotary(sin, cos, interleaved=True))
    return GridAttention(attention, positions)


def read_sam_block(block: Any) -> GridBlock:
    first = read.read_half(read_sam_attention, _SAM_HALF, block)
    return grid.describe_block(first, read_timm.read_mlp_half(block), block.window_size, drops_windows=True)


def read_swin_attention(attn: Any) -> AttentionSpec:
    (softmax,) = submodules(attn, softmax={nn.Softmax})
    if softmax.dim != -1:
        raise CannotFuse("softmax along another dimension")
    return read_timm.read_attention(attn)


_checked: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()  # their masks, and as what


def _check_swin_mask(block: Any, mask: Tensor) -> None:
    """Check, once and after a change, that a mask hides what the shift has made neighbours: the op makes its own."""
    sizes = (*block.shift_size, *block.window_size, *block.input_resolution)
    version = mask.data_ptr(), None if mask.is_inference() else mask._version, sizes
    before, known = _checked.get(block, (None, None))
    if before is not mask or known != version or mask.is_inference():  # whose changes nothing counts
        made = block.get_attn_mask(device=mask.device, dtype=mask.dtype)
        if made is None or not torch.equal(mask, made):
            raise CannotFuse("an attn_mask with other values than its class makes")
        _checked[block] = mask, version


def read_swin_block(block: Any) -> WindowBlock:
    mask = block.attn_mask
    if mask is None and not block.dynamic_mask and any(block.shift_size):
        raise CannotFuse("no attn_mask, although it shifts its windows")
    if not (mask is None or block.dynamic_mask or is_dynamo_compiling() or mask.is_meta or is_fake(mask)):
        _check_swin_mask(block, mask)
    first = read.read_half(read_swin_attention, _SWIN_HALF, block)
    second = read.read_half(read_mlp, {"mlp": MLP, "norm2": NORM, "drop_path2": DROP_PATH}, block)
    attn = block.attn
    bias = windows.bias_of(attn.relative_position_bias_table, attn.relative_position_index)
    return WindowBlock(first, second, bias, block.window_size, block.shift_size, _SHIFT_BIAS, rolls_first=True)


def read_swin_call(block: Any, x: Tensor) -> Call:
    if block.dynamic_mask and is_jit_tracing():
        raise CannotFuse("a trace for grids of any size")
    mask = block.attn_mask
    if mask is not None and not block.dynamic_mask:
        (gh, gw), (wh, ww) = x.shape[1:3], block.window_size
        if mask.shape[0] != -(-gh // wh) * -(-gw // ww):
            raise CannotFuse(f"a grid of {gh} x {gw}, which its mask is not for")
    return x, {}


_EVA_ATTENTION = ClassHandler(read_timm.read_attention, run.run_attention, read_eva_call)
_EVA_BLOCK = ClassHandler(read_timm.read_eva_block, run.run_block, read_eva_call, takes_recompute=True)
HANDLERS = {
    "timm.models.vision_transformer.Block": ClassHandler(
        read_timm.read_block, run.run_block, read_call, takes_recompute=True
    ),
    "timm.models.vision_transformer.ParallelScalingBlock": ClassHandler(
        timm_parallel.read_block, timm_parallel.run_block, read_call
    ),
    **dict.fromkeys(read.ATTENTION, ClassHandler(read_timm.read_attention, run.run_attention, read_call)),
    **dict.fromkeys(MLP, ClassHandler(read_mlp, run.run_mlp, ndim=None)),
    "timm.models.eva.EvaBlock": _EVA_BLOCK,
    "timm.models.deepseek_vit.DeepseekVitBlock": _EVA_BLOCK,
    "timm.models.eva.EvaAttention": _EVA_ATTENTION,
    "timm.layers.attention.AttentionRope": _EVA_ATTENTION,
    f"{_SAM}.Block": ClassHandler(read_sam_block, grid.run_block, ndim=4, takes_recompute=True),
    **dict.fromkeys(_SAM_ATTENTION, ClassHandler(read_sam_attention, grid.run_attention, ndim=4)),
    f"{_SWIN}.SwinTransformerBlock": ClassHandler(
        read_swin_block, windows.run_block, read_swin_call, ndim=4, takes_recompute=True
    ),
}
EMBEDDINGS = {"timm.layers.patch_embed.PatchEmbed": "proj"}
