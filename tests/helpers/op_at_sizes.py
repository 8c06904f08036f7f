"""A row of the table of ops at some sizes, in some dtypes and with other tensors: how it is written, and drawn."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from op_cases import RMS_NORM, ROWS, tensors_of
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


def of_any_op(name: str) -> list[ValueCase]:
    """Return cases of an op of which nothing is known: sizes that fill no block of a power of two, few tokens, many
    tokens, many columns; without each tensor that may be None; rows that are as small as eps."""
    parameters = inspect.signature(getattr(ops, ROWS[name].op)).parameters
    found = [
        case(name, F32, 3, 7, D=72, H=3, d=24, hidden=90, gated=50),
        case(name, F16, 1, 2, D=13, H=1, hidden=27, gated=9),
        case(name, BF16, 1, 300, D=24, H=1, d=72),
        case(name, F32, 2, 5, D=2500, H=1, d=32),
    ]
    optional = [key for key in ROWS[name].tensors if key in parameters and parameters[key].default is None]
    found += [case(name, F32, 3, 7, D=72, **without(key)) for key in optional]
    if "eps" in parameters:  # such rows have a variance of 0.01 and a norm of 0.85
        found += [case(name, F32, 3, 7, D=72, kind="small", options={"eps": eps}) for eps in (0.01, 0.85)]
    return found
