"""ops.layer_norm_linear of several layers, whose outputs are next to each other or apart."""

import pytest
import torch
from op_cases import outputs_of, saved_numel, tensors_of
from oracle import assert_op_as_accurate

from fastvit import ops
from fastvit.ops.block.norm_linear import layer_norm_linears
from fastvit.reference.ops import layer_norm_linear as eager


def fused_apart(weight, bias, **tensors):
    return layer_norm_linears(**tensors, weights=weight, biases=bias)


def eager_apart(weight, bias, **tensors):
    return tuple(eager(**tensors, weight=w, bias=b) for w, b in zip(weight, bias, strict=True))


def of_tensors(call):
    """Return call as a function of tensors by name, as the oracle wants it."""

    def run(**tensors):
        several = {name: [tensors.pop(f"{name}{i}") for i in range(3)] for name in ("weight", "bias")}
        return call(**tensors, **several)

    return run


# fused and eager, of the outputs side by side and apart
PAIRS = {"side by side": (ops.layer_norm_linear, eager), "apart": (fused_apart, eager_apart)}
PAIRS = {name: tuple(map(of_tensors, pair)) for name, pair in PAIRS.items()}
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
FUSED_APART, EAGER_APART = PAIRS["apart"]


def draw(*shape, device, dtype=torch.float32, outs=(24, 8, 40)):
    D = shape[-1]
    shapes = {"x": shape, "norm_weight": (D,), "norm_bias": (D,)}
    shapes |= {f"weight{i}": (out, D) for i, out in enumerate(outs)}
    return tensors_of(shapes | {f"bias{i}": (out,) for i, out in enumerate(outs)}, dtype, device)


@pytest.mark.parametrize(("name", "dtype"), [("side by side", torch.float32), ("apart", torch.bfloat16)], ids=str)
def test_as_accurate_as_eager(name, dtype, backend, device):
    """One without a bias; some frozen; all but one."""
    tensors = draw(2, 17, 72, dtype=dtype, device=device) | {"bias1": None}
    for frozen in ((), ("weight0", "bias2"), tensors.keys() - {"weight1"}):
        given = {n: t if t is None else t.detach().requires_grad_(n not in frozen) for n, t in tensors.items()}
        assert_op_as_accurate(*PAIRS[name], given, what=f"{frozen} frozen")


@pytest.mark.parametrize("read", [(0,), (1, 2)], ids=str)
def test_outputs_that_nothing_reads(read, device):
    """Their layers get no gradient, and the others that of eager mode."""
    tensors = draw(2, 17, 72, device=device)
    outputs = FUSED_APART(**tensors)
    gradients = torch.autograd.grad(sum(outputs[i].sum() for i in read), list(tensors.values()), allow_unused=True)
    unread = {f"{name}{i}" for name in ("weight", "bias") for i in {0, 1, 2} - {*read}}
    assert {name for name, got in zip(tensors, gradients, strict=True) if got is None} == unread

    def of_read(call):
        def run(**given):
            fixed = {name: tensors[name].detach().to(given["x"].dtype) for name in unread}
            return tuple(call(**given, **fixed)[i] for i in read)

        return run

    wanted = {name: t for name, t in tensors.items() if name not in unread}
    assert_op_as_accurate(of_read(FUSED_APART), of_read(EAGER_APART), wanted)


@pairs
def test_under_compile_vmap_autocast_and_no_grad(pair, device):
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
    with torch.autocast(device.type, torch.bfloat16):
        got, want = (outputs_of(function(**tensors)) for function in pair)
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.02)


def test_saves_x_and_statistics_only(device):
    tensors = draw(2, 5, 16, device=device)
    for fused, _ in PAIRS.values():
        assert saved_numel(fused, tensors) == 2 * 5 * 16 + 2 * 10


def test_layers_apart_are_differentiable_once(device):
    tensors = draw(2, 5, 16, device=device)
    (dx,) = torch.autograd.grad(FUSED_APART(**tensors)[1].sum(), [tensors["x"]], create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm_linears"):
        dx.sum().backward()


def test_layers_apart_that_do_not_fit(device):
    tensors = draw(2, 5, 16, device=device)
    with pytest.raises(ValueError, match=r"biases\[1\] must have shape \(out,\) = \(8,\)"):
        FUSED_APART(**tensors | {"bias1": tensors["bias0"]})
    with pytest.raises(ValueError, match="biases must be one for each weight, or None, got 1 for 2 weights"):
        layer_norm_linears(tensors["x"], *[tensors["norm_weight"]] * 2, [tensors["weight0"]] * 2, [None])
