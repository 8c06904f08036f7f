"""Every op with random shapes, dtypes, layouts, left-out arguments and wanted gradients, on both backends.

    FASTVIT_FUZZ=2000 pytest tests/ops/test_fuzz.py -k mlp

tries that many other cases of each op instead of the few fixed ones. A case that fails is made small and printed; it
becomes an `@example`. How accurate the ops are is for their own tests: the oracle's rule needs many elements to compare
errors fairly, and here is often one.
"""

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_cases import gathered
from torch import Tensor

pytest.importorskip("hypothesis")  # a machine with a GPU may lack it
from fuzzing import (
    LEADING,
    NORMED,
    NORMED_WIDTH,
    WIDTH,
    Case,
    Input,
    branch,
    case,
    fuzzed,
    of_a_kind,
    without_equal_rows,
)
from hypothesis import strategies as st

from fastvit import ops
from fastvit.ops.runtime.activations import ACTIVATIONS, GATED
from fastvit.study.accuracy import formulas
from fastvit.study.accuracy.cases import arguments


@st.composite
def layer_norm_cases(draw: st.DrawFn) -> Case:
    D = draw(NORMED_WIDTH)
    shapes = {"x": (*draw(NORMED), D), "weight": (D,), "bias": (D,)}
    return of_a_kind(draw, draw(case(shapes, eps=st.sampled_from([1e-6, 1e-5, 0.1]))), "bias")


test_layer_norm = fuzzed(layer_norm_cases(), ops.layer_norm, formulas.layer_norm)


@st.composite
def add_layer_norm_cases(draw: st.DrawFn) -> Case:
    leading, D = draw(NORMED), draw(NORMED_WIDTH)
    shapes = {"branch": (*leading, D), "weight": (D,), "bias": (D,), **branch(leading, D)}
    found = draw(case(shapes, "layer_scale row_scale", "residual branch layer_scale row_scale"))
    dtype = torch.promote_types(found.tensors["residual"].dtype, found.tensors["branch"].dtype)
    wide = {n: replace(t, dtype=dtype) for n, t in found.tensors.items() if n in ("weight", "bias")}
    return of_a_kind(draw, Case(found.tensors | wide, found.result, found.options), "bias")


test_add_layer_norm = fuzzed(add_layer_norm_cases(), ops.add_layer_norm, formulas.add_layer_norm)


@st.composite
def linear_cases(draw: st.DrawFn) -> Case:
    leading, K, out = draw(LEADING), draw(WIDTH), draw(WIDTH)
    shapes = {"x": (*leading, K), "weight": (out, K), "bias": (out,), **branch(leading, out)}
    activation = st.sampled_from([None, *ACTIVATIONS])
    return draw(case(shapes, "bias layer_scale row_scale residual", activation=activation))


test_linear = fuzzed(linear_cases(), ops.linear, formulas.linear)


@st.composite
def mlp_cases(draw: st.DrawFn, norm: bool, gated: bool) -> Case:
    """Gated: one packed layer or a pair. The input of an inner norm has no rows of one element, and no rows of equal
    elements, which a value's weight with equal rows would make."""
    leading, D = draw(NORMED if norm else LEADING), draw(NORMED_WIDTH if norm else WIDTH)
    pair, inner = draw(st.booleans()) if gated else False, draw(st.booleans())
    hidden, out = draw(NORMED_WIDTH if inner else WIDTH), draw(WIDTH)
    layers = {"gate": hidden, "value": hidden} if pair else {"fc1": 2 * hidden if gated else hidden}
    shapes = {"x": (*leading, D)} | ({"norm_weight": (D,), "norm_bias": (D,)} if norm else {})
    for layer, rows in layers.items():
        shapes |= {f"{layer}_weight": (rows, D), f"{layer}_bias": (rows,)}
    shapes |= {"inner_weight": (hidden,), "inner_bias": (hidden,)} if inner else {}
    shapes |= {"fc2_weight": (out, hidden), "fc2_bias": (out,), **branch(leading, out)}
    optional = "fc1_bias gate_bias value_bias fc2_bias layer_scale row_scale residual"
    found = draw(case(shapes, optional, activation=st.sampled_from([*(GATED if gated else ACTIVATIONS)])))
    if inner:
        found = without_equal_rows(found, "fc1_weight", "value_weight")
        if draw(st.booleans()):  # an RMSNorm
            found.tensors["inner_bias"] = None
    return of_a_kind(draw, found) if norm else found


# Large next to the variance of rows near zero, which one gate for all of them makes
INNER_EPS = 0.1


