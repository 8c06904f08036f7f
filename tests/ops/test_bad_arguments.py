"""A wrong argument of an op raises before anything runs, and the message names the argument and what is allowed."""

import math
from typing import Any

import pytest
import torch
from op_cases import ROWS, made, more
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastvit import ops

B, N, D = 2, 4, 16


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


X = [
    (TypeError, "x must be float32", {"x": ones(B, N, D, dtype=torch.long)}),
    (ValueError, "x must have shape (..., in) with ", {"x": ones(B, N, 15)}),
]
NORM = [
    (ValueError, "norm_weight must have shape (in,)", {"norm_weight": ones(40)}),
    (TypeError, "norm_weight must be a tensor", {"norm_weight": None}),
    (TypeError, "norm_bias must have x's dtype", {"norm_bias": ones(D).double()}),
    (ValueError, "norm_bias must be on x's device", {"norm_bias": ones(D, device="meta")}),
    (ValueError, "eps must be finite and not negative, got -1.0", {"eps": -1.0}),
    (ValueError, "norm must be one of layer, rms, got 'batch'", {"norm": "batch"}),
    (ValueError, "norm_bias must be None for norm='rms': RMSNorm has no bias", {"norm": "rms"}),
]
BRANCH = [
    (ValueError, "layer_scale must have shape (out,) = (16,)", {"layer_scale": ones(24)}),
    (TypeError, "layer_scale must have x's dtype", {"layer_scale": ones(D).half()}),
    (ValueError, "row_scale must have shape (B,) = (2,), got (5,)", {"row_scale": ones(5)}),
    (ValueError, "row_scale must not require a gradient", {"row_scale": ones(B, requires_grad=True)}),
]
MLP = [
    *X,
    *BRANCH,
    (TypeError, "fc1_weight must have x's dtype", {"fc1_weight": ones(40, D).half()}),
    (ValueError, "fc1_weight must be (out, in)", {"fc1_weight": ones(D)}),
    (ValueError, "fc1_bias must have shape", {"fc1_bias": ones(D)}),
    (ValueError, "fc2_weight must have shape (out, hidden)", {"fc2_weight": ones(D, 41)}),
    (TypeError, "fc2_weight must be a tensor", {"fc2_weight": None}),
    (ValueError, "fc2_weight must be on x's device", {"fc2_weight": ones(D, 40, device="meta")}),
    (ValueError, "fc2_bias must have shape (out,)", {"fc2_bias": ones(40)}),
    (ValueError, "activation must be one of gelu", {"activation": "gelu_erf"}),
    (ValueError, "recompute must be one of none, activation, all, got 'some'", {"recompute": "some"}),
    (ValueError, "dropout_p must be in [0, 1), got 1.0", {"dropout_p": 1.0}),
    (ValueError, "residual must have shape (..., out)", {"residual": ones(B, 1, D)}),
]
ENDS = torch.tensor([0, 2, 5, 8])
PAIR = ones(20, D), ones(20, D)
WANTED = "qkv_weight must have 3 * num_heads"
HEADS = "head_dim must be a multiple of 8 from 16 to 256, got "
BAD: dict[str, list[tuple[type[Exception], str, dict[str, Any]]]] = {
    "layer_norm": [
        (TypeError, "x must be a tensor", {"x": [1.0]}),
        (TypeError, "x must be float32", {"x": ones(B, N, D, dtype=torch.long)}),
        (ValueError, "x must have a non-empty last", {"x": ones(B, N, 0)}),
        (ValueError, "weight must have shape", {"weight": ones(15)}),
        (TypeError, "bias must have x's dtype", {"bias": ones(D).half()}),
        (ValueError, "weight must be on x's device", {"weight": ones(D, device="meta")}),
        (ValueError, "eps must be finite and not negative", {"eps": -1e-6}),
        (ValueError, "bias must be None for norm='rms'", {"norm": "rms"}),
    ],
    "rms_norm": [
        (TypeError, "x must be a tensor", {"x": [1.0]}),
        (ValueError, "weight must have shape", {"weight": ones(15)}),
        (ValueError, "eps must be finite and not negative", {"eps": -1e-6}),
        (TypeError, "eps must be a number, got None", {"eps": None}),
    ],
    "add_layer_norm": [
        (ValueError, "branch must have shape", {"branch": ones(B, 1, D)}),
        (ValueError, "layer_scale must have shape", {"layer_scale": ones(3)}),
        (ValueError, "row_scale must have shape", {"row_scale": ones(D)}),
        (ValueError, "row_scale must not require a gradient", {"row_scale": ones(B, requires_grad=True)}),
    ],
    "linear residual": [
        *X,
        *BRANCH,
        (TypeError, "x must be a tensor", {"x": [1.0]}),
        (ValueError, "x must have shape (..., in) with weight's in = 16", {"x": ones(B, N, 15)}),
        (ValueError, "weight must be (out, in)", {"weight": ones(D)}),
        (TypeError, "weight must have x's dtype", {"weight": ones(D, D).half()}),
        (ValueError, "weight must be on x's device", {"weight": ones(D, D, device="meta")}),
        (ValueError, "bias must have shape (out,) = (16,), got (24,)", {"bias": ones(24)}),
        (TypeError, "bias must have x's dtype", {"bias": ones(D).double()}),
        (ValueError, "row_scale needs x with a batch dimension",
         {"x": ones(D), "row_scale": ones(1), "residual": None}),
        (ValueError, "residual must have shape (..., out) = (2, 4, 16)", {"residual": ones(B, N, 24)}),
        (TypeError, "residual must be float32", {"residual": ones(B, N, D, dtype=torch.int)}),
        (ValueError, "activation must be one of gelu, gelu_tanh, quick_gelu, relu, silu, got 'glu'",
         {"activation": "glu"}),
    ],
    "layer_norm_linear": [
        *X,
        *NORM,
        (TypeError, "weight must have x's dtype", {"weight": ones(D, D).half()}),
        (ValueError, "weight must be (out, in)", {"weight": ones(D)}),
        (ValueError, "bias must have shape", {"bias": ones(40)}),
        (ValueError, "bias must be one for each weight, or None, got 2 for 3 weights",
         {"weight": [ones(8, D)] * 3, "bias": [ones(8)] * 2}),
        (ValueError, "bias must be one for each weight, or None, got 0 for 0 weights", {"weight": (), "bias": None}),
        (ValueError, "bias[1] must have shape (out,) = (8,)",
         {"weight": [ones(24, D), ones(8, D)], "bias": [ones(24)] * 2}),
    ],
    "layer_norm_attention": [
        *X,
        *NORM,
        *BRANCH,
        (ValueError, "x must have shape (B, N, D), got (4, 16)", {"x": ones(N, D)}),
        (TypeError, "qkv_weight must have x's dtype", {"qkv_weight": ones(96, D).half()}),
        (ValueError, "qkv_bias must have shape (out,) = (96,)", {"qkv_bias": ones(32)}),
        (ValueError, "qkv_bias must be one for each weight, or None, got 1 for 3 weights",
         {"qkv_weight": [ones(32, D)] * 3}),
        (ValueError, "qkv_weight[1] must be (out, in)", {"qkv_weight": [ones(32, D), ones(D)], "qkv_bias": None}),
        (ValueError, f"{WANTED} * head_dim rows, or be three of num_heads * head_dim rows each, with num_heads = 5",
         {"num_heads": 5}),
        (ValueError, WANTED, {"num_heads": 0}),
        (ValueError, WANTED, {"num_heads": 2.0}),
        (ValueError, WANTED, {"qkv_weight": ones(98, D), "qkv_bias": None}),
        (ValueError, WANTED, {"qkv_weight": [ones(48, D)] * 2, "qkv_bias": None}),
        (ValueError, WANTED,
         {"qkv_weight": [ones(rows, D) for rows in (64, 16, 16)], "qkv_bias": None}),
        (ValueError, HEADS + "8", {"num_heads": 4}),
        (TypeError, "proj_weight must be a tensor", {"proj_weight": None}),
        (ValueError, "proj_weight must have shape (out, num_heads * head_dim) with num_heads * head_dim = 32",
         {"proj_weight": ones(D, 40)}),
        (ValueError, "proj_bias must have shape (out,)", {"proj_bias": ones(40)}),
        (ValueError, "recompute must be one of none, attention, qkv, all, got 'some'", {"recompute": "some"}),
        (ValueError, "dropout_p must be in [0, 1), got 1.0", {"dropout_p": 1.0}),
        (ValueError, "scale must be finite", {"scale": math.inf}),
        (ValueError, "residual must have shape (..., out)", {"residual": ones(B, 1, D)}),
        (ValueError, "rotary.sin must broadcast", {"rotary": ops.Rotary(ones(3, D), ones(3, D))}),
        (ValueError, "rotary must not require a gradient: it is not differentiated here; see rotary_qkvpacked",
         {"rotary": ops.Rotary(ones(N, D), ones(N, D, requires_grad=True))}),
        (TypeError, "scale_norm must be an ops.Norm, got Tensor", {"scale_norm": ones(32)}),
        (ValueError, "scale_norm.weight must have shape (num_heads * head_dim,) = (32,), got (16,)",
         {"scale_norm": ops.Norm(ones(D))}),
        (TypeError, "scale_norm.bias must have x's dtype", {"scale_norm": ops.Norm(ones(32), ones(32).half())}),
        (TypeError, "qk_norm must be a tuple of two ops.Norm, got Norm(", {"qk_norm": ops.Norm(ones(D))}),
        (ValueError, "qk_norm[1].weight must have shape (head_dim,) = (16,), got (32,)",
         {"qk_norm": (ops.Norm(ones(D)), ops.Norm(ones(32)))}),
        (ValueError, "qk_norm[1] must be like qk_norm[0]",
         {"qk_norm": (ops.Norm(ones(D)), ops.Norm(ones(D), kind="rms"))}),
        (TypeError, "scale_norm.eps must be a number, got None", {"scale_norm": (ones(32), None, None)}),
    ],
    "mlp gelu": MLP,
    "mlp swiglu": [
        (ValueError, "fc1_weight must have 2 * hidden rows, of the gate and of the value, got 41",
         {"fc1_weight": ones(41, D), "fc1_bias": None}),
        (ValueError, "fc2_weight must have shape (out, hidden) with hidden = 20", {"fc2_weight": ones(D, 40)}),
        (ValueError, "fc1_weight must be two of (hidden, in), the gate's and the value's, got (20, 16) and (10, 16)",
         {"fc1_weight": (ones(20, D), ones(10, D)), "fc1_bias": None}),
        (TypeError, "fc1_weight must be a tensor, or the gate's and the value's, got tuple of 1",
         {"fc1_weight": (ones(20, D),)}),
        (TypeError, "fc1_weight must be a tensor, or the gate's and the value's, got NoneType", {"fc1_weight": None}),
        (TypeError, "fc1_bias must be one for each of fc1_weight's two, or None, got Tensor", {"fc1_weight": PAIR}),
        (ValueError, "fc1_bias[1] must have shape (out,) = (20,)",
         {"fc1_weight": PAIR, "fc1_bias": (None, ones(40))}),
        (TypeError, "fc1_weight[1] must have x's dtype",
         {"fc1_weight": (PAIR[0], ones(20, D).half()), "fc1_bias": None}),
        (TypeError, "inner_norm must be an ops.Norm, got Tensor", {"inner_norm": ones(20)}),
        (ValueError, "inner_norm.weight must have shape (hidden,) = (20,), got (40,)",
         {"inner_norm": (ones(40), ones(20), 1e-6)}),
        (ValueError, "inner_norm.bias must have shape (hidden,) = (20,), got (40,)",
         {"inner_norm": ops.Norm(ones(20), ones(40))}),
        (ValueError, "inner_norm.bias must be None for the kind 'rms'",
         {"inner_norm": ops.Norm(ones(20), ones(20), kind="rms")}),
        (ValueError, "inner_norm.kind must be one of layer, rms, got 'batch'",
         {"inner_norm": ops.Norm(ones(20), kind="batch")}),
        (ValueError, "inner_norm.eps must be finite", {"inner_norm": (ones(20), ones(20), -1.0)}),
        (ValueError, "activation must be one of gelu, gelu_tanh, quick_gelu, relu, silu, swiglu, geglu, got 'glu'",
         {"activation": "glu"}),
        (ValueError, "recompute must be one of none, activation, all, got 'some'", {"recompute": "some"}),
        (ValueError, "dropout_p must be in [0, 1), got 1.0", {"dropout_p": 1.0}),
        (ValueError, "residual must have shape (..., out)", {"residual": ones(B, 1, D)}),
    ],
    "layer_norm_mlp gelu": [*MLP, *NORM],
    "attention": [
        (TypeError, "q must be a tensor", {"q": [1.0]}),
        (TypeError, "q must be float32", {"q": ones(B, N, 2, D, dtype=torch.long)}),
        (ValueError, "q must have shape (B, N, H, d)", {"q": ones(N, 2, D)}),
        (TypeError, "k must be a tensor", {"k": None}),
        (TypeError, "k must have q's dtype", {"k": ones(B, N, 2, D).half()}),
        (ValueError, "v must be on q's device", {"v": ones(B, N, 2, D, device="meta")}),
        (ValueError, "v must have k's shape", {"v": ones(B, 3, 2, D)}),
        (ValueError, HEADS + "12", dict.fromkeys("qkv", ones(B, N, 2, 12))),
        (ValueError, "dropout_p must be in [0, 1), got 1", {"dropout_p": 1.0}),
        (ValueError, "dropout_p must be in [0, 1), got -0.1", {"dropout_p": -0.1}),
        (ValueError, "scale must be finite", {"scale": math.inf}),
    ],
    "attention mask": [
        (ValueError, "k must have q's shape (2, 4, 2, 16), or a divisor of its heads, got (2, 4, 3, 16)",
         {"k": ones(B, N, 3, D)}),
        (TypeError, "attn_mask must be a tensor or None, got float", {"attn_mask": 0.0}),
        (TypeError, "attn_mask must be float32", {"attn_mask": ones(N, N, dtype=torch.long)}),
        (ValueError, "attn_mask must be broadcastable to (B, H, N, N) = (2, 2, 4, 4)", {"attn_mask": ones(N, 3)}),
        (ValueError, "attn_mask must be broadcastable", {"attn_mask": ones(3, 1, N, N)}),
        (ValueError, "attn_mask must be broadcastable", {"attn_mask": ones(1, 2, 2, N, N)}),
        (ValueError, "attn_mask must be on q's device", {"attn_mask": ones(N, N, device="meta")}),
    ],
    "attention_varlen": [
        (ValueError, "q must have shape (T, H, d)", {"q": ones(B, N, 2, D)}),
        (ValueError, "k must have q's shape", {"k": ones(B * N, 2, 8)}),
        (ValueError, "k must have q's shape", {"k": ones(7, 2, D)}),
        (ValueError, "k must have q's shape", {"q": ones(B * N, 0, D), "k": ones(B * N, 0, D)}),
        (ValueError, "v must have k's shape", {"v": ones(B * N, 2, D)}),
        (TypeError, "cu_seqlens must be a tensor of int32 or int64, got list", {"cu_seqlens": [0, 8]}),
        (TypeError, "cu_seqlens must be a tensor of int32 or int64, got torch.float32", {"cu_seqlens": ones(4)}),
        (ValueError, "cu_seqlens must have shape (B + 1,)", {"cu_seqlens": ENDS[None]}),
        (ValueError, "cu_seqlens must have shape (B + 1,)", {"cu_seqlens": ENDS[:1]}),
        (ValueError, "cu_seqlens must be on q's device", {"cu_seqlens": ENDS.to("meta")}),
        (ValueError, "cu_seqlens must ascend from 0 to the number of tokens 8", {"cu_seqlens": ENDS[:3]}),
        (ValueError, "cu_seqlens must ascend", {"cu_seqlens": ENDS[[0, 2, 1, 3]]}),
        (ValueError, "max_seqlen must be at least the longest sequence's length 5, got 3", {"max_seqlen": 3}),
        (TypeError, "max_seqlen must be an integer or None", {"max_seqlen": 5.0}),
        (ValueError, "max_seqlen must be at least 1", {"max_seqlen": 0}),
        (ValueError, "dropout_p", {"dropout_p": 1.0}),
        (ValueError, "scale must be finite", {"scale": math.inf}),
    ],
    "attention_qkvpacked": [
        (ValueError, "attn_mask must be on qkv's device", {"attn_mask": ones(N, N, device="meta")}),
        (ValueError, HEADS + "264", {"qkv": ones(1, 2, 3, 1, 264)}),
        (ValueError, "qkv must have shape (B, N, 3, H, d)", {"qkv": ones(B, N, 2, D)}),
        (TypeError, "qkv must be float32", {"qkv": ones(B, N, 3, 2, D, dtype=torch.bool)}),
    ],
    "rotary halves": [
        (TypeError, "x must be float32", {"x": ones(B, N, 2, D, dtype=torch.long)}),
        (ValueError, "x must have shape (B, N, H, d)", {"x": ones(B, N, D)}),
        (ValueError, HEADS + "12", {"x": ones(B, N, 2, 12)}),
        (TypeError, "rotary must be an ops.Rotary, got tuple", {"rotary": (ones(3, D), ones(3, D))}),
        (TypeError, "rotary.sin must be a tensor", {"rotary": ops.Rotary(None, ones(3, D), 1)}),
        (TypeError, "rotary.cos must be float32", {"rotary": ops.Rotary(ones(3, D), ones(3, D, dtype=torch.int), 1)}),
        (ValueError, "rotary.sin must be on x's device", {"rotary": ops.Rotary(ones(3, D, device="meta"), ones(3, D))}),
        (ValueError, "rotary.sin must broadcast to (B, H, N - P, d) = (2, 2, 4, 16) in B and H, with "
         "P = num_prefix_tokens = 0, got (3, 16)", {"rotary": ops.Rotary(ones(3, D), ones(3, D))}),
        (ValueError, "rotary.sin must broadcast", {"rotary": ops.Rotary(ones(1, D), ones(1, D))}),
        (ValueError, "rotary.sin must broadcast", {"rotary": ops.Rotary(ones(3, N, D), ones(3, N, D))}),
        (ValueError, "rotary.sin must broadcast", {"rotary": ops.Rotary(ones(N * D), ones(N * D))}),
        (ValueError, "rotary.cos must have the shape of rotary.sin (1, 4, 16), got (4, 16)",
         {"rotary": ops.Rotary(ones(1, N, D), ones(N, D))}),
    ],
    "rotary_qkvpacked": [
        (ValueError, "qkv must have shape (B, N, 3, H, d)", {"qkv": ones(B, N, 2, D)}),
        (ValueError, HEADS + "264", {"qkv": ones(1, 2, 3, 1, 264)}),
        (ValueError, "rotary.sin must broadcast", {"rotary": ops.Rotary(ones(3, D), ones(3, D))}),
    ],
    "qk_norm": [
        (TypeError, "q must be float32", {"q": ones(B, N, 2, D, dtype=torch.long)}),
        (ValueError, "q must have shape (B, N, H, d)", {"q": ones(B, N, D)}),
        (TypeError, "k must have q's dtype", {"k": ones(B, N, 2, D).half()}),
        (ValueError, "k must have shape q's shape = (2, 4, 1, 16), got (2, 4, 2, 16)", {"k": ones(B, N, 2, D)}),
        (ValueError, HEADS + "12", {"q": ones(B, N, 2, 12), "k": ones(B, N, 2, 12)}),
        (TypeError, "q_norm must be an ops.Norm, got Tensor", {"q_norm": ones(D)}),
        (ValueError, "k_norm.weight must have shape (head_dim,) = (16,), got (15,)", {"k_norm": ops.Norm(ones(15))}),
        (TypeError, "q_norm.weight must have q's dtype", {"q_norm": ops.Norm(ones(D).half())}),
        (ValueError, "q_norm.kind must be one of layer, rms", {"q_norm": ops.Norm(ones(D), kind="l2")}),
        (ValueError, "k_norm must be like q_norm: kind 'layer', eps 1e-06, a bias, got kind 'rms', eps 1e-06, no bias",
         {"k_norm": ops.Norm(ones(D), kind="rms")}),
        (ValueError, "k_norm must be like q_norm: kind 'layer', eps 1e-06, a bias, got kind 'layer', eps 1e-05, a bias",
         {"k_norm": ops.Norm(ones(D), ones(D), 1e-5)}),
        (ValueError, "k_norm must be like q_norm", {"k_norm": ops.Norm(ones(D))}),
        (ValueError, "rotary.sin must be on q's device",
         {"rotary": ops.Rotary(ones(N, D, device="meta"), ones(N, D))}),
        (ValueError, "rotary must not require a gradient: it is not differentiated here; see rotary",
         {"rotary": ops.Rotary(ones(N, D), ones(N, D, requires_grad=True))}),
    ],
    "dropout": [
        (ValueError, "p must be in [0, 1), got 1.0", {"p": 1.0}),
        (ValueError, "p must be in [0, 1), got -0.1", {"p": -0.1}),
        (ValueError, "p must be in [0, 1), got nan", {"p": math.nan}),
        (TypeError, "x must be float32", {"x": ones(2, dtype=torch.long)}),
        (TypeError, "x must be a tensor", {"x": [1.0]}),
    ],
    "patch_embed": [
        (TypeError, "image must be a tensor", {"image": [1.0]}),
        (TypeError, "image must be uint8, float32", {"image": ones(B, 3, 8, 8, dtype=torch.long)}),
        (TypeError, "weight must be float32", {"weight": ones(16, 3, 4, 4, dtype=torch.uint8)}),
        (ValueError, "image must have shape (B, C, H, W) with C = 3, got (3, 8, 8)", {"image": ones(3, 8, 8)}),
        (ValueError, "weight must have shape (D, C, ph, pw)", {"weight": ones(16, 48)}),
        (TypeError, "weight must have image's dtype", {"weight": ones(16, 3, 4, 4).half()}),
        (ValueError, "weight must be on image's device", {"weight": ones(16, 3, 4, 4, device="meta")}),
        (ValueError, "image must have shape (B, C, H, W) with C = 3, got (2, 2, 8, 8)", {"image": ones(B, 2, 8, 8)}),
        (ValueError, "image size (H, W) must be a positive multiple of the patch (4, 4), got (8, 7)",
         {"image": ones(B, 3, 8, 7)}),
        (ValueError, "image size (H, W) must be a positive multiple of the patch (4, 4), got (0, 8)",
         {"image": ones(B, 3, 0, 8)}),
        (ValueError, "bias must have shape (D,) = (16,)", {"bias": ones(15)}),
        (TypeError, "bias must have weight's dtype", {"bias": ones(16).half()}),
        (ValueError, "pos_embed must have shape (patches, D) = (4, 16)", {"pos_embed": ones(5, 16)}),
        (TypeError, "pos_embed must have weight's dtype", {"pos_embed": ones(4, 16).double()}),
        (ValueError, "prefix must have shape (P, D) with D = 16", {"prefix": ones(16)}),
        (ValueError, "mean is for uint8 images", {"mean": (0.5, 0.5, 0.5)}),
        (ValueError, "std is for uint8 images", {"std": (0.5, 0.5, 0.5)}),
    ],
    "patch_embed uint8": [
        (ValueError, "mean must be one number in [0, 1] for each of the 3 channels, got (0.5, 0.5)",
         {"mean": (0.5, 0.5)}),
        (ValueError, "mean must have one value for each of the 3 channels, got 2", {"mean": ones(2)}),
        (ValueError, "mean must be one number in [0, 1]", {"mean": (0.2, math.nan, 0.2)}),
        (ValueError, "mean must be one number in [0, 1]", {"mean": (123.7, 116.3, 103.5)}),
        (TypeError, "mean must be one number in [0, 1]", {"mean": 0.5}),
        (ValueError, "std must be one number in (0, 1]", {"std": (0.2, 0.0, 0.2)}),
        (ValueError, "std must be one number in (0, 1]", {"std": (58.4, 57.1, 57.4)}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "error", "message", "wrong"), [(name, *row) for name, rows in BAD.items() for row in rows]
)
def test_bad_arguments(
    name: str, error: type[Exception], message: str, wrong: dict[str, Any], device: torch.device
) -> None:
    wrong = tree_map_only(Tensor, lambda t: t if t.is_meta else t.to(device), wrong)
    row = ROWS[name]
    arguments = row.arguments(made(name, B, N, device), **more(name))
    with ops.use_backend("aten"), pytest.raises(error) as raised:  # which checks values of cu_seqlens, too
        getattr(ops, row.op)(**arguments | wrong)
    assert str(raised.value).startswith(message)
