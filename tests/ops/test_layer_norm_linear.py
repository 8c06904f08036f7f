"""ops.layer_norm_linear of several layers, whose outputs are next to each other or apart."""

import pytest
import torch
from op_cases import outputs_of, saved_numel, tensors_of
from oracle import assert_op_as_accurate

from fastvit import ops
from fastvit.ops.block.norm_linear import layer_norm_linears
from fastvit.study.accuracy.formulas import layer_norm_linear as eager


def several(**tensors):
    """Arguments by name, as the oracle wants them -> several weights and biases."""
    return tensors | {name: [tensors.pop(f"{name}{i}") for i in range(3)] for name in ("weight", "bias")}


def fused_apart(weight, bias, **tensors):
    return layer_norm_linears(**tensors, weights=weight, biases=bias)


def eager_apart(weight, bias, **tensors):
    return tuple(eager(**tensors, weight=w, bias=b) for w, b in zip(weight, bias, strict=True))


def of_tensors(*calls):
    return [lambda call=call, **tensors: call(**several(**tensors)) for call in calls]


# fused and eager, of the outputs side by side and apart
PAIRS = {"side by side": of_tensors(ops.layer_norm_linear, eager), "apart": of_tensors(fused_apart, eager_apart)}
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
FUSED_APART, EAGER_APART = PAIRS["apart"]


def draw(*shape, device, dtype=torch.float32, outs=(24, 8, 40)):
    D = shape[-1]
    shapes = {"x": shape, "norm_weight": (D,), "norm_bias": (D,)}
    shapes |= {f"weight{i}": (out, D) for i, out in enumerate(outs)}
    return tensors_of(shapes | {f"bias{i}": (out,) for i, out in enumerate(outs)}, dtype, device)


@pytest.mark.parametrize(
    ("pair", "dtype"), zip(PAIRS.values(), (torch.float32, torch.bfloat16), strict=True), ids=PAIRS
)
def test_as_accurate_as_eager(dtype, pair, backend, device):
    tensors = draw(2, 17, 72, dtype=dtype, device=device) | {"bias1": None}
    assert_op_as_accurate(*pair, tensors, what="one without bias")
    tensors["weight0"].requires_grad_(False)
    tensors["bias2"].requires_grad_(False)
    assert_op_as_accurate(*pair, tensors, what="partly frozen")
    tensors = {n: t if t is None else t.detach().requires_grad_(n == "weight1") for n, t in tensors.items()}
    assert_op_as_accurate(*pair, tensors, what="one weight")


@pytest.mark.parametrize("read", [(0,), (1, 2)], ids=str)
def test_outputs_that_nothing_reads(read, device):
    """Their layers get no gradient, and the others that of eager mode."""
    tensors = draw(2, 17, 72, device=device)
    gradients = []
    for function in PAIRS["apart"]:
        outputs = function(**tensors)
        loss = sum(outputs[i].sin().sum() for i in read)
        gradients.append(torch.autograd.grad(loss, list(tensors.values()), allow_unused=True))
    for name, got, want in zip(tensors, *gradients, strict=True):
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, msg=name)


@pairs
def test_under_compile_vmap_and_no_grad(pair, device):
    tensors, fused = draw(2, 5, 16, device=device), pair[0]
    want = outputs_of(fused(**tensors))
    with torch.no_grad():
        assert all(map(torch.equal, outputs_of(fused(**tensors)), want))
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs_of(compiled(**tensors)), want)
    xs = torch.stack([tensors["x"], tensors["x"] * 2]).detach()
    got = torch.func.vmap(lambda x: fused(**tensors | {"x": x}))(xs)
    torch.testing.assert_close(tuple(t[0] for t in outputs_of(got)), want)


def test_saves_x_and_statistics_only(device):
    tensors = draw(2, 5, 16, device=device)
    for fused, _ in PAIRS.values():
        assert saved_numel(fused, tensors) == 2 * 5 * 16 + 2 * 10


def test_layers_apart_are_differentiable_once(device):
    tensors = draw(2, 5, 16, device=device)
    (dx,) = torch.autograd.grad(FUSED_APART(**tensors)[1].sum(), [tensors["x"]], create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm_linears"):
        dx.sum().backward()


def test_layers_apart_under_autocast(device):
    tensors = draw(2, 5, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        got, want = FUSED_APART(**tensors), EAGER_APART(**tensors)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype == torch.bfloat16
        torch.testing.assert_close(g, w, atol=0.05, rtol=0.02)


def test_layers_apart_that_do_not_fit(device):
    arguments = several(**draw(2, 5, 16, device=device))
    bias = arguments["bias"]
    with pytest.raises(ValueError, match=r"biases\[1\] must have shape \(out,\) = \(8,\)"):
        fused_apart(**arguments | {"bias": [bias[0]] * 3})
    with pytest.raises(ValueError, match="biases must be one for each weight, or None, got 2 for 3 weights"):
        fused_apart(**arguments | {"bias": bias[:2]})