def to_itself(op: Callable[..., Any], last_weight: str = "fc2_weight") -> Callable[..., Any]:
    """With x as the residual, where it has the output's shape and there is no other."""
    op = gathered(op, INNER_EPS)

    def run(x: Tensor, residual: Tensor | None, **rest: Any) -> Any:
        if residual is None and rest[last_weight].shape[0] == x.shape[-1]:
            residual = x
        return op(x=x, residual=residual, **rest)

    return run


def fuzzed_mlp(name: str, *, gated: bool) -> Callable[..., None]:
    calls = (to_itself(getattr(module, name)) for module in (ops, formulas))
    recompute = st.sampled_from(["none", "activation", "all"])
    return fuzzed(mlp_cases("norm" in name, gated), *calls, recompute=recompute)


test_mlp = fuzzed_mlp("mlp", gated=False)
test_layer_norm_mlp = fuzzed_mlp("layer_norm_mlp", gated=False)
test_gated_mlp = fuzzed_mlp("mlp", gated=True)
test_gated_layer_norm_mlp = fuzzed_mlp("layer_norm_mlp", gated=True)


@st.composite
def layer_norm_linear_cases(draw: st.DrawFn) -> Case:
    D, layers = draw(NORMED_WIDTH), draw(st.lists(WIDTH, min_size=1, max_size=3))
    shapes = {"x": (*draw(NORMED), D), "norm_weight": (D,), "norm_bias": (D,)}
    shapes |= {f"{i}weight": (out, D) for i, out in enumerate(layers)}
    shapes |= {f"{i}bias": (out,) for i, out in enumerate(layers)}
    return of_a_kind(draw, draw(case(shapes, "0bias 1bias 2bias")))


def side_by_side(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, norm: str, **layers: Any) -> Any:
        weight, bias = ([t for n, t in layers.items() if n.endswith(kind)] for kind in ("weight", "bias"))
        return function(x, norm_weight, norm_bias, weight, bias, norm=norm)

    return run


test_layer_norm_linear = fuzzed(
    layer_norm_linear_cases(), side_by_side(ops.layer_norm_linear), side_by_side(formulas.layer_norm_linear)
)


SIZES = st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(1, 3), st.integers(2, 12).map(lambda n: 8 * n))
SCALE = st.sampled_from([None, 0.3])


@st.composite
def layer_norm_attention_cases(draw: st.DrawFn) -> Case:
    """One packed layer or three, without equal rows: q and k of equal elements make scores so large that
    the softmax is one-hot, where dP - delta is rounding and eager's, of saved probabilities, exactly zero; and what
    comes before the projection may have a norm, too. A bias of k alone has no gradient but rounding."""
    (B, N, H, d), D, out = draw(SIZES), draw(NORMED_WIDTH), draw(WIDTH)
    of_qkv = {"0qkv": H * d, "1qkv": H * d, "2qkv": H * d} if draw(st.booleans()) else {"0qkv": 3 * H * d}
    shapes = {"x": (B, N, D), "norm_weight": (D,), "norm_bias": (D,)}
    shapes |= {f"{layer}_weight": (rows, D) for layer, rows in of_qkv.items()}
    shapes |= {f"{layer}_bias": (rows,) for layer, rows in of_qkv.items()}
    shapes |= {"proj_weight": (out, H * d), "proj_bias": (out,), **branch((B, N), out)}
    optional = "0qkv_bias 1qkv_bias 2qkv_bias proj_bias layer_scale row_scale residual"
    found = of_a_kind(draw, draw(case(shapes, optional, num_heads=st.just(H), scale=SCALE)))
    if draw(st.booleans()):
        dtype, wanted, bias = found.tensors["x"].dtype, draw(st.booleans()), draw(st.booleans())
        after = Input((H * d,), dtype, "contiguous", wanted)
        found.tensors.update({"scale_weight": after, "scale_bias": after if bias else None})
    if (bias_of_k := found.tensors.get("1qkv_bias")) is not None:
        found.tensors["1qkv_bias"] = replace(bias_of_k, wanted=False)
    return without_equal_rows(found, *(f"{layer}_weight" for layer in of_qkv))


def of_layers(op: Callable[..., Any]) -> Callable[..., Any]:
    op = to_itself(op, "proj_weight")

    def run(**tensors: Any) -> Any:
        for kind in ("weight", "bias"):
            tensors[f"qkv_{kind}"] = [tensors.pop(n) for n in list(tensors) if n.endswith(f"qkv_{kind}")]
        return op(**tensors)

    return run


