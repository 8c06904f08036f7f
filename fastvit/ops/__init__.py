"""The fused ops as functions, and the choice of what runs them."""

from fastvit.ops._library import use_backend
from fastvit.ops.attention import attention, attention_qkvpacked
from fastvit.ops.attention_varlen import attention_varlen
from fastvit.ops.dropout import dropout
from fastvit.ops.layer_norm import Norm, add_layer_norm, layer_norm, rms_norm
from fastvit.ops.layer_norm_attention import layer_norm_attention
from fastvit.ops.layer_norm_linear import layer_norm_linear
from fastvit.ops.linear import linear
from fastvit.ops.mlp import layer_norm_mlp, mlp
from fastvit.ops.patch_embed import patch_embed
from fastvit.ops.qk_norm import qk_norm
from fastvit.ops.rotary import Rotary, rotary, rotary_qkvpacked

__all__ = [
    "Norm",
    "Rotary",
    "add_layer_norm",
    "attention",
    "attention_qkvpacked",
    "attention_varlen",
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
