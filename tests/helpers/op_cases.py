"""The rows of `fastvit.study.accuracy.cases` at small sizes, and the tests' own rows: every op and option by name."""

import math

import pytest
import torch
from oracle import inputs
from torch import Tensor

from fastvit import ops
from fastvit.study.accuracy.cases import (
    FC,
    FIXED_TABLES,
    GATED_FC,
    MASK,
    NORM,
    OF_HEADS,
    OF_TOKENS,
    QK_WEIGHTS,
    QKV,
    SCALES,
    OpCase,
    X,
    sizes,
)
from fastvit.study.memory.peak import saved_bytes

RMS_NORM = {"norm_weight": ("D",)}
PAIR = {
    **dict.fromkeys(("gate_weight", "value_weight"), ("gated", "D")),
    **dict.fromkeys(("gate_bias", "value_bias", "inner_weight"), ("gated",)),
    "fc2_weight": ("D", "gated"),
    "fc2_bias": ("D",),
}
QKV_PACKED = ("B", "N", 3, "H", "d")
DROPOUT = {"recompute": "none", "dropout_p": 0.3}
RECOMPUTE = {"recompute": "all", "activation": "silu"}
# rows whose options or layouts follow other paths
OTHERS = {
    "layer_norm_attention rotary": OpCase(
        "layer_norm_attention",
        {**X, **RMS_NORM, **QKV, "scale_weight": ("Hd",), "scale_bias": ("Hd",), **SCALES, **FIXED_TABLES, **MASK},
        {"norm": "rms"},
    ),
    "layer_norm_attention qk_norm": OpCase("layer_norm_attention", {**X, **NORM, **QKV, **QK_WEIGHTS, **FIXED_TABLES}),
    "layer_norm_attention dropout": OpCase("layer_norm_attention", {**X, **NORM, **QKV, **SCALES}, {"dropout_p": 0.4}),
    "layer_norm_attention recompute": OpCase(
        "layer_norm_attention", {**X, **NORM, **QKV, **QK_WEIGHTS, **FIXED_TABLES, **MASK}, {"recompute": "all"}
    ),
    "mlp recompute": OpCase("mlp", {**X, **FC, **SCALES}, RECOMPUTE),
    "layer_norm_mlp recompute": OpCase("layer_norm_mlp", {**X, **NORM, **FC, **SCALES}, RECOMPUTE),
    "mlp dropout": OpCase("mlp", {**X, **FC, **SCALES}, DROPOUT),
    "layer_norm_mlp dropout": OpCase("layer_norm_mlp", {**X, **NORM, **FC, **SCALES}, DROPOUT),
    "layer_norm_mlp inner": OpCase(
        "layer_norm_mlp",
        {**X, **NORM, **FC, "inner_weight": ("hidden",), "inner_bias": ("hidden",), **SCALES},
        {"activation": "quick_gelu"},
    ),
    "mlp gated dropout": OpCase("mlp", {**X, **GATED_FC, **SCALES}, {"activation": "geglu", **DROPOUT}),
    "layer_norm_mlp gated": OpCase(
        "layer_norm_mlp", {**X, **NORM, **PAIR, "inner_bias": ("gated",), **SCALES}, {"activation": "geglu"}
    ),
    "layer_norm_mlp gated recompute": OpCase(
        "layer_norm_mlp",
        {**X, **RMS_NORM, **PAIR, **SCALES},
        {"activation": "swiglu", "recompute": "all", "norm": "rms"},
    ),
    "attention_windows dropout": OpCase(
        "attention_windows", {"qkv": ("B", 5, 6, 3, "H", "d")}, {"window": (4, 4), "shift": (1, 2), "dropout_p": 0.4}
    ),
    "attention_qkvpacked dropout": OpCase("attention_qkvpacked", {"qkv": QKV_PACKED}, {"dropout_p": 0.4}),
    "attention_varlen": OpCase(
        "attention_varlen", {"q": ("BN", "H", "d"), **dict.fromkeys("kv", ("BN", 1, "d")), "cu_seqlens": (4,)}
    ),
    "rotary_qkvpacked": OpCase(
        "rotary_qkvpacked", {"qkv": QKV_PACKED, **dict.fromkeys(("sin", "cos"), ("B", 1, "T", "d"))}
    ),
    "rotary_qkvpacked interleaved": OpCase(
        "rotary_qkvpacked",
        {"qkv": QKV_PACKED, **dict.fromkeys(("sin", "cos"), ("H", "T", "d"))},
        {"interleaved": True},
    ),
    "qk_norm": OpCase(
        "qk_norm", {"qkv": ("B", "N", 3, 1, "d"), **QK_WEIGHTS, "q_bias": ("d",), "k_bias": ("d",), **FIXED_TABLES}
    ),
}
COVERED = {"rotary interleaved", "qk_norm rms", "qk_norm layer", "layer_norm_mlp swiglu"}  # by rows of `OTHERS`
COVERED |= {"attention_varlen_qkvpacked"}  # by norm + attention of sequences of several lengths
ROWS = {name: row for name, row in (OF_HEADS | OF_TOKENS | OTHERS).items() if name not in COVERED}
FORMULAS = [name for name in ROWS if not name.endswith(("dropout", "recompute"))]  # the names that formulas.py has