test_layer_norm_attention = fuzzed(
    layer_norm_attention_cases(),
    of_layers(ops.layer_norm_attention),
    of_layers(formulas.layer_norm_attention),
    recompute=st.sampled_from(["none", "attention", "qkv", "all"]),
)
test_attention = fuzzed(
    SIZES.flatmap(lambda shape: case(dict.fromkeys("qkv", shape), scale=SCALE, is_causal=st.booleans())),
    ops.attention,
    formulas.attention,
)
test_attention_qkvpacked = fuzzed(
    SIZES.flatmap(lambda shape: case({"qkv": (*shape[:2], 3, *shape[2:])}, scale=SCALE)),
    ops.attention_qkvpacked,
    formulas.attention_qkvpacked,
)


@st.composite
def masked_attention_cases(draw: st.DrawFn) -> Case:
    """A mask of every sample or one, every head or one, every query or one, or none; keys that heads share, more or
    fewer of them than queries. Not of one key, whose gradients of q, k and mask are rounding alone."""
    B, N, H, d = draw(SIZES.filter(lambda shape: shape[1] > 1))
    M = draw(st.one_of(st.just(N), st.integers(1, 70)))
    kv_heads = draw(st.sampled_from([h for h in range(1, H + 1) if H % h == 0]))
    shapes = {"q": (B, M, H, d), **dict.fromkeys("kv", (B, N, kv_heads, d))}
    of = draw(st.sampled_from([B, 1])), draw(st.sampled_from([H, 1])), draw(st.sampled_from([M, 1])), N
    return draw(
        case(
            {**shapes, "attn_mask": of[draw(st.integers(0, 2)) if of[0] == 1 == of[1] else 0 :]},
            "attn_mask",
            "attn_mask",
            scale=SCALE,
        )
    )


test_attention_with_masks = fuzzed(masked_attention_cases(), ops.attention, formulas.attention)


@st.composite
def relative_cases(draw: st.DrawFn) -> Case:
    """Grids of up to 4 x 24 keys, not of one row or column, whose gradients are rounding alone, and any
    number of queries."""
    B, M, H, d = draw(SIZES)
    height, width = draw(st.tuples(st.integers(2, 4), st.integers(2, 24)))
    shapes = {"q": (B, M, H, d), **dict.fromkeys("kv", (B, height * width, H, d))}
    shapes |= {"rows": (B, M, H, height), "columns": (B, M, H, width)}
    return draw(case(shapes, scale=SCALE))


test_attention_relative = fuzzed(relative_cases(), gathered(ops.attention), gathered(formulas.attention))


@st.composite
def varlen_cases(draw: st.DrawFn) -> Case:
    """Up to four sequences, none of one token or of equal tokens, see `masked_attention_cases`."""
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(2, 40)), min_size=1, max_size=4))
    _, _, H, d = draw(SIZES)
    kv_heads = draw(st.sampled_from([h for h in range(1, H + 1) if H % h == 0]))
    T = sum(lengths)
    shapes = {"q": (T, H, d), **dict.fromkeys("kv", (T, kv_heads, d))}
    found = draw(case(shapes, scale=SCALE, lengths=st.just(tuple(lengths)), known=st.booleans()))
    return without_equal_rows(found, *"qkv")


def of_lengths(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], known: bool, scale: float | None) -> Tensor:
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=q.device)
        return function(q, k, v, ends, max(*lengths, 1) if known else None, scale=scale)

    return run


test_attention_varlen = fuzzed(varlen_cases(), of_lengths(ops.attention_varlen), of_lengths(formulas.attention_varlen))


