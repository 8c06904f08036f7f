"""`recompute` of layer_norm_attention: the saved tensors, and gradients, which do not depend on it. Under
torch.compile, that of layer_norm_mlp, too."""

import pytest
import torch
from op_cases import function, made, saved_numel, tensors_of

from fastvit import ops
from fastvit.study.accuracy.cases import (
    FIXED_TABLES,
    MASK,
    NORM,
    QK_WEIGHTS,
    QKV,
    SCALES,
    X,
    arguments,
    sizes,
)

B, N, H, D, HEAD_DIM = 2, 17, 2, 24, 16  # H * HEAD_DIM is not D
VALUES = ("none", "attention", "qkv", "all")
PLAIN = {**X, **NORM, **QKV}
SCALE_NORM = {"scale_weight": ("Hd",), "scale_bias": ("Hd",)}
TABLES = {f"{name}_layer": ("Hd", "D") for name in "abc"} | {f"{name}_shift": ("Hd",) for name in "ac"}
CASES = {  # tensors, options
    "plain": (PLAIN, {}),
    "no residual": (PLAIN, {"residual": None}),
    "other residual": ({**PLAIN, "residual": ("B", "N", "D")}, {}),
    "three layers": ({name: shape for name, shape in {**PLAIN, **TABLES}.items() if "qkv" not in name}, {}),
    "rotary": ({**PLAIN, **FIXED_TABLES, **SCALES}, {}),
    "qk_norm": ({**PLAIN, **QK_WEIGHTS, "q_bias": ("d",), "k_bias": ("d",), **FIXED_TABLES, **MASK}, {}),
    "mask, scale_norm": ({**PLAIN, **SCALE_NORM, **FIXED_TABLES, **MASK, **SCALES}, {"norm": "layer"}),
    "qk_norm, dropout": ({**PLAIN, **QK_WEIGHTS}, {"dropout_p": 0.4}),
    "rms, scale_norm, dropout": (
        {name: shape for name, shape in {**PLAIN, **SCALE_NORM}.items() if name != "norm_bias"},
        {"norm": "rms", "dropout_p": 0.4},
    ),
}


def drawn(case, device, wanted=None):
    """Draw the tensors of a case; those of the names `wanted`, or all, require a gradient."""
    of = sizes(B, N, D, H, HEAD_DIM)
    shapes = {name: [n if isinstance(n, int) else of[n] for n in shape] for name, shape in CASES[case][0].items()}
    made = tensors_of(shapes, torch.float32, device)
    return made if wanted is None else {name: t.detach().requires_grad_(name in wanted) for name, t in made.items()}


def half(case, recompute):
    def run(**tensors):
        if "a_layer" in tensors:
            weights = [tensors.pop(f"{name}_layer") for name in "abc"]
            tensors |= {"qkv_weight": weights, "qkv_bias": [tensors.pop("a_shift"), None, tensors.pop("c_shift")]}
        options = {"residual": tensors["x"], **arguments(tensors), **CASES[case][1]}
        return ops.layer_norm_attention(**options, num_heads=H, recompute=recompute)

    return run


def gradients(function, tensors, calls=3):
    """Return the output, and the gradients twice from one retained graph, of the last call."""
    leaves = [t for t in tensors.values() if t.requires_grad]
    for _ in range(calls):  # on ATen, the second call is kept, and the third one finds it
        torch.manual_seed(5)
        out = function(**tensors)
        found = [torch.autograd.grad(out.square().sum(), leaves, retain_graph=again) for again in (True, False)]
    return [out, *found[0], *found[1]]


@pytest.mark.parametrize("case", CASES)
def test_gradients_do_not_depend_on_it(case, device):
    tensors = drawn(case, device)
    with ops.use_backend("aten"):
        want = gradients(half(case, "none"), tensors)
        for recompute in VALUES[1:]:
            got = gradients(half(case, recompute), tensors)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), recompute


