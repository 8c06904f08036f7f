"""ops.layer_norm_linear, and of several layers, against float64 and eager PyTorch, on both backends."""

from functools import partial

import pytest
import torch
from op_cases import outputs_of, saved_numel, tensors_of
from oracle import assert_op_as_accurate

from fastvit import ops
from fastvit.ops.block.norm_linear import layer_norm_linears
from fastvit.study.accuracy.formulas import layer_norm_linear as eager

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# one row; rows and columns that fill no tile; more tokens than features
SHAPES = [
    ((1, 1, 13, 27), torch.float32),
    ((2, 17, 72, 40), torch.bfloat16),
    ((5, 33, 16, 48), torch.float32),
    ((5, 33, 16, 48), torch.float16),
]


def tensors(*shape, dtype, device, out=40):
    D = shape[-1]
    shapes = {"x": shape, "norm_weight": (D,), "norm_bias": (D,), "weight": (out, D), "bias": (out,)}
    return tensors_of(shapes, dtype, device)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_layer_norm_linear(shape, dtype, backend, device):
    args = tensors(*shape[:-1], dtype=dtype, device=device, out=shape[-1])
    assert_op_as_accurate(ops.layer_norm_linear, eager, args, what="out")
    assert_op_as_accurate(ops.layer_norm_linear, eager, args | {"bias": None}, what="no bias")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_without_bias(norm, dtype, backend, device):
    args = tensors(2, 17, 72, dtype=dtype, device=device) | {"norm_bias": None}
    calls = [partial(call, norm=norm) for call in (ops.layer_norm_linear, eager)]
    assert_op_as_accurate(*calls, args, what=norm)
    frozen = {name: t if t is None else t.detach().requires_grad_(name == "weight") for name, t in args.items()}
    assert_op_as_accurate(*calls, frozen, what=f"{norm}, only the weight's gradient")


def three(**tensors):
    """Arguments by name, as the oracle wants them -> several weights and biases."""
    several = {name: [tensors.pop(f"{name}{i}") for i in range(3)] for name in ("weight", "bias")}
    return tensors | several


def fused_apart(weight, bias, **tensors):
    return layer_norm_linears(**tensors, weights=weight, biases=bias)


def eager_apart(weight, bias, **tensors):
    return tuple(eager(**tensors, weight=w, bias=b) for w, b in zip(weight, bias, strict=True))


def of_three(*calls):
    return [lambda call=call, **tensors: call(**three(**tensors)) for call in calls]


# fused and eager, of the outputs side by side and apart
PAIRS = {"side by side": of_three(ops.layer_norm_linear, eager), "apart": of_three(fused_apart, eager_apart)}
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def tensors_of_three(*shape, dtype, device, outs=(24, 8, 40)):
    args = tensors(*shape, dtype=dtype, device=device, out=sum(outs))
    weight, bias = args.pop("weight").detach(), args.pop("bias").detach()
    args |= {f"weight{i}": w.clone().requires_grad_() for i, w in enumerate(weight.split(outs))}
    return args | {f"bias{i}": b.clone().requires_grad_() for i, b in enumerate(bias.split(outs))}


@pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_layers(dtype, pair, backend, device):
    args = tensors_of_three(2, 17, 72, dtype=dtype, device=device)
    assert_op_as_accurate(*pair, args, what="three layers")
    assert_op_as_accurate(*pair, args | {"bias1": None}, what="one without bias")
    args["weight0"].requires_grad_(False)
    args["bias2"].requires_grad_(False)
    assert_op_as_accurate(*pair, args, what="partly frozen")
    args = {n: t.detach().requires_grad_(n == "weight1") for n, t in args.items()}
    assert_op_as_accurate(*pair, args, what="one weight")


@pytest.mark.parametrize("read", [(0,), (1, 2)], ids=str)
def test_outputs_that_nothing_reads(read, backend, device):
    """Their layers get no gradient, and the others that of eager mode."""
    args = tensors_of_three(2, 17, 72, dtype=torch.float32, device=device)
    gradients = []
    for function in PAIRS["apart"]:
        outputs = function(**args)
        loss = sum(outputs[i].sin().sum() for i in read)
        gradients.append(torch.autograd.grad(loss, list(args.values()), allow_unused=True))
    for name, got, want in zip(args, *gradients, strict=True):
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, msg=name)


@pairs
def test_several_layers_under_compile_vmap_and_no_grad(pair, backend, device):
    args = tensors_of_three(2, 5, 16, dtype=torch.float32, device=device)
    fused = pair[0]
    want = outputs_of(fused(**args))
    with torch.no_grad():
        assert all(map(torch.equal, outputs_of(fused(**args)), want))
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs_of(compiled(**args)), want)
    xs = torch.stack([args["x"], args["x"] * 2]).detach()
    got = torch.func.vmap(lambda x: fused(**args | {"x": x}))(xs)
    torch.testing.assert_close(tuple(t[0] for t in outputs_of(got)), want)


def test_saves_x_and_statistics_only(backend, device):
    args = tensors(2, 5, 16, dtype=torch.float32, device=device)
    assert saved_numel(ops.layer_norm_linear, args) == 2 * 5 * 16 + 2 * 10
    only_bias = {n: t.detach().requires_grad_(n == "bias") for n, t in args.items()}
    assert saved_numel(ops.layer_norm_linear, only_bias) == 2 * 10
    args = tensors_of_three(2, 5, 16, dtype=torch.float32, device=device)
    for several, _ in PAIRS.values():
        assert saved_numel(several, args) == 2 * 5 * 16 + 2 * 10


def test_layers_apart_are_differentiable_once(backend, device):
    args = tensors_of_three(2, 5, 16, dtype=torch.float32, device=device)
    outputs = PAIRS["apart"][0](**args)
    (dx,) = torch.autograd.grad(outputs[1].sum(), [args["x"]], create_graph=True)
    with pytest.raises(RuntimeError, match="layer_norm_linears"):
        dx.sum().backward()


def test_layers_apart_under_autocast(backend, device):
    args = tensors_of_three(2, 5, 16, dtype=torch.float32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        got, want = (function(**args) for function in PAIRS["apart"])
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype == torch.bfloat16
        torch.testing.assert_close(g, w, atol=0.05, rtol=0.02)


def test_layers_apart_that_do_not_fit(device):
    args = three(**tensors_of_three(2, 5, 16, dtype=torch.float32, device=device))
    with pytest.raises(ValueError, match=r"biases\[1\] must have shape \(out,\) = \(8,\)"):
        fused_apart(**args | {"bias": [args["bias"][0]] * 3})
    with pytest.raises(ValueError, match="biases must be one for each weight, or None, got 2 for 3 weights"):
        fused_apart(**args | {"bias": args["bias"][:2]})
