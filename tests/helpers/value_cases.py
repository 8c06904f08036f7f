"""Every op at the sizes, dtypes and options at which its kernels take other paths: tiles with and without a tail,
dimensions that are no power of two, arguments that are left out or of another dtype, every shape of a mask. A row is a
row of the table of ops, or one of `VARIANTS`, with what it changes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from op_cases import FORMULAS, RMS_NORM, ROWS, tensors_of
from torch import Tensor

from fastvit import ops
from fastvit.reference import ops as formulas
from fastvit.study.accuracy.cases import FC, HEAD, NORM, OF_TOKENS, QKV, SCALES, OpCase, Shapes, X, sizes

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SMALL = {"D": 16, "H": 2, "d": 16, "hidden": 40, "gated": 20}
KEYS: Shapes = dict.fromkeys("kv", ("B", "K", "G", "d"))  # K keys in G heads
MIXED: Shapes = {"q": ("BN", "H", "d"), **dict.fromkeys("kv", ("BN", "G", "d")), "cu_seqlens": (0,)}
NORMS_OF_HEADS: Shapes = dict.fromkeys(("q_weight", "k_weight", "q_bias", "k_bias"), ("d",))
FIXED: Shapes = {"fixed_sin": ("T", "d"), "fixed_cos": ("T", "d")}
PATCHES: Shapes = {
    "image": ("B", "C", "height", "width"), "weight": ("D", "C", "ph", "pw"), "bias": ("D",), "pos_embed": ("P", "D"),
    "prefix": ("prefix", "D"),
}  # fmt: skip
TUBELETS: Shapes = PATCHES | {"image": ("B", "C", "frames", "height", "width"), "weight": ("D", "C", "pt", "ph", "pw")}
VARIANTS = {
    "linear": OpCase(
        "linear",
        {
            **X,
            **{"weight": ("hidden", "D"), "bias": ("hidden",), "residual": ("B", "N", "hidden")},
            **{"layer_scale": ("hidden",), "row_scale": ("B",)},
        },
    ),
    "mlp to another width": OpCase("mlp", {**X, **FC, "fc2_weight": ("out", "hidden"), "fc2_bias": ("out",)}),
    "layer_norm_attention to another width": OpCase(
        "layer_norm_attention", {**X, **NORM, **QKV, "proj_weight": ("out", "Hd"), "proj_bias": ("out",)}
    ),
    "layer_norm_attention lengths": OpCase(
        "layer_norm_attention",
        {**X, "x": ("BN", "D"), **RMS_NORM, **QKV, **SCALES, "row_scale": ("BN",), **FIXED, "cu_seqlens": (0,)},
        {"norm": "rms"},
    ),
    "attention keys": OpCase("attention", {"q": HEAD, **KEYS}),
    "attention_varlen": OpCase("attention_varlen", MIXED),
    "attention_varlen cross": OpCase(
        "attention_varlen", {**MIXED, **dict.fromkeys("kv", ("T", "G", "d")), "cu_seqlens_k": (0,)}
    ),
    "attention_windows": OpCase("attention_windows", {"qkv": ("B", "gh", "gw", 3, "H", "d")}),
    "attention_windows relative": OpCase(
        "attention_windows",
        {
            **{"qkv": ("B", "gh", "gw", 3, "H", "d")},
            **{"rows": ("B", "gh", "gw", "H", "wh"), "columns": ("B", "gh", "gw", "H", "ww")},
        },
    ),
    "qk_norm packed": OpCase("qk_norm", {"qkv": ("B", "N", 3, "H", "d"), **NORMS_OF_HEADS, **FIXED}),
    "patch_embed": OpCase("patch_embed", PATCHES),
    "patch_embed video": OpCase("patch_embed", TUBELETS),
}


@dataclass(frozen=True)
class ValueCase:
    """A row at these sizes and in this dtype.

    Attributes:
        name: of the row.
        sizes: of dimensions by name; those that are missing are small, or follow from the others.
        tensors: shapes instead of the row's; None: that tensor is left out.
        options: next to the row's, of the op and of its formula.
        dtypes: of single tensors; bool for a mask.
        kind: of the first tensor's numbers.
        lengths: of the packed sequences; of those of queries and those of keys.
    """

    name: str
    dtype: torch.dtype
    sizes: dict[str, int]
    tensors: Shapes = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    kind: str = "normal"
    lengths: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        changed = [*self.sizes.values(), *(name for name, shape in self.tensors.items() if shape is None)]
        return "-".join(map(str, (self.name, *changed, str(self.dtype).removeprefix("torch."))))

    @property
    def row(self) -> OpCase:
        row = (OF_TOKENS | ROWS | VARIANTS)[self.name]
        return replace(row, tensors=row.tensors | self.tensors, options=row.options | self.options)

    def every_size(self) -> dict[str, int]:
        given = SMALL | {"B": 2, "N": 17} | self.sizes
        basic = {name: given.pop(name) for name in ("B", "N", *SMALL, "height", "width") if name in given}
        return {"G": basic["H"], "K": basic["N"]} | sizes(**basic) | given

    def draw(self, device: torch.device) -> dict[str, Tensor | None]:
        """Draw the tensors. Masks show nine of ten keys, or add small numbers: PyTorch's flash kernel on the CPU takes
        exponentials within 20 ulp, which shows where few keys have all of the weight."""
        of, row = self.every_size(), self.row
        left_out = [name for name, shape in row.tensors.items() if shape is None]
        given = {name: shape for name, shape in row.tensors.items() if shape is not None and "seqlens" not in name}
        drawn = tensors_of(replace(row, tensors=given).shapes(of), torch.float64, device)
        first = next(iter(drawn))
        if self.kind != "normal":
            offset, factor = {"offset": (1000, 1), "large": (0, 8), "small": (0, 0.1)}[self.kind]
            drawn[first] = drawn[first].detach() * factor + offset
        made: dict[str, Tensor | None] = dict.fromkeys(left_out)
        for name, t in drawn.items():
            dtype = self.dtypes.get(name, F32 if name.endswith(("sin", "cos")) else self.dtype)
            wanted = dtype.is_floating_point and name != "row_scale" and not name.startswith("fixed")
            if name == "attn_mask":
                t = t > -1.28 if dtype is torch.bool else t / 2
            elif name == "pixels":
                t, dtype, wanted = (t.detach() * 50 + 128).clamp(0, 255), torch.uint8, False
            made[name] = t.detach().to(dtype).requires_grad_(wanted)
        for name, lengths in zip(("cu_seqlens", "cu_seqlens_k"), self.lengths, strict=False):
            ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            made[name] = torch.tensor(ends, dtype=torch.int32, device=device)
        return made

    def function(self, module: ModuleType) -> Callable[..., Any]:
        """Return the op, or its formula, as a function of what `draw` returns."""
        row = self.row

        def run(**tensors: Tensor | None) -> Any:
            arguments = row.arguments(tensors)
            if arguments.get("rotary") is not None:
                arguments["rotary"] = arguments["rotary"]._replace(
                    num_prefix_tokens=self._prefix(arguments["rotary"].sin)
                )
            if row.op == "layer_norm_attention":
                arguments["num_heads"] = self.every_size()["H"]
            if module is formulas:
                arguments.pop("recompute", None)
                arguments |= {"empty_rows": True} if row.op.startswith("attention") else {}
            return getattr(module, row.op)(**arguments)

        return run

    def _prefix(self, table: Tensor) -> int:
        of = self.every_size()
        return (of["BN"] if self.lengths else of["N"]) - table.shape[-2]


def case(name: str, dtype: torch.dtype, B: int = 2, N: int = 17, **more: Any) -> ValueCase:
    """Make a case. more: sizes of dimensions, and attributes of `ValueCase`."""
    attributes = {key: more.pop(key) for key in ("tensors", "options", "dtypes", "kind", "lengths") if key in more}
    return ValueCase(name, dtype, {"B": B, "N": N, **more}, **attributes)


def without(*names: str) -> dict[str, Any]:
    return {"tensors": dict.fromkeys(names)}


def masked(*shape: int | str, causal: bool = False) -> dict[str, Any]:
    """Return the attributes of a case with a mask of this shape, or of causal attention."""
    tensors = {"tensors": {"attn_mask": shape}} if shape else {}
    return tensors | {"options": {"scale": 0.15, "is_causal": causal}}


def in_windows(
    grid: tuple[int, int], window: tuple[int, int], shift: tuple[int, int] = (0, 0), mask: tuple[int | str, ...] = (),
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return sizes and attributes. n: the tokens of a window; windows: of a sample."""
    shape = dict(zip(("gh", "gw", "wh", "ww"), grid + window, strict=True))
    shape |= {"n": math.prod(window), "windows": math.prod(-(-a // b) for a, b in zip(grid, window, strict=True))}
    tensors = {"tensors": {"attn_mask": mask}} if mask else {}
    shifted = {"shift": shift} if any(shift) else {}
    return {**shape, **tensors, "options": {"window": window, **shifted, **options}}


def packed(*lengths: tuple[int, ...], **options: Any) -> dict[str, Any]:
    longest = {"max_seqlen": max(lengths[0])} | ({"max_seqlen_k": max(lengths[1])} if len(lengths) > 1 else {})
    return {"lengths": lengths, "BN": sum(lengths[0]), "T": sum(lengths[-1]), "options": {**longest, **options}}


def patches(C: int, grid: tuple[int, ...], patch: tuple[int, ...], D: int, prefix: int) -> dict[str, Any]:
    image = [n * step for n, step in zip(grid, patch, strict=True)]
    names = ("frames", "height", "width")[-len(grid) :]
    dimensions = dict(zip(names, image, strict=True)) | dict(zip(("pt", "ph", "pw")[-len(patch) :], patch, strict=True))
    dimensions |= {"C": C, "P": math.prod(grid), "D": D, "prefix": prefix}
    return dimensions if prefix else {**dimensions, **without("prefix")}


def bytes_of(C: int, grid: tuple[int, ...], patch: tuple[int, ...]) -> dict[str, Any]:
    names = ("B", "C", "frames", "height", "width") if len(grid) == 3 else ("B", "C", "height", "width")
    options = {"mean": (0.485, 0.456, 0.406, 0.5)[:C], "std": (0.229, 0.224, 0.225, 0.25)[:C]}
    return {**patches(C, grid, patch, 24, 1), "tensors": {"image": None, "pixels": names}, "options": options}


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
    case("rms_norm", F32, 3, 7, D=1000),
    # a mean of 1000, which shows a variance in one pass and masked lanes that enter it; rows as small as eps
    case("layer_norm", F32, 2, 5, D=769, kind="offset"),
    case("rms_norm", F32, 2, 5, D=769, kind="offset"),
    case("layer_norm", F32, 3, 7, D=40, kind="small", tensors={"bias": None}, options={"eps": 0.02}),
    case("rms_norm", F32, 3, 7, D=40, kind="small", options={"eps": 0.02}),
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


def of_any_op(name: str) -> list[ValueCase]:
    """Return cases of an op of which nothing is known: sizes that fill no block of a power of two, few, many tokens,
    many columns; without each tensor that it can do without; rows that are as small as eps."""
    parameters = inspect.signature(getattr(ops, ROWS[name].op)).parameters
    found = [
        case(name, F32, 3, 7, D=72, H=3, d=24, hidden=90, gated=50),
        case(name, F16, 1, 2, D=13, H=1, hidden=27, gated=9),
        case(name, BF16, 1, 300, D=24, H=1, d=72),
        case(name, F32, 2, 5, D=2500, H=1, d=32),
    ]
    optional = [key for key in ROWS[name].tensors if key in parameters and parameters[key].default is None]
    found += [case(name, F32, 3, 7, D=72, **without(key)) for key in optional]
    if "eps" in parameters:  # 0.01 is the variance, 0.85 the norm
        found += [case(name, F32, 3, 7, D=72, kind="small", options={"eps": eps}) for eps in (0.01, 0.85)]
    return found


KNOWN = {known.row.op for known in CASES}
CASES += [one for name in FORMULAS if ROWS[name].op not in KNOWN for one in of_any_op(name)]
