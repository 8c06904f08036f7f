"""The fused ops as functions, each with its gradient. `use_backend` chooses what runs them. The two halves of a block
are `layer_norm_attention` and `layer_norm_mlp`. The other ops are parts of these, other forms of them, and
`patch_embed`."""

from fastvit.ops.attention.functions import (
    attention,
    attention_qkvpacked,
    attention_varlen,
    attention_varlen_qkvpacked,
    attention_windows,
)
from fastvit.ops.attention.groups import Relative
from fastvit.ops.block.attention import layer_norm_attention
from fastvit.ops.block.mlp import layer_norm_mlp, mlp
from fastvit.ops.block.norm_linear import layer_norm_linear
from fastvit.ops.dropout.op import dropout
from fastvit.ops.layer_norm.op import Norm, add_layer_norm, layer_norm, rms_norm
from fastvit.ops.linear.op import linear
from fastvit.ops.patch_embed.op import patch_embed
from fastvit.ops.qk_norm.op import qk_norm
from fastvit.ops.rotary.op import Rotary, rotary, rotary_qkvpacked
from fastvit.ops.runtime.backend import use_backend

__all__ = [
    "Norm",
    "Relative",
    "Rotary",
    "add_layer_norm",
    "attention",
    "attention_qkvpacked",
    "attention_varlen",
    "attention_varlen_qkvpacked",
    "attention_windows",
    "dropout",
    "layer_norm",
    "layer_norm_attention",
    "layer_norm_linear",
    "layer_norm_mlp",
    "linear",
    "mlp",
    "patch_embed",
    "qk_norm",
    "rms_norm",
    "rotary",
    "rotary_qkvpacked",
    "use_backend",
]
