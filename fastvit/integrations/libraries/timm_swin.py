"""timm's Swin Transformer and S3: blocks over a grid, with attention within shifted windows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastvit.blocks import read, read_timm, windows
from fastvit.blocks.read import DROP_PATH, MLP, NORM
from fastvit.blocks.spec import AttentionSpec, HalfSpec
from fastvit.blocks.submodules import CannotFuse, Classes, submodules
from fastvit.blocks.windows import WindowBlock
from fastvit.integrations.forward import ClassHandler

_FILE = "timm.models.swin_transformer"
_SHIFT_BIAS = -100.0  # as `SwinTransformerBlock.get_attn_mask` has it
ATTENTION: Classes = {f"{_FILE}.WindowAttention"}


def read_attention(attn: Any) -> AttentionSpec:
    submodules(attn, softmax={nn.Softmax})
    return read_timm.read_attention(attn)


def read_block(block: Any) -> WindowBlock:
    norm1, attn, drop_path1 = submodules(block, norm1=NORM, attn=ATTENTION, drop_path1=DROP_PATH)
    norm2, mlp, drop_path2 = submodules(block, norm2=NORM, mlp=MLP, drop_path2=DROP_PATH)
    first = HalfSpec(read_attention(attn), read.read_norm(norm1), None, *read.read_drop_path(drop_path1))
    second = HalfSpec(read_timm.read_mlp(mlp), read.read_norm(norm2), None, *read.read_drop_path(drop_path2))
    bias = windows.bias_of(attn.relative_position_bias_table, attn.relative_position_index)
    return WindowBlock(first, second, bias, block.window_size, block.shift_size, _SHIFT_BIAS, rolls_first=True)


def check_call(block: Any, x: Tensor) -> Tensor:
    mask = block.attn_mask
    if mask is not None and not block.dynamic_mask:
        (gh, gw), (wh, ww) = x.shape[1:3], block.window_size
        if mask.shape[0] != -(-gh // wh) * -(-gw // ww):
            raise CannotFuse(f"a grid of {gh} x {gw}, which its mask is not for")
    return x


HANDLERS = {
    f"{_FILE}.SwinTransformerBlock": ClassHandler(
        read_block, windows.run_block, check_call, ndim=4, takes_recompute=True
    )
}
EMBEDDINGS: dict[str, str] = {}