@st.composite
def window_cases(draw: st.DrawFn) -> Case:
    """Grids and windows of any size, shifts of less than a window; a mask of every window or one, every head or one,
    every query or one, or none. A token alone in its window or region has gradients of rounding alone: not wanted where
    there may be one."""
    B, _, H, d = draw(SIZES)
    grid, window = (draw(st.tuples(st.integers(1, 9), st.integers(1, 9))) for _ in range(2))
    shift = tuple(draw(st.integers(0, side - 1)) for side in window)
    n = window[0] * window[1]
    windows = math.prod(-(-size // side) for size, side in zip(grid, window, strict=True))
    mask = *(draw(st.sampled_from([count, 1])) for count in (windows, H, n)), n
    biases = st.sampled_from([-math.inf, -100.0, -1.0])
    options = {"scale": SCALE, "window": st.just(window), "shift": st.just(shift), "shift_bias": biases}
    found = draw(case({"qkv": (B, *grid, 3, H, d), "attn_mask": mask}, "attn_mask", "attn_mask", **options))
    alone = any(size * side == 1 or by or size % side for size, side, by in zip(grid, window, shift, strict=True))
    if alone or 1 in grid or 1 in window:
        unwanted = {name: replace(t, wanted=False) for name, t in found.tensors.items() if t is not None}
        found = Case(unwanted, found.result, found.options)
    return found


test_attention_windows = fuzzed(window_cases(), ops.attention_windows, formulas.attention_windows)


@st.composite
def relative_window_cases(draw: st.DrawFn) -> Case:
    """Up to 2 x 2 windows of up to 3 x 12 tokens, not of one row or column."""
    B, _, H, d = draw(SIZES)
    window = draw(st.tuples(st.integers(2, 3), st.integers(2, 12)))
    gh, gw = (side * draw(st.integers(1, 2)) for side in window)
    shapes = {"qkv": (B, gh, gw, 3, H, d), "rows": (B, gh, gw, H, window[0]), "columns": (B, gh, gw, H, window[1])}
    return draw(case(shapes, scale=SCALE, window=st.just(window)))


test_attention_windows_relative = fuzzed(
    relative_window_cases(), gathered(ops.attention_windows), gathered(formulas.attention_windows)
)


@st.composite
def rotary_cases(draw: st.DrawFn) -> Case:
    """q, k and v, and tables of every sample or one, every head or one, of all tokens or but the first ones."""
    B, N, H, d = draw(SIZES)
    prefix = draw(st.integers(0, min(3, N)))
    table = [*draw(st.sampled_from([(), (1,), (H,), (B, 1), (B, H), (1, H)])), N - prefix, d]
    options = {"prefix": st.just(prefix), "interleaved": st.booleans()}
    return draw(case({"qkv": (B, N, 3, H, d), "sin": tuple(table), "cos": tuple(table)}, "", "sin cos", **options))


def positioned(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(prefix: int, interleaved: bool, **tensors: Any) -> Any:
        return function(**arguments(tensors, eps=INNER_EPS, prefix=prefix, interleaved=interleaved))

    return run


test_rotary_qkvpacked = fuzzed(rotary_cases(), positioned(ops.rotary_qkvpacked), positioned(formulas.rotary_qkvpacked))


@st.composite
def qk_norm_cases(draw: st.DrawFn) -> Case:
    """q and k of any strides, without equal rows; LayerNorm with biases or RMSNorm without; with tables like those of
    `rotary_cases`, or none."""
    B, N, H, d = draw(SIZES)
    prefix = draw(st.integers(0, min(3, N)))
    table = (*draw(st.sampled_from([(), (H,), (B, 1), (B, H)])), N - prefix, d)
    shapes = {"q": (B, N, H, d), "k": (B, N, H, d)} | dict.fromkeys(("q_weight", "q_bias", "k_weight", "k_bias"), (d,))
    options = {"prefix": st.just(prefix), "interleaved": st.booleans()}
    found = draw(case({**shapes, "fixed_sin": table, "fixed_cos": table}, "", "fixed_sin fixed_cos", **options))
    found = without_equal_rows(found, "q", "k")
    for name in ("fixed_sin", "fixed_cos"):
        found.tensors[name] = replace(found.tensors[name], wanted=False)
    without = ["q_bias", "k_bias"] * draw(st.booleans()) + ["fixed_sin", "fixed_cos"] * draw(st.booleans())
    return Case(found.tensors | dict.fromkeys(without), found.result, found.options)


test_qk_norm = fuzzed(qk_norm_cases(), positioned(ops.qk_norm), positioned(formulas.qk_norm))


@st.composite
def patch_embed_cases(draw: st.DrawFn) -> Case:
    small = st.integers(1, 4)
    B, C, P, D = draw(st.tuples(st.integers(0, 3), small, small, WIDTH))
    frames = draw(st.sampled_from([(), (small,)]))  # an image or a video
    grid = draw(st.tuples(*frames, small, small))
    patch = draw(st.tuples(*[st.integers(1, 3)] * len(frames), st.integers(1, 9), st.integers(1, 9)))
    image = (B, C, *map(operator.mul, grid, patch))
    shapes = {"image": image, "weight": (D, C, *patch), "bias": (D,), "pos_embed": (math.prod(grid), D)}
    return draw(case({**shapes, "prefix": (P, D)}, "bias pos_embed prefix"))


test_patch_embed = fuzzed(patch_embed_cases(), ops.patch_embed, formulas.patch_embed)
