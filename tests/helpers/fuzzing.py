"""Random cases of a row of the table of ops: sizes of the dimensions that the row names, dtypes, layouts, left-out
arguments and wanted gradients. How accurate the ops are is for the oracle's rule, which needs many elements to compare
errors fairly; here is often one.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from layouts import ALIGNED, LAYOUTS, UNALIGNED
from oracle import compare
from torch import Tensor
from value_cases import ValueCase, in_windows, packed, patches

pytest.importorskip("hypothesis")  # a machine with a GPU may lack it
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fastvit import ops
from fastvit.ops.runtime.activations import ACTIVATIONS, GATED
from fastvit.study.accuracy import formulas

EXAMPLES = int(os.environ.get("FASTVIT_FUZZ", "0"))


def examples(count: int) -> settings:
    return settings(
        max_examples=EXAMPLES or count,  # the interpreter is slow, and a GPU compiles for every case
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


fuzz = examples(8)

# applied to an op's output, so that the gradient arrives in another layout
RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: y,
    "transposed": lambda y: y.transpose(0, -1),
    "summed": lambda y: y.sum(0),  # a gradient of stride 0
    "halved": lambda y: y[..., y.shape[-1] // 2 :],
}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
# A row of one element has no variance, and one key no gradient, but rounding: so both are at least two
SIZES = {
    "B": st.integers(0, 3), "N": st.integers(2, 40), "K": st.integers(2, 70), "H": st.integers(1, 3),
    "d": st.integers(2, 12).map(lambda n: 8 * n), **dict.fromkeys(("D", "hidden", "gated"), st.integers(2, 80)),
    "out": st.integers(1, 80),
}  # fmt: skip
OPTIONAL = (
    "bias",
    "fc1_bias",
    "gate_bias",
    "value_bias",
    "fc2_bias",
    "qkv_bias",
    "proj_bias",
    "layer_scale",
    "row_scale",
)
OPTIONAL += ("attn_mask", "pos_embed", "prefix", "inner_bias", "scale_bias")
SMALL, LENGTHS = st.integers(1, 4), st.lists(st.one_of(st.just(0), st.integers(2, 40)), min_size=1, max_size=4)
LEADING = [("B", "N"), ("B",), ("B", 2, "N"), ()]
TABLES = [(), (1,), ("H",), ("B", 1), ("B", "H"), (1, "H")]


@dataclass(frozen=True)
class FuzzCase:
    """A case, how its tensors lie in memory, which of them want no gradient, and what happens to the outputs."""

    case: ValueCase
    layouts: dict[str, str]
    frozen: frozenset[str]
    result: str

    def check(self, device: torch.device) -> None:
        tensors = {}
        for name, t in self.case.draw(device).items():
            if t is not None and "seqlens" not in name:
                t = LAYOUTS[self.layouts[name]](t.detach()).requires_grad_(t.requires_grad and name not in self.frozen)
            tensors[name] = t

        def arranged(module: Any) -> Callable[..., Any]:
            function, result = self.case.function(module), RESULTS[self.result]

            def run(**given: Any) -> Any:
                outputs = function(**given)
                return tuple(map(result, outputs)) if isinstance(outputs, tuple) else result(outputs)

            return run

        for compared in compare(arranged(ops), arranged(formulas), tensors):
            if compared.eager.isfinite().all():  # PyTorch's linear of bfloat16 may read the gaps between rows on a CPU
                assert_right(*compared)


def assert_right(name: str, got: Tensor, same: Tensor, exact: Tensor) -> None:
    """|got - exact| <= 8 (|same - exact| + eps |exact|), each the largest of a tensor; same is eager's in got's dtype.
    Every one of the few roundings on the way is at most half an eps of what is rounded; where that is larger than the
    result, so is eager's error. An element from the wrong place is off by about |exact|: 16 times the bound in
    bfloat16, 128 times in float16."""
    assert (got.shape, got.dtype) == (exact.shape, same.dtype), name
    if got.numel():
        size, error, allowed = (t.detach().abs().max().item() for t in (exact, got - exact, same - exact))
        limit = 8 * (allowed + torch.finfo(got.dtype).eps * size)
        assert error <= limit, f"{name}: off by {error:.3g} of {size:.3g}, eager by {allowed:.3g}"


# for the interpreter, where every program counts
FEW = {"B": st.integers(1, 2), "N": st.integers(2, 20), "K": st.integers(2, 40), "H": st.integers(1, 2)}


@st.composite
def fuzz_cases(draw: st.DrawFn, name: str, few: bool = False) -> FuzzCase:
    """Draw a case of a row. Rows of equal elements, which an expanded tensor of keys or of packed tokens would make,
    have gradients of rounding alone."""
    row = ValueCase(name, torch.float32, {}).row
    sizes: dict[str, Any] = {dim: draw(strategy) for dim, strategy in (SIZES | FEW if few else SIZES).items()}
    sizes["G"] = draw(st.sampled_from([h for h in range(1, sizes["H"] + 1) if sizes["H"] % h == 0]))
    tensors = dict(row.tensors)
    for key in OPTIONAL:
        if key in tensors and draw(st.booleans()):
            tensors[key] = None
    more, options = _of_the_op(draw, row.op, name, sizes, tensors)
    if "activation" in row.options or "mlp" in row.op or row.op == "linear":
        gated = "gated" in str(row.tensors)
        options["activation"] = draw(st.sampled_from([*(GATED if gated else ACTIVATIONS)]))
    if "mlp" in row.op or row.op == "layer_norm_attention":
        tensors["residual"] = draw(st.sampled_from([None, tensors["x"]]))
        between = "qkv" if "attention" in row.op else "activation"
        options["recompute"] = draw(st.sampled_from(["none", between, "all"]))
    _choose_norms(draw, row.op, tensors, options)
    dtype, dtypes = draw(DTYPES), {}
    for key in ("residual", "branch", "row_scale", "attn_mask"):
        if tensors.get(key) is not None:
            dtypes[key] = draw(DTYPES)
    if "attn_mask" in dtypes and row.op == "attention_windows":
        dtypes["attn_mask"] = dtype  # in which the shift's bias is added to it on ATen
    if "attn_mask" in dtypes and draw(st.booleans()):
        dtypes["attn_mask"] = torch.bool
    if row.op == "add_layer_norm":
        sum_dtype = torch.promote_types(dtypes["residual"], dtypes["branch"])
        dtypes |= {key: sum_dtype for key in ("weight", "bias") if tensors.get(key) is not None}
    more["options"] = more.get("options", {}) | options
    more["tensors"] = {key: shape for key, shape in tensors.items() if "seqlens" not in key}
    attributes = {key: more.pop(key) for key in ("tensors", "options", "lengths") if key in more}
    case = ValueCase(name, dtype, sizes | more, dtypes=dtypes, **attributes)
    choices = ["contiguous", "odd ones", *ALIGNED, *UNALIGNED]
    choices.remove("second expanded")
    if "varlen" in row.op:
        choices.remove("first expanded")
    layouts = {key: draw(st.sampled_from(choices)) for key in tensors}
    frozen = frozenset(key for key in tensors if draw(st.booleans()))
    return FuzzCase(case, layouts, frozen, draw(st.sampled_from(list(RESULTS))))


def _of_the_op(
    draw: st.DrawFn, op: str, name: str, sizes: dict[str, Any], tensors: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw what only this op has: sizes and attributes of a case, and options. Change tensors in place."""
    scale = draw(st.sampled_from([None, 0.3]))
    if op == "patch_embed":
        video = "video" in name
        grid, patch = (tuple(draw(strategy) for _ in range(2 + video)) for strategy in (SMALL, st.integers(1, 7)))
        more = patches(draw(SMALL), grid, patch, sizes["D"], draw(SMALL))
        return {key: value for key, value in more.items() if key != "D"}, {}
    if "varlen" in op:
        lengths = draw(LENGTHS)
        key_lengths = [draw(st.one_of(st.just(0), st.integers(2, 40))) for _ in lengths]
        more = packed(*([lengths, key_lengths] if "cross" in name else [lengths]))
        more["options"] = more["options"] if max(lengths) and max(key_lengths) and draw(st.booleans()) else {}
        return more, {"scale": scale}
    if op == "attention_windows":
        relative = "relative" in name
        window = draw(st.tuples(st.integers(2, 3 if relative else 7), st.integers(2, 12 if relative else 7)))
        grid = tuple(side * draw(st.integers(1, 2)) if relative else draw(st.integers(3, 9)) for side in window)
        shift = (0, 0) if relative else tuple(draw(st.integers(0, side - 1)) for side in window)
        shift_bias = {} if relative else {"shift_bias": draw(st.sampled_from([-torch.inf, -100.0, -1.0]))}
        if not relative:
            shape = (draw(st.sampled_from(["windows", 1])), draw(st.sampled_from(["H", 1])))
            tensors["attn_mask"] = draw(st.sampled_from([None, (*shape, draw(st.sampled_from(["n", 1])), "n")]))
        return in_windows(grid, window, shift, scale=scale, **shift_bias), {}
    if name == "attention relative":
        height, width = draw(st.integers(2, 4)), draw(st.integers(2, 24))
        return {"gh": height, "gw": width, "K": height * width}, {"scale": scale}
    if op.startswith("attention"):
        if "keys" in name:
            shape = (*(draw(st.sampled_from([dim, 1])) for dim in ("B", "H", "N")), "K")
            tensors["attn_mask"] = draw(st.sampled_from([None, shape]))
            return {}, {"scale": scale, "is_causal": tensors["attn_mask"] is None and draw(st.booleans())}
        return {}, {"scale": scale}
    if tables := [key for key in tensors if key.endswith(("sin", "cos"))]:
        shape = draw(st.sampled_from(TABLES if op != "layer_norm_attention" else [()]))
        left_out = "fixed_sin" in tables and draw(st.booleans())
        tensors |= dict.fromkeys(tables, None if left_out else (*shape, "T", "d"))
        if op == "layer_norm_attention":
            return {"T": sizes["N"] - draw(st.integers(0, 1))}, {"scale": scale}
        return {"T": sizes["N"] - draw(st.integers(0, min(3, sizes["N"] - 1)))}, {"interleaved": draw(st.booleans())}
    if "N" in str(tensors):
        leading = draw(st.sampled_from(LEADING if op in ("linear", "mlp") else LEADING[:-1]))
        for key, shape in tensors.items():
            if shape is not None and shape[:2] == ("B", "N"):
                tensors[key] = leading + shape[2:]
        if not leading and "row_scale" in tensors:
            tensors["row_scale"] = None
    return {}, {}


def _choose_norms(draw: st.DrawFn, op: str, tensors: dict[str, Any], options: dict[str, Any]) -> None:
    """Choose the kind of the norm, and whether a LayerNorm has a bias; the same of norms of q and k."""
    bias = "bias" if op in ("layer_norm", "add_layer_norm") else "norm_bias"
    if "norm_weight" in tensors or op in ("layer_norm", "add_layer_norm"):
        options["norm"] = draw(st.sampled_from(["layer", "rms"]))
        tensors[bias] = None if options["norm"] == "rms" or draw(st.booleans()) else ("D",)
    if "q_weight" in tensors and draw(st.booleans()):
        tensors |= {"q_bias": None, "k_bias": None}
