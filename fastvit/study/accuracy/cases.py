"""The table of public ops with their tensors, by named dimensions, and their options.

`verify` draws its tensors from it; tests, and checks of launches, take the same rows at other sizes and add theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastvit import ops
from fastvit.reference import ops as formulas

HEAD_DIMS = (32, 64, 72, 80, 96, 128)
WIDTH, HEADS, TOKENS, LONG, PATCH, DROPPED = 192, 2, 197, 577, 16, 0.25
_SEED = 7

Shapes = dict[str, tuple[int | str, ...]]  # by tensor; names of dimensions are those of `sizes`

# ---- tensors that several ops take ----

X: Shapes = {"x": ("B", "N", "D")}
SCALES: Shapes = {"layer_scale": ("D",), "row_scale": ("B",)}
NORM: Shapes = {"norm_weight": ("D",), "norm_bias": ("D",)}
QKV: Shapes = {"qkv_weight": ("3Hd", "D"), "qkv_bias": ("3Hd",), "proj_weight": ("D", "Hd"), "proj_bias": ("D",)}
FC: Shapes = {"fc1_weight": ("hidden", "D"), "fc1_bias": ("hidden",), "fc2_weight": ("D", "hidden"), "fc2_bias": ("D",)}
GATED_FC: Shapes = FC | {"fc1_weight": ("2gated", "D"), "fc1_bias": ("2gated",), "fc2_weight": ("D", "gated")}
HEAD = ("B", "N", "H", "d")
MASK: Shapes = {"attn_mask": ("H", "N", "N")}
TABLES: Shapes = {"sin": ("T", "d"), "cos": ("T", "d")}
FIXED_TABLES: Shapes = {"fixed_sin": ("T", "d"), "fixed_cos": ("T", "d")}  # without a gradient
QK_WEIGHTS: Shapes = {"q_weight": ("d",), "k_weight": ("d",)}
PATCHES: Shapes = {"weight": ("D", 3, "patch", "patch"), "bias": ("D",), "pos_embed": ("P", "D"), "prefix": (1, "D")}
_IMAGE = ("B", 3, "height", "width")
TUBELETS: Shapes = {**PATCHES, "weight": ("D", 3, 2, "patch", "patch"), "pos_embed": ("2P", "D")}  # of four frames
_VIDEO = ("B", 3, 4, "height", "width")


def sizes(
    B: int, N: int = 1, D: int = 1, H: int = 1, d: int = 1, *, hidden: int = 1, gated: int = 1, patch: int = 1,
    height: int = 1, width: int = 1,
) -> dict[str, int]:  # fmt: skip
    """Return every named dimension. T: the tokens after one prefix token; P: the patches of an image; K = gh * gw: a
    grid of N tokens."""
    gh = next(i for i in range(math.isqrt(N), 0, -1) if N % i == 0)
    given = {"B": B, "N": N, "D": D, "H": H, "d": d, "hidden": hidden, "gated": gated, "patch": patch}
    given |= {"height": height, "width": width, "P": height * width // patch**2}
    given |= {"K": N, "gh": gh, "gw": N // gh, "2P": 2 * given["P"]}
    return given | {"BN": B * N, "T": N - 1, "Hd": H * d, "3Hd": 3 * H * d, "2gated": 2 * gated}


@dataclass(frozen=True)
class OpCase:
    """One op with a choice of tensors and options.

    Attributes:
        op: its name in `fastvit.ops`.
        tensors: its tensors' shapes by name; `arguments` says which names make which argument.
        options: its other keyword arguments.
    """

    op: str
    tensors: Shapes
    options: dict[str, Any] = field(default_factory=dict)

    def shapes(self, of: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the tensors' shapes at these sizes."""
        found = {}
        for name, shape in self.tensors.items():
            found[name] = tuple(n if isinstance(n, int) else of[n] for n in shape)
        return found

    def arguments(self, tensors: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Return the op's keyword arguments. The residual of an MLP and of attention is x, as in a block, unless there
        is another. more: options that depend on the sizes."""
        options = self.options | more
        found = arguments(tensors, interleaved=options.pop("interleaved", False))
        if "mlp" in self.op or self.op == "layer_norm_attention":
            found.setdefault("residual", tensors["x"])
        return found | options

    def call(self, module: ModuleType = ops, **more: Any) -> Callable[..., Any]:
        """Return the op, or its formula in the module, as a function of tensors by name."""
        return lambda **tensors: getattr(module, self.op)(**self.arguments(tensors, **more))


def arguments(
    tensors: Mapping[str, Any], *, eps: float = 1e-6, prefix: int = 1, interleaved: bool = False
) -> dict[str, Any]:
    """Return an op's keyword arguments from tensors by name. Names that are no arguments themselves:

    sin, cos; fixed_sin, fixed_cos      rotary, after `prefix` tokens
    gate_weight, value_weight           fc1_weight, a pair; the same of biases
    inner_weight, inner_bias            inner_norm, with this eps; the same of scale, q and k; no bias: RMSNorm
    qkv, with q_weight                  q and k
    rows, columns                       relative
    pixels                              image
    """
    found = dict(tensors)
    for before in ("", "fixed_"):
        if f"{before}sin" in found:
            sin, cos = found.pop(f"{before}sin"), found.pop(f"{before}cos")
            found["rotary"] = None if sin is None else ops.Rotary(sin, cos, prefix, interleaved)
    if "gate_weight" in found:
        for kind in ("weight", "bias"):
            found[f"fc1_{kind}"] = tuple(found.pop(f"{layer}_{kind}", None) for layer in ("gate", "value"))
    for name in ("inner", "scale", "q", "k"):
        weight, bias = (found.pop(f"{name}_{kind}", None) for kind in ("weight", "bias"))
        if weight is not None:
            found[f"{name}_norm"] = ops.Norm(weight, bias, eps, "rms" if bias is None else "layer")
    if "norm_weight" in found:
        found.setdefault("norm_bias", None)
        if "q_norm" in found:
            found["qk_norm"] = found.pop("q_norm"), found.pop("k_norm")
    elif "q_norm" in found and "qkv" in found:
        found["q"], found["k"], _ = found.pop("qkv").unbind(2)
    if "rows" in found:
        found["relative"] = ops.Relative(found.pop("rows"), found.pop("columns"))
    if "pixels" in found:
        found["image"] = found.pop("pixels")
    return found


WITHOUT_GRADIENT = ("row_scale", "pixels", *FIXED_TABLES)


def values(name: str, t: Tensor) -> Tensor:
    """Turn standard normal numbers into the values of a tensor of this name: factors near one, small biases, matrices
    that keep the scale of what they multiply. row_scale drops every other sample."""
    if name == "row_scale":
        return 1.25 * (torch.arange(len(t), dtype=t.dtype, device=t.device) % 2)
    if name.endswith(("sin", "cos")):
        return getattr(torch, name[-3:])(t)
    if name == "pixels":
        return (t * 50 + 128).clamp(0, 255).to(torch.uint8)
    if name.endswith("weight") and t.dim() > 1:
        return t / t[0].numel() ** 0.5
    if name.endswith(("weight", "layer_scale")):
        return 1 + 0.1 * t
    return 0.1 * t if name.endswith("bias") else t


_BYTES = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.25)}  # options for an image of bytes
OF_HEADS = {
    "attention": OpCase("attention", dict.fromkeys("qkv", HEAD)),
    "attention_qkvpacked": OpCase("attention_qkvpacked", {"qkv": ("B", "N", 3, "H", "d")}),
    "attention mask": OpCase("attention", {"q": HEAD, **dict.fromkeys("kv", ("B", "N", 1, "d")), **MASK}),
    "attention causal": OpCase("attention", dict.fromkeys("qkv", HEAD), {"is_causal": True}),
    "attention cross": OpCase(
        "attention", {"q": HEAD, **dict.fromkeys("kv", ("B", "T", "H", "d")), "attn_mask": ("H", "N", "T")}
    ),
    "attention relative": OpCase(
        "attention",
        {
            "q": HEAD,
            **dict.fromkeys("kv", ("B", "K", "H", "d")),
            "rows": (*HEAD[:3], "gh"),
            "columns": (*HEAD[:3], "gw"),
        },
    ),
    "attention_varlen": OpCase("attention_varlen", {**dict.fromkeys("qkv", ("BN", "H", "d")), "cu_seqlens": (4,)}),
    "attention_varlen cross": OpCase(
        "attention_varlen",
        {"q": ("BN", "H", "d"), **dict.fromkeys("kv", ("T", "H", "d")), "cu_seqlens": (4,), "cu_seqlens_k": (4,)},
    ),
    "attention_varlen_qkvpacked": OpCase(
        "attention_varlen_qkvpacked", {"qkv": ("BN", 3, "H", "d"), "cu_seqlens": (4,)}
    ),
    "attention_windows": OpCase(
        "attention_windows",
        {"qkv": ("B", 5, 6, 3, "H", "d"), "attn_mask": ("H", 16, 16)},
        {"window": (4, 4), "shift": (1, 2), "shift_bias": -1.5},
    ),
    "attention_windows relative": OpCase(
        "attention_windows",
        {"qkv": ("B", 8, 12, 3, "H", "d"), "rows": ("B", 8, 12, "H", 4), "columns": ("B", 8, 12, "H", 6)},
        {"window": (4, 6)},
    ),
    "rotary halves": OpCase("rotary", {"x": HEAD, **TABLES}),
    "rotary interleaved": OpCase("rotary", {"x": HEAD, **TABLES}, {"interleaved": True}),
    "rotary_qkvpacked": OpCase("rotary_qkvpacked", {"qkv": ("B", "N", 3, "H", "d"), **TABLES}),
    "qk_norm rms": OpCase("qk_norm", {"q": HEAD, "k": HEAD, **QK_WEIGHTS, **FIXED_TABLES}, {"interleaved": True}),
    "qk_norm layer": OpCase(
        "qk_norm", {"q": HEAD, "k": HEAD, **QK_WEIGHTS, **FIXED_TABLES, "q_bias": ("d",), "k_bias": ("d",)}
    ),
    "layer_norm_attention": OpCase("layer_norm_attention", {**X, **NORM, **QKV, **SCALES}),
    "layer_norm_attention lengths": OpCase(
        "layer_norm_attention",
        {"x": ("BN", "D"), **NORM, **QKV, "layer_scale": ("D",), "row_scale": ("BN",), "cu_seqlens": (4,)},
    ),
    "layer_norm_attention qk_norm": OpCase("layer_norm_attention", {**X, **NORM, **QKV, **QK_WEIGHTS}),
}
OF_TOKENS = {
    "dropout": OpCase("dropout", X, {"p": DROPPED}),
    "layer_norm": OpCase("layer_norm", {**X, "weight": ("D",), "bias": ("D",)}),
    "rms_norm": OpCase("rms_norm", {**X, "weight": ("D",)}),
    "add_layer_norm": OpCase(
        "add_layer_norm", {"residual": X["x"], "branch": X["x"], "weight": ("D",), "bias": ("D",), **SCALES}
    ),
    "linear gelu": OpCase("linear", {**X, "weight": ("hidden", "D"), "bias": ("hidden",)}, {"activation": "gelu"}),
    "linear residual": OpCase("linear", {**X, "weight": ("D", "D"), "bias": ("D",), **SCALES, "residual": X["x"]}),
    "layer_norm_linear": OpCase("layer_norm_linear", {**X, **NORM, "weight": ("3Hd", "D"), "bias": ("3Hd",)}),
    "mlp gelu": OpCase("mlp", {**X, **FC, **SCALES}),
    "layer_norm_mlp gelu": OpCase("layer_norm_mlp", {**X, **NORM, **FC, **SCALES}),
    "mlp swiglu": OpCase("mlp", {**X, **GATED_FC, **SCALES}, {"activation": "swiglu"}),
    "layer_norm_mlp swiglu": OpCase("layer_norm_mlp", {**X, **NORM, **GATED_FC, **SCALES}, {"activation": "swiglu"}),
    "patch_embed": OpCase("patch_embed", {"image": _IMAGE, **PATCHES}),
    "patch_embed uint8": OpCase("patch_embed", {"pixels": _IMAGE, **PATCHES}, _BYTES),
    "patch_embed video": OpCase("patch_embed", {"image": _VIDEO, **TUBELETS}),
}


@dataclass(frozen=True)
class Case:
    """A row of the table at the sizes that `verify` runs it with.

    Attributes:
        name: the op, and what is special about the case.
        head_dim: None for an op without heads.
        width: of the embedding; for an op on heads, of all heads.
        tokens: in a sample.
        row, shapes, options: the op's row, its tensors' shapes, and its options at these sizes.
    """

    name: str
    head_dim: int | None
    width: int
    tokens: int
    row: OpCase = field(repr=False)
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def op(self) -> str:
        return self.row.op

    @property
    def fused(self) -> Callable[..., Any]:
        return _dropout if self.op == "dropout" else self.row.call(**self.options)

    @property
    def eager(self) -> Callable[..., Any]:
        return _masked if self.op == "dropout" else self.row.call(formulas, **self.options)

    def tensors(self, dtype: torch.dtype, device: torch.device, draw: int = 0) -> dict[str, Tensor]:
        """Draw the tensors: the same numbers on every device, rounded to the dtype; others in every draw. Tables of
        positions are float32."""
        drawn: dict[str, Tensor] = {}
        for seed, (name, shape) in enumerate(self.shapes.items(), 100 * draw):
            if name.startswith("cu_seqlens"):  # three sequences
                T = len(drawn["k"] if name.endswith("k") else next(iter(drawn.values())))
                drawn[name] = torch.tensor([0, T // 7, T // 2, T], device=device)
                continue
            t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            t = values(name, t)
            if name != "pixels":
                t = t.to(torch.float32 if name.endswith(("sin", "cos")) else dtype)
            drawn[name] = t.to(device).requires_grad_(name not in WITHOUT_GRADIENT)
        return drawn


def cases(
    names: Sequence[str] | None = None, head_dims: Sequence[int] = HEAD_DIMS, width: int = WIDTH, heads: int = HEADS
) -> list[Case]:
    """Return every op, or those of `names`, at every head dimension where it has heads."""
    return [case for case in _all(head_dims, width, heads) if names is None or case.op in names]


def large() -> Iterator[Case]:
    """Yield what is large enough, in 16 bits, for the kernels that only Hopper GPUs have."""
    H = 12
    several = ("attention_qkvpacked", 22, TOKENS, 64), ("attention", 4, 1025, 64), ("attention", 4, 1025, 128)
    for name, B, N, d in several:
        yield Case(f"{name} large", d, H * d, N, OF_HEADS[name], OF_HEADS[name].shapes(sizes(B, N, H * d, H, d)))
    row = OF_TOKENS["mlp gelu"]
    yield Case("mlp gelu large", None, 384, TOKENS, row, row.shapes(sizes(56, TOKENS, 384, hidden=1536)))


def _all(head_dims: Sequence[int], D: int, H: int) -> Iterator[Case]:
    for d in head_dims:
        for name, row in OF_HEADS.items():
            if name == "layer_norm_attention qk_norm" and d != 64:
                continue
            options = {"num_heads": H} if row.op == "layer_norm_attention" else {}
            several = d == 64 and name in ("attention", "attention_qkvpacked", "attention relative")
            for tokens in (TOKENS, LONG) if several else (TOKENS,):  # one tile of keys, and several
                N = tokens - 1 if name == "attention relative" else tokens  # 14 x 14 or 24 x 24
                yield Case(name, d, H * d, N, row, row.shapes(_sizes(N, H * d, H, d)), options)
    for name, row in OF_TOKENS.items():
        yield Case(name, None, D, TOKENS, row, row.shapes(_sizes(TOKENS, D, 1, D)))


def _sizes(N: int, D: int, H: int, d: int) -> dict[str, int]:
    side = 14 * PATCH
    gated = D // 8 * 16  # 2 D, a multiple of 16
    return sizes(2, N, D, H, d, hidden=4 * D, gated=gated, patch=PATCH, height=side, width=side)


def _dropout(x: Tensor) -> Tensor:
    torch.manual_seed(_SEED)
    return ops.dropout(x, DROPPED)


def _masked(x: Tensor) -> Tensor:
    """Multiply x by the mask that the op draws for ones. Raise ArithmeticError if that keeps another share than it has
    to."""
    torch.manual_seed(_SEED)
    kept = ops.dropout(torch.ones(x.shape, device=x.device), DROPPED) != 0
    share, spread = float(kept.double().mean()), (DROPPED * (1 - DROPPED) / kept.numel()) ** 0.5
    if abs(share - (1 - DROPPED)) > 5 * spread:
        raise ArithmeticError(f"dropout({DROPPED}) keeps {share:.4f} of all elements")
    return x * kept / (1 - DROPPED)
