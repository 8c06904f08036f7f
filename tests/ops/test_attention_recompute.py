"""`recompute` of layer_norm_attention: gradients do not depend on it, in all of the op's variants. What it saves:
promises/test_costs.py."""

import pytest
import torch
from op_cases import tensors_of

from fastvit import ops
from fastvit.study.accuracy.cases import FIXED_TABLES, MASK, NORM, QK_WEIGHTS, QKV, SCALES, X, arguments, sizes

B, N, H, D, HEAD_DIM = 2, 17, 2, 24, 16  # H * HEAD_DIM is not D
CHOICES = ("none", "attention", "qkv", "all")
PLAIN = {**X, **NORM, **QKV}
SCALE_NORM = {"scale_weight": ("Hd",), "scale_bias": ("Hd",)}
TABLES = {f"{name}_layer": ("Hd", "D") for name in "abc"} | {f"{name}_shift": ("Hd",) for name in "ac"}
CASES = {  # tensors, options
    "no residual": (PLAIN, {"residual": None}),
    "other residual": ({**PLAIN, "residual": ("B", "N", "D")}, {}),
    "three layers": ({name: shape for name, shape in {**PLAIN, **TABLES}.items() if "qkv" not in name}, {}),
    "rotary": ({**PLAIN, **FIXED_TABLES, **SCALES}, {}),
    "qk_norm": ({**PLAIN, **QK_WEIGHTS, "q_bias": ("d",), "k_bias": ("d",), **FIXED_TABLES, **MASK}, {}),
    "mask, scale_norm": ({**PLAIN, **SCALE_NORM, **FIXED_TABLES, **MASK, **SCALES}, {"norm": "layer"}),
    "rms, scale_norm, dropout": (
        {name: shape for name, shape in {**PLAIN, **SCALE_NORM, **QK_WEIGHTS}.items() if name != "norm_bias"},
        {"norm": "rms", "dropout_p": 0.4},
    ),
}


def draw(case, device, wanted=None):
    """Draw the tensors of a case; those of the names `wanted`, or all, require a gradient."""
    dimensions = sizes(B, N, D, H, HEAD_DIM)
    shapes = {
        name: [n if isinstance(n, int) else dimensions[n] for n in shape] for name, shape in CASES[case][0].items()
    }
    tensors = tensors_of(shapes, torch.float32, device)
    return (
        tensors if wanted is None else {name: t.detach().requires_grad_(name in wanted) for name, t in tensors.items()}
    )


def half_block(case, recompute):
    def run(**tensors):
        if "a_layer" in tensors:
            weights = [tensors.pop(f"{name}_layer") for name in "abc"]
            tensors |= {"qkv_weight": weights, "qkv_bias": [tensors.pop("a_shift"), None, tensors.pop("c_shift")]}
        options = {"residual": tensors["x"], **arguments(tensors), **CASES[case][1]}
        return ops.layer_norm_attention(**options, num_heads=H, recompute=recompute)

    return run


def gradients(function, tensors, device, calls=3, autocast=False):
    """Return the output, and the gradients twice from one retained graph, of the last call."""
    leaves = [t for t in tensors.values() if t.requires_grad]
    for _ in range(calls):  # on ATen, the second call is kept, and the third one finds it
        torch.manual_seed(5)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out = function(**tensors)
        runs = [torch.autograd.grad(out.square().sum(), leaves, retain_graph=again) for again in (True, False)]
    return [out, *runs[0], *runs[1]]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients_do_not_depend_on_it(case, autocast, device):
    tensors = draw(case, device)
    with ops.use_backend("aten"):
        want = gradients(half_block(case, "none"), tensors, device, autocast=autocast)
        for recompute in CHOICES[1:]:
            got = gradients(half_block(case, recompute), tensors, device, autocast=autocast)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), recompute


def test_kernels_that_run_twice(triton_backend, device):
    """With a mask and rotated positions: qkv is written in place, forward and again."""
    tensors = draw("mask, scale_norm", device)
    want, got = (
        gradients(half_block("mask, scale_norm", recompute), tensors, device, calls=1) for recompute in ("none", "all")
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("recompute", CHOICES)
def test_what_no_gradient_needs_does_not_run_again(recompute, device, monkeypatch):
    """A frozen first half of the op: proj's gradients need attention's output alone."""
    from fastvit.ops.block import attention_node

    tensors, ran = draw("other residual", device, ("proj_weight", "proj_bias")), []
    with ops.use_backend("aten"):
        out = half_block("other residual", recompute)(**tensors)
        for name in ("layer_norm_fwd", "attention_qkvpacked_fwd"):
            monkeypatch.setattr(attention_node, name, lambda *_, name=name, **__: ran.append(name))
        out.sum().backward()
    assert not ran
    assert tensors["proj_weight"].grad is not None
