"""Every op at the sizes, dtypes and options at which its kernels take other paths: tiles with and without a tail,
dimensions that are no power of two, arguments that are left out or of another dtype, every shape of a mask. A row is a
row of the table of ops, or one of op_at_sizes.py, with what it changes.
"""

from __future__ import annotations

import torch
from op_at_sizes import BF16, F16, F32, FIXED, bytes_of, case, in_windows, masked, of_any_op, packed, patches, without
from op_cases import FORMULAS, ROWS

from fastvit.study.accuracy.cases import NORM, X

RMS = {"tensors": {"norm_bias": None}, "options": {"norm": "rms"}}
RMS_HEADS = without("q_bias", "k_bias")
NO_POSITIONS = ("fixed_sin", "fixed_cos")
BRANCH = ("layer_scale", "row_scale", "residual")
WIDE = {"residual": F32}

LINEAR = [
    # rows, columns and sums that fill no tile; rows of a sample that cross tiles; one row and column
    case("linear", F32, 3, 34, D=100, hidden=90, **without(*BRANCH)),
    case("linear", BF16, 3, 34, D=100, hidden=90, **without("row_scale", "residual", "bias")),
    case("linear", F16, 3, 34, D=100, hidden=90, **without("layer_scale", "residual")),
    case("linear", F32, 3, 34, D=100, hidden=90, **without("layer_scale", "row_scale", "bias")),
    case("linear", BF16, 2, 17, D=40, hidden=24, dtypes=WIDE),
    case("linear", F32, 2, 37, D=72, hidden=88, **without(*BRANCH), options={"activation": "gelu"}),
    case("linear", BF16, 2, 37, D=72, hidden=88, **without(*BRANCH), options={"activation": "gelu_tanh"}),
    case("linear", F32, 5, 13, D=40, hidden=24, options={"activation": "relu"}),
    case("linear", BF16, 5, 13, D=40, hidden=24, options={"activation": "silu"}),
]
NORMS = [
    # one row; rows that fill no tile; widths below and above a power of two, and of two; more tiles than programs
    case("layer_norm", F16, 1, 1, D=192),
    case("layer_norm", F32, 2, 197, D=48),
    case("layer_norm", BF16, 3, 7, D=1000),
    case("layer_norm", F32, 37, 130),
    *of_any_op("rms_norm"),
    # a mean of 1000, which shows a variance in one pass and masked lanes that enter it; rows as small as eps
    case("layer_norm", F32, 2, 5, D=769, kind="offset"),
    case("rms_norm", F32, 2, 5, D=769, kind="offset"),
    case("layer_norm", F32, 3, 7, D=40, kind="small", tensors={"bias": None}, options={"eps": 0.02}),
    case("add_layer_norm", F32, 5, 13, D=72, **without("layer_scale", "row_scale")),
    case("add_layer_norm", BF16, 5, 13, D=72, **without("layer_scale", "bias")),
    case("add_layer_norm", F32, 5, 13, D=72, tensors={"bias": None}, options={"norm": "rms"}),
    # products are not rounded to a dtype narrower than the sum's
    case("add_layer_norm", F32, 5, 13, D=72, dtypes={"branch": BF16}),
    case("add_layer_norm", F32, 5, 13, D=72, dtypes={"residual": BF16, "layer_scale": BF16, "row_scale": BF16}),
    case("layer_norm_linear", F32, 1, 1, D=13, H=1, d=9, tensors={"bias": None}),
    case("layer_norm_linear", BF16, D=72, d=8, **RMS),
]
INNER = {"inner_weight": ("hidden",)}
GATED_INNER = {"inner_weight": ("gated",)}
MLPS = [
    case("mlp gelu", BF16, 3, 7, D=24, options={"recompute": "all", "activation": "gelu_tanh"}),
    case("mlp gelu", F32, 3, 7, D=24, tensors=INNER, options={"recompute": "activation"}),
    case("layer_norm_mlp gelu", F16, 3, 37, D=24, **RMS),
    case("layer_norm_mlp inner", F32, 3, 7, D=24, options={"recompute": "all"}),
    case(
        "mlp swiglu", BF16, 3, 7, D=24, tensors=GATED_INNER | {"inner_bias": ("gated",)}, options={"recompute": "all"}
    ),
    case("mlp swiglu", F32, 3, 7, D=24, options={"activation": "geglu_tanh"}),
    case("layer_norm_mlp gated", BF16, 3, 7, D=24, tensors={"value_bias": None, "inner_bias": None}),
    case("layer_norm_mlp gated recompute", F32, 3, 7, D=24),
    # a residual of its own, in float32 after matmuls in bfloat16; more rows than hidden units
    case("mlp gelu", BF16, 5, 11, hidden=20, tensors={"residual": X["x"], "row_scale": None}, dtypes=WIDE),
    case("layer_norm_mlp swiglu", BF16, 5, 11, tensors={"residual": X["x"], "layer_scale": None}, dtypes=WIDE),
    case("mlp to another width", F32, 1, 1, D=13, hidden=27, out=5, **without("fc1_bias", "fc2_bias", "residual")),
    # an odd width, as EVA-02's of 1,365: rows that are not aligned, and a short last tile of columns
    case("layer_norm_mlp gated", BF16, 1, 3, D=48, gated=85, **without("layer_scale", "row_scale")),
]
BLOCKS = [
    case("layer_norm_attention", F16, D=24, options={"scale": 0.3}),
    case("layer_norm_attention rotary", F32, D=24, tensors={"attn_mask": None}),
    case("layer_norm_attention rotary", BF16, D=24, tensors={"scale_bias": None}, options={"interleaved": True}),
    case("layer_norm_attention", BF16, D=24, tensors={"residual": X["x"], "row_scale": None, **NORM}, dtypes=WIDE),
    case(
        "layer_norm_attention to another width", F32, 3, D=13, out=5,
        **without("qkv_bias", "proj_bias", "residual", "norm_bias"),
    ),
    case("layer_norm_attention lengths", F32, D=24, **packed((7, 0, 1, 22))),
]  # fmt: skip
ATTENTION = [
    # one key; fewer than a vector; one tile and several, with one and two tails. A head of one part, of two that fit
    # exactly, of two with masked columns
    case("attention_qkvpacked", F16, 2, 1, H=1),
    case("attention_qkvpacked", BF16, 1, 7, d=80),
    case("attention_qkvpacked", F32, 1, 17, d=72),
    case("attention_qkvpacked", F16, 1, 50, d=64),
    case("attention", F32, 1, 70, H=1, d=96),
    case("attention", F16, 1, 257, H=1),
    case("attention", F16, 1, 150, H=1, d=88),
    case("attention", BF16, 1, 128, H=1, d=128),
    case("attention", F32, 1, 69, H=1, d=32, kind="large", options={"scale": 0.5}),
    # scales that are no power of two round the scores: forward and backward pass must round them alike
    case("attention", F32, 1, d=256, options={"scale": 0.3}),
]
MASKS = [
    # broadcast along each dimension, as many dimensions as there are; heads that share keys; masks of another dtype
    case("attention keys", F32, N=37, G=1, **masked("B", "H", "N", "N")),
    case("attention keys", BF16, 1, 21, H=5, **masked("B", 1, 1, "N"), dtypes={"attn_mask": BF16}),
    case("attention keys", F16, N=37, G=1, **masked("B", 1, 1, "N"), dtypes={"attn_mask": torch.bool}),
    case("attention keys", F16, 1, 48, H=4, G=2, **masked("H", "N", "N"), dtypes={"attn_mask": F16}),
    case("attention keys", F32, 3, 20, K=37, H=1, **masked("N", "K")),
    case("attention keys", F32, N=21, **masked("B", "H", "N", 1)),
    case("attention keys", F32, 1, 70, H=1, d=32, **masked("N", "N"), dtypes={"attn_mask": torch.bool}),
    case("attention keys", BF16, 1, 100, H=1, d=96, **masked("H", "N", "N"), dtypes={"attn_mask": BF16}),
    # more or fewer keys than queries; one of either; causal, alone and with a mask
    case("attention keys", F32, 1, 1, K=70, d=24),
    case("attention keys", BF16, 1, 70, K=1, G=1, d=24),
    case("attention keys", F32, 1, 7, K=3, d=24, G=1, **masked(causal=True)),
    case("attention keys", F32, 1, 17, K=130, G=1, d=24),
    case("attention keys", F32, N=40, d=32, G=1, **masked(causal=True)),
    case("attention keys", BF16, 1, 150, H=1, d=32, **masked(causal=True)),
    case("attention keys", F32, N=20, K=15, **masked("B", 1, 1, "K", causal=True)),
    case("attention keys", F32, 1, 40, K=30, **masked("H", "N", "K", causal=True), dtypes={"attn_mask": torch.bool}),
]
# one key tile; a padded column and row; a grid row in a tile; tiles of columns; several tiles of queries and rows
GRIDS = [(12, 16, 3, 4, F32), (37, 24, 5, 7, BF16), (20, 72, 3, 32, F16), (33, 16, 2, 40, F32), (70, 32, 12, 8, F32)]
RELATIVE = [
    case("attention relative", dtype, 1, M, d=d, gh=height, gw=width, K=height * width)
    for M, d, height, width, dtype in GRIDS
] + [
    # windows of one tile; that pad it; of several tiles of queries and rows, which are the grid; of tiles of columns
    case("attention_windows relative", F32, **in_windows((6, 4), (3, 4))),
    case("attention_windows relative", BF16, 1, d=72, **in_windows((5, 14), (5, 7), scale=0.3)),
    case("attention_windows relative", F32, 1, H=1, d=24, **in_windows((9, 10), (9, 10))),
    case("attention_windows relative", F16, 1, H=1, d=24, **in_windows((4, 32), (2, 32))),
    case("attention_windows relative", F32, 1, H=1, **in_windows((2, 34), (2, 17))),
]
PACKS = [
    # one token and none; fewer than a vector; tails of a tile; several tiles; shared keys; a loop in some programs only
    case("attention_varlen", F32, d=24, **packed((5, 1, 0, 33))),
    case("attention_varlen", F16, d=24, G=1, **packed((1, 1))),
    case("attention_varlen", F32, d=80, G=1, **packed((1, 15, 16, 33), scale=0.2)),
    case("attention_varlen cross", F32, d=24, G=1, **packed((1, 1, 1), (35, 0, 20))),
    case("attention_varlen cross", F16, d=24, **packed((17, 0, 7), (20, 9, 33))),
    case("attention_varlen", F32, d=24, **packed((5, 1, 0, 33), is_causal=True)),
    case("attention_varlen cross", BF16, d=24, G=1, **packed((17, 0, 7), (33, 2, 20), is_causal=True)),
    case(
        "attention_varlen cross",
        F32,
        d=24,
        G=1,
        **packed((17, 0, 7), (20, 9, 33)),
        tensors={"attn_mask": ("H", 17, 33)},
        dtypes={"attn_mask": torch.bool},
    ),
]
WINDOWS = [
    # whole windows, with and without a shift; cut by the border, also where the roll has made neighbours; one row; a
    # window larger than the grid, and as large. A mask with a gradient of each head, each window, both; none
    case("attention_windows", F32, 1, **in_windows((3, 8), (3, 4), mask=("H", "n", "n"))),
    case("attention_windows", F32, H=1, **in_windows((3, 8), (3, 4), (1, 2), ("windows", "H", "n", "n"))),
    case("attention_windows", BF16, H=1, d=24, **in_windows((5, 6), (3, 4))),
    case("attention_windows", F32, 1, **in_windows((5, 6), (3, 4), (2, 3), ("windows", "H", "n", "n"))),
    case("attention_windows", F16, 1, H=1, d=24, **in_windows((1, 10), (1, 4), (0, 3), ("H", "n", "n"))),
    case("attention_windows", F32, 1, **in_windows((3, 5), (4, 7), (2, 6), ("H", "n", "n"))),
    # several tiles, and a mask that all heads share
    case("attention_windows", F32, 1, **in_windows((5, 7), (5, 7), (2, 4), ("n", "n"), shift_bias=-2.5, scale=0.3)),
    # a mask that hides, next to the shift's, which hides or is added; one row of it for all queries
    case(
        "attention_windows", F32, 1, H=1, **in_windows((5, 6), (3, 4), (2, 3), ("H", "n", "n")),
        dtypes={"attn_mask": torch.bool},
    ),
    case("attention_windows", F32, 1, H=1, **in_windows((5, 6), (3, 4), (2, 3), (1, "n"), shift_bias=-1.5)),
    # a mask of another dtype, next to a shift that has no short fraction
    case(
        "attention_windows", F32, 1, H=1, **in_windows((5, 6), (3, 4), (2, 3), ("n", "n"), shift_bias=-2.3),
        dtypes={"attn_mask": torch.float16},
    ),
]  # fmt: skip
OF_HEADS, OF_SAMPLES = (dict.fromkeys(("sin", "cos"), shape) for shape in (("H", "T", "d"), ("B", "H", "T", "d")))
HEADS = [
    # prefix tokens, some, none and all; several blocks of tokens; tables of a sample or a head, with gradients
    case("rotary_qkvpacked", BF16, N=21, d=64, T=16, tensors=FIXED | {"sin": None, "cos": None}),
    case("rotary_qkvpacked interleaved", F16, 3, 17, d=72, T=17, tensors=FIXED | {"sin": None, "cos": None}),
    case("rotary_qkvpacked", F32, 1, 18, H=5, d=128, tensors=dict.fromkeys(("sin", "cos"), (1, "T", "d"))),
    case("rotary_qkvpacked interleaved", F32, N=21, H=3, d=24, T=19, tensors=OF_SAMPLES),
    case("rotary halves", BF16, 4, 64, d=32, T=64, dtypes={"sin": BF16, "cos": BF16}),
    # shares of steps that are not full; a padded head; nothing but prefix; halves that are no multiple of 8 elements
    case("qk_norm packed", BF16, 1, 19, H=5, d=64, T=16),
    case("qk_norm packed", F32, N=9, d=72, T=9, options={"interleaved": True}, **RMS_HEADS),
    case("qk_norm packed", F16, 1, 9, H=3, d=256, T=6, options={"interleaved": True}),
    case("qk_norm packed", F32, N=21, H=3, d=24, T=19, tensors=dict.fromkeys(NO_POSITIONS, ("B", "H", "T", "d"))),
    # without positions: programs that sum over several steps, some of two blocks of tokens
    case("qk_norm packed", F32, 3, 130, H=1, **without(*NO_POSITIONS)),
    case("qk_norm packed", F32, 13, 3, H=1, **without(*NO_POSITIONS, "q_bias", "k_bias")),
    # a mean of 1000 in a padded head
    case("qk_norm packed", F32, 1, 9, d=72, T=8, kind="offset"),
]
IMAGES = [
    # every kind of patch; sums with and without a tail; one patch; one channel; many images in a tile; tubelets
    case("patch_embed", F32, 3, **patches(3, (3, 5), (2, 2), 40, 1)),
    case("patch_embed", F16, 1, **patches(3, (2, 3), (14, 14), 70, 1)),
    case("patch_embed", BF16, 2, **patches(3, (2, 3), (4, 6), 24, 5)),
    case("patch_embed", F32, 5, **patches(1, (4, 1), (3, 1), 1, 2)),
    case("patch_embed", F16, 70, **patches(3, (1, 1), (2, 2), 130, 1)),
    case("patch_embed video", BF16, 2, **patches(3, (3, 3, 2), (2, 4, 6), 72, 2)),
    case("patch_embed video", F32, 3, **patches(2, (4, 1, 2), (1, 3, 5), 16, 1)),
    case("patch_embed", BF16, 2, **bytes_of(3, (2, 3), (14, 14))),
    case("patch_embed video", F16, 2, **bytes_of(3, (2, 3, 2), (2, 4, 4))),
]
CASES = [*LINEAR, *NORMS, *MLPS, *BLOCKS, *ATTENTION, *MASKS, *RELATIVE, *PACKS, *WINDOWS, *HEADS, *IMAGES]
KNOWN = {known.row.op for known in CASES}
CASES += [one for name in FORMULAS if ROWS[name].op not in KNOWN for one in of_any_op(name)]
