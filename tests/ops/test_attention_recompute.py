"""`recompute` of layer_norm_attention: gradients do not depend on it, in all of the op's variants. What it saves:
promises/test_costs.py."""

import pytest
import torch
from op_cases import ROWS, made, more, wanted

from fastvit import ops

B, N = 2, 17
CHOICES = ("none", "attention", "qkv", "all")
OP = "layer_norm_attention"
CASES = [name for name in ROWS if name.startswith(OP) and "recompute" not in name]
CASES += ["no residual", "other residual", "three layers"]


def draw(case, device):
    tensors = made(case if case in ROWS else OP, B, N, device)
    if case == "no residual":
        tensors["residual"] = None
    elif case == "other residual":
        tensors["residual"] = torch.randn_like(tensors["x"]).requires_grad_()
    return tensors


def half_block(case, recompute):
    def run(**tensors):
        if case == "three layers":  # the one of k without a bias
            weight, (q, _, v) = tensors["qkv_weight"].chunk(3), tensors["qkv_bias"].chunk(3)
            tensors |= {"qkv_weight": weight, "qkv_bias": [q, None, v]}
        return ROWS[case if case in ROWS else OP].call(ops, **more(OP), recompute=recompute)(**tensors)

    return run


def gradients(function, tensors, device, calls=3, autocast=False):
    """Return the output, and the gradients twice from one retained graph, of the last call."""
    leaves = list(wanted(tensors).values())
    for _ in range(calls):  # on ATen, the second call is kept, and the third one finds it
        torch.manual_seed(5)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            out = function(**tensors)
        runs = [torch.autograd.grad(out.square().sum(), leaves, retain_graph=again) for again in (True, False)]
    return [out, *runs[0], *runs[1]]


@pytest.mark.parametrize("case", CASES)
def test_gradients_do_not_depend_on_it(case, device):
    tensors = draw(case, device)
    for autocast in (False, True):
        with ops.use_backend("aten"):
            want = gradients(half_block(case, "none"), tensors, device, autocast=autocast)
            for recompute in CHOICES[1:]:
                got = gradients(half_block(case, recompute), tensors, device, autocast=autocast)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (recompute, autocast)


def test_kernels_that_run_twice(triton_backend, device):
    """With a mask and rotated positions: qkv is written in place, forward and again."""
    case = "layer_norm_attention rotary"
    tensors = draw(case, device)
    want, got = (gradients(half_block(case, recompute), tensors, device, calls=1) for recompute in ("none", "all"))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("recompute", CHOICES)
def test_what_no_gradient_needs_does_not_run_again(recompute, device, monkeypatch):
    """A frozen first half of the op: proj's gradients need attention's output alone."""
    from fastvit.ops.block import attention_node

    tensors = {key: t.detach().requires_grad_(key.startswith("proj")) for key, t in made(OP, B, N, device).items()}
    ran = []
    with ops.use_backend("aten"):
        out = half_block(OP, recompute)(**tensors)
        for name in ("layer_norm_fwd", "attention_fwd"):
            monkeypatch.setattr(attention_node, name, lambda *_, name=name, **__: ran.append(name))
        out.sum().backward()
    assert not ran
    assert tensors["proj_weight"].grad is not None