# For what Python decides, for both backends alike, and for what the interpreter cannot show
not_interpreted = pytest.mark.parametrize("backend", ["aten", *["triton"] * torch.cuda.is_available()], indirect=True)


def on_both(name, aten, interpreted):
    """Parametrise a test by `backend` and `name`: on a GPU all values on both backends, otherwise few in the
    interpreter."""
    values = aten if torch.cuda.is_available() else interpreted
    cases = [("aten", value) for value in aten] + [("triton", value) for value in values]
    return pytest.mark.parametrize(("backend", name), cases, indirect=["backend"], ids=str)


def function(name, module=ops):
    """Return the op, or its formula, as a function of tensors by name."""
    return ROWS[name].call(module, **more(name))


def more(name):
    """Return the options that depend on the sizes of `made`."""
    return {"num_heads": 2} if name.startswith("layer_norm_attention") else {}


def tensors_of(shapes, dtype, device, kind="normal"):
    """Draw tensors by name, None for a shape of None. All of them, except row_scale and fixed ones, require a gradient.
    Matrices are divided by the root of the size that they sum over, but not integers."""
    made: dict[str, Tensor | None] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if shape is None:
            made[name] = None
        elif name == "row_scale":
            made[name] = torch.arange(*shape, device=device).to(dtype) % 4 * 1.25  # no neighbours have the same
        else:
            t = inputs(kind, *shape, dtype=torch.float64, device=device, seed=number)
            if name.endswith("weight") and len(shape) > 1 and kind == "normal":
                t = t / math.prod(shape[1:]) ** 0.5
            t = getattr(t, name[-3:])() if name.endswith(("sin", "cos")) else t
            made[name] = t.to(dtype).requires_grad_(not name.startswith("fixed"))
    return made


def made(name, B, N, device, dtype=torch.float32, empty=None, **others):
    """Draw the row's tensors; an image has N patches. others: sizes instead of the small ones. empty: the name of a
    dimension of size 0."""
    small = {"D": 16, "H": 2, "d": 16, "hidden": 40, "gated": 20, "patch": 4, "height": 8, "width": 2 * N}
    shapes = ROWS[name].shapes(sizes(B, N, **small | others) | {empty: 0})
    varlen, pixels = [key for key in shapes if key.startswith("cu_seqlens")], shapes.get("pixels")
    shapes = {key: shape for key, shape in shapes.items() if key not in varlen}
    tensors = tensors_of(shapes, dtype, device)
    if pixels is not None:
        tensors["pixels"] = (tensors["pixels"].detach() * 40).to(torch.uint8)
    for key in varlen:
        T = shapes["k"][0] if key.endswith("k") else next(iter(shapes.values()))[0]
        tensors[key] = torch.tensor([0, *[min(N - 1, T)] * 2, T], dtype=torch.int32, device=device)
    return tensors


def wanted(tensors):
    return {name: t for name, t in tensors.items() if t is not None and t.requires_grad}


def outputs_of(result):
    return result if isinstance(result, tuple) else (result,)


def outputs_and_gradients(op, tensors):
    """Return outputs, and gradients by name. Every call draws the same random numbers."""
    torch.manual_seed(4)
    outputs, leaves = outputs_of(op(**tensors)), wanted(tensors)
    through = [o for o in outputs if o.requires_grad]
    douts = [inputs("normal", *o.shape, dtype=o.dtype, device=o.device, seed=50 + i) for i, o in enumerate(through)]
    return outputs, dict(zip(leaves, torch.autograd.grad(through, list(leaves.values()), douts), strict=True))


def results(op, tensors):
    outputs, gradients = outputs_and_gradients(op, tensors)
    return *outputs, *gradients.values()


def saved_numel(op, tensors):
    """Count the float32 elements that a call keeps for backward, without the tensors other than x."""
    return saved_bytes(lambda: op(**tensors), [t for name, t in tensors.items() if name != "x"]) / 4