def test_kernels_that_run_twice(triton_backend, device):
    """With a mask and rotated positions: qkv is written in place, forward and again."""
    tensors = drawn("mask, scale_norm", device)
    want, got = (gradients(half("mask, scale_norm", recompute), tensors, calls=1) for recompute in ("none", "all"))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("case", ["three layers", "mask, scale_norm"])
def test_under_autocast(case, device):
    tensors = drawn(case, device)

    def under_autocast(function):
        def run(**tensors):
            with torch.autocast(device.type, torch.bfloat16):
                return function(**tensors)

        return run

    want, *rest = [gradients(under_autocast(half(case, recompute)), tensors) for recompute in VALUES]
    for got in rest:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_under_compile(device):
    torch._dynamo.reset()
    tensors = drawn("qk_norm", device)
    compiled = torch.compile(half("qk_norm", "all"), fullgraph=True, backend="aot_eager")
    want, got = (gradients(call, tensors, calls=1) for call in (half("qk_norm", "none"), compiled))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- what is saved ----

TOKENS, INNER, STATISTICS, LSE = B * N * D, B * N * H * HEAD_DIM, 2 * B * N, B * N * H
SAVED = {
    "none": TOKENS + 4 * INNER + STATISTICS + LSE,
    "attention": TOKENS + 3 * INNER + STATISTICS,
    "qkv": TOKENS + INNER + STATISTICS + LSE,
    "all": TOKENS + STATISTICS,
}


@pytest.mark.parametrize("recompute", VALUES)
def test_saves_what_it_says(recompute, backend, device):
    run = half("plain", recompute)
    assert saved_numel(run, drawn("plain", device)) == SAVED[recompute]
    biases_alone = {
        "none": 4 * INNER + LSE,
        "attention": 3 * INNER,
        "qkv": TOKENS + INNER + LSE,
        "all": TOKENS,
    }[recompute]
    for wanted, want in (
        (("norm_weight",), SAVED[recompute]),
        (("qkv_weight",), SAVED[recompute] - STATISTICS),
        (("qkv_bias",), biases_alone),
        (("proj_weight",), INNER),  # attention's output is smaller than what it is computed from
        (("proj_bias",), 0),
    ):
        assert saved_numel(run, drawn("plain", device, wanted)) == want, wanted


@pytest.mark.parametrize("recompute", VALUES)
def test_what_no_gradient_needs_does_not_run_again(recompute, device, monkeypatch):
    """A frozen first half of the op: proj's gradients need attention's output alone."""
    from fastvit.ops.block import attention_node

    tensors, ran = drawn("plain", device, ("proj_weight", "proj_bias")), []
    with ops.use_backend("aten"):
        out = half("plain", recompute)(**tensors)
        for name in ("layer_norm_fwd", "attention_qkvpacked_fwd"):
            monkeypatch.setattr(attention_node, name, lambda *_, name=name, **__: ran.append(name))
        out.sum().backward()
    assert not ran
    assert tensors["proj_weight"].grad is not None


@pytest.mark.parametrize("recompute", VALUES)
def test_the_compiler_saves_what_it_says(recompute, device):
    """It does not find results of the forward pass for what the backward pass computes again."""
    torch._dynamo.reset()
    compiled, tensors = torch.compile(half("plain", recompute), backend="aot_eager"), drawn("plain", device)
    compiled(**tensors)
    assert saved_numel(compiled, tensors) == SAVED[recompute]


@pytest.mark.parametrize("name", ["mlp recompute", "layer_norm_mlp recompute", "layer_norm_mlp gated recompute"])
def test_the_compiler_saves_what_the_mlp_says(name, device):
    torch._dynamo.reset()
    tensors, compiled = made(name, B, N, device), torch.compile(function(name), backend="aot_eager")
    compiled(**tensors)
    assert saved_numel(compiled, tensors) == saved_numel(function(name), tensors)
