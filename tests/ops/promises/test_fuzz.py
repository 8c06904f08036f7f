"""The cases of value_cases.py with random sizes, dtypes, layouts, left-out arguments and wanted gradients.

    FASTVIT_FUZZ=2000 pytest tests/ops/promises/test_fuzz.py -k mlp

tries that many of each row instead of the few fixed ones. What fails becomes a row of value_cases.py. How accurate the
ops are is for the oracle's rule, which needs many elements to compare errors fairly; here is often one.
"""

import os
import random
from dataclasses import replace

import torch
from layouts import ALIGNED, LAYOUTS, UNALIGNED
from op_cases import on_both
from oracle import compare
from value_cases import CASES

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime.activations import ACTIVATIONS, GATED
from fastvit.reference import ops as formulas

EXAMPLES = int(os.environ.get("FASTVIT_FUZZ", "0"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A row of one element has no variance, and one key no gradient, but rounding: so both are at least two
SIZES = {"B": (0, 3), "N": (2, 40), "K": (2, 70), "H": (1, 3), "d": (2, 12), "D": (2, 80), "hidden": (2, 80)}
SIZES |= {"gated": (2, 80), "out": (1, 80)}
FEW = {"B": (1, 2), "N": (2, 20), "K": (2, 40), "H": (1, 2), "d": (2, 6)}  # where every program counts
OPTIONAL = {"bias", "fc1_bias", "gate_bias", "value_bias", "fc2_bias", "qkv_bias", "proj_bias", "layer_scale"}
OPTIONAL |= {"row_scale", "attn_mask", "pos_embed", "prefix", "inner_bias", "scale_bias", "norm_bias"}
# applied to an op's output, so that the gradient arrives in another layout
RESULTS = {
    "plain": lambda y: y,
    "transposed": lambda y: y.transpose(0, -1),
    "summed": lambda y: y.sum(0),  # a gradient of stride 0
    "halved": lambda y: y[..., y.shape[-1] // 2 :],
}


def random_case(draw, case, limits):
    """Return the case with other sizes of the dimensions that nothing else fixes, dtypes, options and tensors."""
    row, sizes = case.row, dict(case.sizes)
    keys_are_tokens = "gh" in sizes or (row.tensors.get("attn_mask") or ("K",))[-1] == "N"
    for name, (least, most) in limits.items():
        if not (name == "K" and keys_are_tokens):
            sizes[name] = draw.randint(least, most) * (8 if name == "d" else 1)
    if "G" in sizes:
        sizes["G"] = draw.choice([1, sizes["H"]])
    if "T" in sizes and not case.lengths:
        sizes["T"] = sizes["N"] - draw.randint(0, min(3, sizes["N"] - 1))
    tensors = dict(case.tensors)
    for name, shape in row.tensors.items():
        if shape is not None and name in OPTIONAL and draw.random() < 0.5:
            tensors[name] = None
    options, is_block = dict(case.options), "mlp" in row.op or row.op == "layer_norm_attention"
    if "activation" in row.options or "mlp" in row.op or row.op == "linear":
        options["activation"] = draw.choice([*(GATED if "gated" in str(row.tensors) else ACTIVATIONS)])
    if is_block:
        options["recompute"] = draw.choice(["none", "qkv" if "attention" in row.op else "activation", "all"])
        if row.tensors.get("residual", ()) is not None:
            tensors["residual"] = draw.choice([None, row.tensors["x"]])
    dtype, present = draw.choice(DTYPES), row.tensors | tensors
    dtypes = {
        name: draw.choice(DTYPES)
        for name in ("residual", "branch", "row_scale", "attn_mask")
        if present.get(name) is not None
    }
    if "attn_mask" in dtypes:  # that of windows is added in their dtype on ATen
        float_dtype = dtype if row.op == "attention_windows" else dtypes["attn_mask"]
        dtypes["attn_mask"] = draw.choice([torch.bool, float_dtype])
    if row.op == "add_layer_norm":
        sum_dtype = torch.promote_types(dtypes["residual"], dtypes["branch"])
        dtypes |= dict.fromkeys(("weight", "bias"), sum_dtype)
    return replace(case, dtype=dtype, sizes=sizes, tensors=tensors, options=options, dtypes=dtypes, kind="normal")


def assert_right(one, what):
    """|got - exact| <= 8 (|eager - exact| + eps |exact|), each the largest of a tensor. Every one of the few roundings
    on the way is at most half an eps of what is rounded; where that is larger than the result, so is eager's error. An
    element from the wrong place is off by about |exact|: 16 times the bound in bfloat16, 128 times in float16."""
    got, eager, exact = one.got, one.eager, one.exact
    assert (got.shape, got.dtype) == (exact.shape, eager.dtype), what
    if got.numel():
        size, error, allowed = (t.detach().abs().max().item() for t in (exact, got - exact, eager - exact))
        limit = 8 * (allowed + torch.finfo(got.dtype).eps * size)
        assert error <= limit, f"{what}: off by {error:.3g} of {size:.3g}, eager by {allowed:.3g}"


def check(draw, case, device):
    """Rows of equal elements, which an expanded tensor of keys or of packed tokens would make, have gradients of
    rounding alone."""
    layouts = [name for name in ("contiguous", "odd ones", *ALIGNED, *UNALIGNED) if name != "second expanded"]
    layouts = [name for name in layouts if not (case.lengths and name == "first expanded")]
    tensors, drawn = case.draw(device), {}
    for name, t in tensors.items():
        if t is not None and "seqlens" not in name:
            drawn[name] = draw.choice(layouts)
            wanted = t.requires_grad and draw.random() < 0.5
            tensors[name] = LAYOUTS[drawn[name]](t.detach()).requires_grad_(wanted)
    result = draw.choice([*RESULTS])

    def arranged(module):
        def run(**given):
            outputs = case.function(module)(**given)
            return tuple(map(RESULTS[result], outputs)) if isinstance(outputs, tuple) else RESULTS[result](outputs)

        return run

    for one in compare(arranged(ops), arranged(formulas), tensors):
        if one.eager.isfinite().all():  # PyTorch's linear of bfloat16 may read the gaps between rows on a CPU
            assert_right(one, f"{one.name} of {case!r}, {drawn}, {result}")


NAMES = list(dict.fromkeys(case.name for case in CASES if "pixels" not in case.row.tensors))
INTERPRETED = ["layer_norm", "add_layer_norm", "linear", "layer_norm_mlp gated", "attention keys"]
INTERPRETED += ["attention_varlen cross", "rotary_qkvpacked", "qk_norm packed", "patch_embed video"]


@on_both("name", NAMES, INTERPRETED)
def test_fuzz(name, backend, device):
    few, cases = backend == "triton" and backends.INTERPRET, [case for case in CASES if case.name == name]
    for seed in range(EXAMPLES or (3 if few else 10)):
        draw = random.Random(f"{name} {seed}")
        check(draw, random_case(draw, draw.choice(cases), SIZES | FEW if few else SIZES), device)
