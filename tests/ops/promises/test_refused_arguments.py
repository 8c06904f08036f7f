"""A wrong argument of an op raises before anything runs, and the message names the argument and what is allowed."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_cases import FORMULAS, ROWS, function, made, more
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.reference import ops as formulas

B, N, D = 2, 4, 16


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


# ---- what follows from the row: dtype, device, rank and size of every tensor ----

# arguments that tensors of a row are parts of: `fastvit.study.accuracy.cases.arguments`
PARTS = {
    **dict.fromkeys(("sin", "cos", "fixed_sin", "fixed_cos"), "rotary"),
    **dict.fromkeys(("rows", "columns"), "relative"),
    **dict.fromkeys(("gate_weight", "value_weight"), "fc1_weight"),
    **dict.fromkeys(("gate_bias", "value_bias"), "fc1_bias"),
    **dict.fromkeys(("inner_weight", "inner_bias"), "inner_norm"),
    **dict.fromkeys(("scale_weight", "scale_bias"), "scale_norm"),
    "pixels": "image",
}


def argument_of(name: str, key: str) -> str:
    if key.startswith(("q_", "k_")) and key.endswith(("weight", "bias")):
        return "qk_norm" if ROWS[name].op == "layer_norm_attention" else f"{key[0]}_norm"
    return "q" if name == "qk_norm" and key == "qkv" else PARTS.get(key, key)


# tensors of any float dtype
ANY_DTYPE = {"row_scale", "attn_mask", "residual", "branch", "sin", "cos", "fixed_sin", "fixed_cos"}


def wrong_tensors(name: str, key: str, t: Tensor) -> Iterator[tuple[type[Exception], Tensor]]:
    """Yield tensors that differ from t in one way, and what they raise. A row_scale is cast if it is real. Tokens have
    one or more dimensions, an op of x alone takes any shape, and a single tensor may be on any device."""
    other = torch.float32 if "seqlens" in key else torch.long
    yield TypeError, t.to(torch.complex64 if key == "row_scale" else other)
    of_one_dtype = {*ROWS[name].tensors} - ANY_DTYPE - ({"layer_scale"} if name == "add_layer_norm" else set())
    if key in of_one_dtype and len(of_one_dtype) > 1 and t.is_floating_point():
        yield TypeError, t.half()
    if key == "x" and len(ROWS[name].tensors) > 1:
        yield ValueError, t.flatten()[0]
    if len(ROWS[name].tensors) > 1:
        yield ValueError, t.to("meta")
    if ROWS[name].tensors.keys() != {"x"}:
        yield ValueError, torch.cat([t, t[..., :1]], -1)
    if key not in ("x", "residual", "branch") and (name, key) != ("qk_norm", "qkv"):
        yield ValueError, t[None].repeat(3, *[1] * t.dim())


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_tensor(name: str, device: torch.device) -> None:
    """A tensor with another dtype, device, last dimension or rank. The message names it, or the tensor that it does not
    fit."""
    tensors = made(name, B, N, device)
    names = {argument_of(name, key) for key in tensors} | {"head_dim"}
    for key, t in tensors.items():
        for error, wrong in wrong_tensors(name, key, t.detach()):
            with ops.use_backend("aten"), pytest.raises(error) as raised:
                function(name)(**tensors | {key: wrong})
            mentioned = {argument_of(name, key)} if error is TypeError and wrong.dtype != torch.half else names
            assert any(each in str(raised.value) for each in mentioned), f"{key}: {raised.value}"


OPTIONS: dict[str, list[tuple[type[Exception], Any]]] = {
    "eps": [(ValueError, -1.0), (ValueError, math.inf), (TypeError, None)],
    "norm": [(ValueError, "batch")],
    "p": [(ValueError, 1.0), (ValueError, -0.1), (ValueError, math.nan)],
    "dropout_p": [(ValueError, 1.0), (ValueError, -0.1)],
    "scale": [(ValueError, math.inf)],
    "activation": [(ValueError, "glu"), (ValueError, "gelu_erf")],
    "recompute": [(ValueError, "some")],
    "is_causal": [(TypeError, 1)],
    "attn_mask": [(TypeError, 0.0)],
    "window": [(TypeError, 4), (TypeError, (4, 2.0)), (ValueError, (4, 0))],
    "shift_bias": [(ValueError, math.nan)],
    "rotary": [(TypeError, (ones(3, D), ones(3, D)))],
    "relative": [(TypeError, (ones(1), ones(1)))],
    "scale_norm": [(TypeError, ones(32))],
    "inner_norm": [(TypeError, ones(20))],
    "qk_norm": [(TypeError, ops.Norm(ones(D)))],
    "q_norm": [(TypeError, ones(D))],
    "cu_seqlens": [(TypeError, (0, 8.5)), (ValueError, torch.tensor([0])), (ValueError, torch.tensor([[0, 2, 5, 8]]))],
}
# the first row of every op, and others whose arguments are checked elsewhere
OF_OPS = [*{row.op: name for name, row in reversed(ROWS.items())}.values()]
OF_OPS += ["layer_norm_mlp gated", "attention relative", "attention_windows relative"]


@pytest.mark.parametrize("name", OF_OPS)
def test_a_wrong_option(name: str, device: torch.device) -> None:
    """The error begins with the option's name. Tensors that are no tensors, and nested ones, are named too."""
    row = ROWS[name]
    op, arguments = getattr(ops, row.op), row.arguments(made(name, B, N, device), **more(name))
    parameters = inspect.signature(op).parameters
    options = parameters.keys() & OPTIONS.keys() - ({"relative", "cu_seqlens"} - arguments.keys())
    for option in options & {"relative", "scale"} if "relative" in arguments else options:  # excludes other options
        for error, wrong in OPTIONS[option]:
            wrong = tree_map_only(Tensor, lambda t: t.to(device), wrong)
            with ops.use_backend("aten"), pytest.raises(error, match=rf"^{option}"):
                op(**arguments | {option: wrong})
    first = next(iter(parameters))
    nested = [
        torch.nested.nested_tensor([*arguments[first].detach()], layout=layout)
        for layout in (torch.strided, torch.jagged)
    ]
    with pytest.raises(TypeError, match=rf"{first} must be a tensor, got list"):
        op(**arguments | {first: [1.0]})
    for wrong in nested:
        with pytest.raises(TypeError, match="must be a dense tensor, got a nested one"):
            op(**arguments | {first: wrong})


# ---- what only this op can be told: (error, beginning of the message, arguments) ----

ENDS = torch.tensor([0, 2, 5, 8])
PAIR = ones(20, D), ones(20, D)
ROWS_OF_QKV = "qkv_weight must have 3 * num_heads"
HEADS = "head_dim must be a multiple of 8 from 16 to 256, got "
OF_GRID = ones(B, N, 2, 2)
SEQUENCES = {"x": ones(N, D), "residual": None, "row_scale": None, "cu_seqlens": ENDS}
TABLE, SHORT = (ops.Rotary(ones(n, D), ones(n, D)) for n in (N, 3))
Refused = list[tuple[type[Exception], str, dict[str, Any]]]
BAD: dict[str, Refused] = {
    "layer_norm": [
        (ValueError, "x must have a non-empty last", {"x": ones(B, N, 0)}),
        (ValueError, "bias must be None for norm='rms'", {"norm": "rms"}),
    ],
    "add_layer_norm": [
        (ValueError, "row_scale must not require a gradient", {"row_scale": ones(B, requires_grad=True)}),
    ],
    "linear residual": [
        (ValueError, "row_scale needs x with a batch", {"x": ones(D), "row_scale": ones(1), "residual": None}),
        (ValueError, "residual must have shape (..., out) = (2, 4, 16)", {"residual": ones(B, 1, D)}),
    ],
    "layer_norm_linear": [
        (ValueError, "norm_bias must be None for norm='rms': RMSNorm has no bias", {"norm": "rms"}),
        (ValueError, "bias must be one for each weight, or None, got 2 for 3 weights",
         {"weight": [ones(8, D)] * 3, "bias": [ones(8)] * 2}),
    ],
    "layer_norm_attention": [
        (ValueError, "x must have shape (B, N, D), got (4, 16)", {"x": ones(N, D)}),
        (ValueError, "x must have shape (T, D) with cu_seqlens, got (2, 4, 16)", {"cu_seqlens": ENDS}),
        (ValueError, "attn_mask must not require a gradient with cu_seqlens",
         {**SEQUENCES, "attn_mask": ones(N, N, requires_grad=True)}),
        (ValueError, "rotary.num_prefix_tokens must be 0 with cu_seqlens, got 1",
         {**SEQUENCES, "rotary": SHORT._replace(num_prefix_tokens=1)}),
        (ValueError, "max_seqlen must be None without cu_seqlens, got 4", {"max_seqlen": 4}),
        (ValueError, "qkv_bias must be one for each weight, or None, got 1 for 3 weights",
         {"qkv_weight": [ones(32, D)] * 3}),
        (ValueError, f"{ROWS_OF_QKV} * head_dim rows, or be three of num_heads * head_dim rows each, with",
         {"num_heads": 5}),
        (ValueError, ROWS_OF_QKV, {"num_heads": 0}),
        (ValueError, ROWS_OF_QKV, {"qkv_weight": [ones(rows, D) for rows in (64, 16, 16)], "qkv_bias": None}),
        (ValueError, "rotary must not require a gradient: it is not differentiated here; see rotary_qkvpacked",
         {"rotary": ops.Rotary(ones(N, D), ones(N, D, requires_grad=True))}),
        (ValueError, "qk_norm[1] must be like qk_norm[0]",
         {"qk_norm": (ops.Norm(ones(D)), ops.Norm(ones(D), kind="rms"))}),
    ],
    "mlp gelu": [(ValueError, "residual must have shape (..., out)", {"residual": ones(B, 1, D)})],
    "layer_norm_mlp gelu": [(ValueError, "residual must have shape (..., out)", {"residual": ones(B, 1, D)})],
    "mlp swiglu": [
        (ValueError, "fc1_weight must have 2 * hidden rows, of the gate and of the value, got 41",
         {"fc1_weight": ones(41, D), "fc1_bias": None}),
        (ValueError, "fc2_weight must have shape (out, hidden) with hidden = 20", {"fc2_weight": ones(D, 40)}),
        (ValueError, "fc1_weight must be two of (hidden, in), the gate's and the value's, got (20, 16) and (10, 16)",
         {"fc1_weight": (ones(20, D), ones(10, D)), "fc1_bias": None}),
        (TypeError, "fc1_bias must be one for each of fc1_weight's two, or None, got Tensor", {"fc1_weight": PAIR}),
        (ValueError, "fc1_bias[1] must have shape (out,) = (20,)", {"fc1_weight": PAIR, "fc1_bias": (None, ones(40))}),
        (ValueError, "inner_norm.bias must be None for inner_norm.kind='rms'",
         {"inner_norm": ops.Norm(ones(20), ones(20), kind="rms")}),
        (ValueError, "inner_norm.kind must be one of layer, rms, got 'batch'",
         {"inner_norm": ops.Norm(ones(20), kind="batch")}),
    ],
    "attention": [
        (ValueError, "k must have shape (B, N, H, d) with q's B, d, and H or a divisor of it, got (2, 4, 3, 16)",
         {"k": ones(B, N, 3, D)}),
        (ValueError, "k must have a token for q's 4 to attend to, got (2, 0, 2, 16)",
         dict.fromkeys("kv", ones(B, 0, 2, D))),
        (ValueError, "layout must be 'bnhd' or 'bhnd', got 'bhdn'", {"layout": "bhdn"}),
        (ValueError, "q must have shape (B, H, N, d), got (4, 2, 16)", {"layout": "bhnd", "q": ones(N, 2, D)}),
        (ValueError, HEADS + "12", dict.fromkeys("qkv", ones(B, N, 2, 12))),
        (ValueError, HEADS + "264", dict.fromkeys("qkv", ones(B, N, 2, 264))),
        (ValueError, "attn_mask must be broadcastable to (B, H, M, N) = (2, 2, 4, 4)", {"attn_mask": ones(N, 3)}),
    ],
    "attention relative": [
        (ValueError, "relative.rows must have shape (B, M, H, rows) = (2, 4, 2, rows), got (2, 4, 1, 2)",
         {"relative": ops.Relative(ones(B, N, 1, 2), OF_GRID)}),
        (ValueError, "relative must have as many rows times columns as k has tokens, 4, got 3 * 2",
         {"relative": ops.Relative(ones(B, N, 2, 3), OF_GRID)}),
        (ValueError, "attn_mask must be None with relative, got Tensor", {"attn_mask": ones(N, N)}),
        (ValueError, "is_causal must be False with relative, got True", {"is_causal": True}),
        (ValueError, "dropout_p must be 0.0 with relative, got 0.1", {"dropout_p": 0.1}),
        (ValueError, "k must have q's 2 heads with relative, got 1", dict.fromkeys("kv", ones(B, N, 1, D))),
    ],
    "attention_varlen": [
        (ValueError, "k must have shape (T, H, d) with q's T", {"k": ones(7, 2, D)}),
        (ValueError, "k must have shape (T, H, d)", {"q": ones(B * N, 0, D), "k": ones(B * N, 0, D)}),
        (ValueError, "cu_seqlens must ascend from 0 to the number of tokens 8", {"cu_seqlens": ENDS[:3]}),
        (ValueError, "max_seqlen must be at least the longest sequence's length 5, got 3", {"max_seqlen": 3}),
        (ValueError, "cu_seqlens must ascend", {"cu_seqlens": ENDS[[0, 2, 1, 3]]}),
        (TypeError, "max_seqlen must be an integer or None", {"max_seqlen": 5.0}),
        (ValueError, "attn_mask must be broadcastable to (1, H, max_seqlen, max_seqlen) = (1, 2, 5, 5), got",
         {"max_seqlen": 5, "attn_mask": ones(2, 1, 5, 5)}),
        (ValueError, "attn_mask must be broadcastable to (1, H, max_seqlen, max_seqlen_k) = (1, 2, 5, 3), got",
         {"max_seqlen": 5, "cu_seqlens_k": ENDS, "max_seqlen_k": 3, "attn_mask": ones(5, 5)}),
        (ValueError, "max_seqlen must be at least 1", {"max_seqlen": 0}),
        (ValueError, "max_seqlen_k must be None without cu_seqlens_k, got 5", {"max_seqlen_k": 5}),
        (ValueError, "cu_seqlens_k must have cu_seqlens' shape (4,), got (3,)", {"cu_seqlens_k": ENDS[[0, 1, 3]]}),
        (ValueError, "cu_seqlens_k must ascend from 0 to the number of tokens 8", {"cu_seqlens_k": ENDS[[0, 1, 2, 2]]}),
        (ValueError, "max_seqlen_k must be at least the longest sequence's length 3, got 2",
         {"cu_seqlens_k": ENDS, "max_seqlen_k": 2}),
    ],
    "attention_windows": [
        (TypeError, "shift must be two integers, got (True, 0)", {"shift": (True, 0)}),
        (ValueError, "shift must be from (0, 0) to less than the window (4, 4), got (0, 4)", {"shift": (0, 4)}),
        (ValueError, "shift must be from (0, 0)", {"shift": (-1, 0)}),
        (ValueError, "attn_mask must be broadcastable to (windows, H, N, N) = (4, 2, 16, 16), got (3, 1, 16, 16)",
         {"attn_mask": ones(3, 1, 16, 16)}),
    ],
    "attention_windows relative": [
        (ValueError, "relative.rows must have shape (B, gh, gw, H, wh) = (2, 8, 12, 2, 4), got (2, 8, 12, 2, 6)",
         {"relative": ops.Relative(*[ones(B, 8, 12, 2, 6)] * 2)}),
        (ValueError, "window must divide qkv's grid (8, 12) with relative, got (4, 5)",
         {"window": (4, 5), "relative": ops.Relative(ones(B, 8, 12, 2, 4), ones(B, 8, 12, 2, 5))}),
        (ValueError, "shift must be (0, 0) with relative, got (1, 0)", {"shift": (1, 0)}),
        (ValueError, "attn_mask must be None with relative, got Tensor", {"attn_mask": ones(24, 24)}),
        (ValueError, "dropout_p must be 0.0 with relative, got 0.1", {"dropout_p": 0.1}),
    ],
    "attention_qkvpacked": [(ValueError, HEADS + "264", {"qkv": ones(1, 2, 3, 1, 264)})],
    "rotary halves": [
        (ValueError, "rotary.sin must broadcast to (B, H, N - P, d) = (2, 2, 4, 16) in B and H, with "
         "P = num_prefix_tokens = 0, got (3, 16)", {"rotary": SHORT}),
        (ValueError, "rotary.cos must have the shape of rotary.sin (1, 4, 16), got (4, 16)",
         {"rotary": ops.Rotary(ones(1, N, D), ones(N, D))}),
    ],
    "rotary_qkvpacked": [(ValueError, "rotary.sin must broadcast", {"rotary": SHORT})],
    "qk_norm": [
        (ValueError, "k must have shape q's shape = (2, 4, 1, 16), got (2, 4, 2, 16)", {"k": ones(B, N, 2, D)}),
        (ValueError, "q_norm.kind must be one of layer, rms", {"q_norm": ops.Norm(ones(D), kind="l2")}),
        (ValueError, "k_norm must be like q_norm: kind 'layer', eps 1e-06, a bias, got kind 'layer', eps 1e-05, a bias",
         {"k_norm": ops.Norm(ones(D), ones(D), 1e-5)}),
    ],
    "patch_embed": [
        (ValueError, "image must have shape (B, C, T, H, W) with C = 3, got (2, 3, 8, 8)",
         {"weight": ones(16, 3, 2, 4, 4)}),
        (ValueError, "image size (T, H, W) must be a positive multiple of the patch (2, 4, 4), got (3, 8, 8)",
         {"weight": ones(16, 3, 2, 4, 4), "image": ones(B, 3, 3, 8, 8)}),
        (TypeError, "image and weight must have the same dtype, got torch.float32 and torch.float16: use "
         "image.to(torch.float16) or model.to(torch.float32), or torch.autocast", {"weight": ones(16, 3, 4, 4).half()}),
        (ValueError, "image size (H, W) must be a positive multiple of the patch (4, 4), got (0, 8)",
         {"image": ones(B, 3, 0, 8)}),
        (ValueError, "mean is for uint8 images", {"mean": (0.5, 0.5, 0.5)}),
    ],
    "patch_embed uint8": [
        (ValueError, "mean must be one number in [0, 1] for each of the 3 channels, got (0.5, 0.5)",
         {"mean": (0.5, 0.5)}),
        (ValueError, "mean must have one value for each of the 3 channels, got 2", {"mean": ones(2)}),
        (ValueError, "std must be one number in (0, 1]", {"std": (0.2, 0.0, 0.2)}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("op", dict.fromkeys(row.op for row in ROWS.values()))
def test_a_wrong_value_is_known_for_every_argument(op: str) -> None:
    """By the rows, `OPTIONS` or `BAD`; except dropout's `training`, which is only looked at, and `others`, of which
    every one is refused."""
    of_op = {name: row for name, row in ROWS.items() if row.op == op}
    known = {argument_of(name, key) for name, row in of_op.items() for key in row.tensors} | OPTIONS.keys()
    known |= {argument for name in of_op for *_, wrong in BAD.get(name, ()) for argument in wrong}
    assert inspect.signature(getattr(ops, op)).parameters.keys() <= known | {"training", "others"}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, device: torch.device) -> None:
    row = ROWS[name]
    arguments = row.arguments(made(name, B, N, device), **more(name))
    for error, message, wrong in BAD[name]:
        wrong = tree_map_only(Tensor, lambda t: t if t.is_meta else t.to(device), wrong)
        with ops.use_backend("aten"), pytest.raises(error) as raised:  # which checks values of cu_seqlens, too
            getattr(ops, row.op)(**arguments | wrong)
        assert str(raised.value).startswith(message)


@pytest.mark.parametrize("name", FORMULAS)
def test_float64_falls_back_with_one_warning(name: str, triton_backend: None, device: torch.device) -> None:
    tensors = {key: t.detach() for key, t in made(name, 2, 18, device, torch.float64).items()}
    with pytest.raises(backends.KernelUnsupported, match="float64"):
        function(name)(**tensors)
    with ops.use_backend("triton", strict=False):
        backends._warned.clear()
        with pytest.warns(UserWarning, match=r"runs on ATen instead of Triton: .*float64"):
            got = function(name)(**tensors)
    torch.testing.assert_close(got, function(name, formulas)(**tensors))
