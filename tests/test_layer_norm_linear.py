"""ops.layer_norm_linear against float64 and eager PyTorch, on both backends. ops.layer_norm_mlp: test_mlp.py."""

import pytest
import torch
from formulas import layer_norm_linear as eager
from oracle import assert_as_accurate, assert_op_as_accurate, inputs

from fastvit import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# one row; rows and columns that fill no tile; more tokens than features
SHAPES = [(1, 1, 13, 27), (2, 17, 72, 40), (5, 33, 16, 48)]


def with_residual(x, **kwargs):
    return ops.layer_norm_linear(x, **kwargs, return_residual=True)


def eager_with_residual(x, **kwargs):
    return eager(x, **kwargs), x * 1


def tensors(*shape, dtype, device, out=40, kind="normal"):
    D = shape[-1]
    shapes = {"x": shape, "norm_weight": (D,), "norm_bias": (D,), "weight": (out, D), "bias": (out,)}
    result = {}
    for seed, (name, s) in enumerate(shapes.items()):
        t = inputs(kind if name == "x" else "normal", *s, dtype=torch.float64, device=device, seed=seed)
        result[name] = (t / D**0.5 if name == "weight" else t).to(dtype).requires_grad_()
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_linear(shape, dtype, backend, device):
    args = tensors(*shape[:-1], dtype=dtype, device=device, out=shape[-1])
    assert_op_as_accurate(ops.layer_norm_linear, eager, args, what="out")
    assert_op_as_accurate(with_residual, eager_with_residual, args, what="out and residual")
    assert_op_as_accurate(ops.layer_norm_linear, eager, args | {"bias": None}, what="no bias")


def three(**tensors):
    """Arguments by name, as the oracle wants them -> several weights and biases."""
    several = {name: [tensors.pop(f"{name}{i}") for i in range(3)] for name in ("weight", "bias")}
    return tensors | several


def fused_three(**tensors):
    return ops.layer_norm_linear(**three(**tensors), return_residual=True)


def eager_three(**tensors):
    return eager_with_residual(**three(**tensors))


def tensors_of_three(*shape, dtype, device, outs=(24, 8, 40)):
    args = tensors(*shape, dtype=dtype, device=device, out=sum(outs))
    weight, bias = args.pop("weight").detach(), args.pop("bias").detach()
    args |= {f"weight{i}": w.clone().requires_grad_() for i, w in enumerate(weight.split(outs))}
    return args | {f"bias{i}": b.clone().requires_grad_() for i, b in enumerate(bias.split(outs))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_layers_side_by_side(dtype, backend, device):
    args = tensors_of_three(2, 17, 72, dtype=dtype, device=device)
    assert_op_as_accurate(fused_three, eager_three, args, what="three layers")
    assert_op_as_accurate(fused_three, eager_three, args | {"bias1": None}, what="one without bias")
    args["weight0"].requires_grad_(False)
    args["bias2"].requires_grad_(False)
    assert_op_as_accurate(fused_three, eager_three, args, what="partly frozen")
    args = {n: t.detach().requires_grad_(n == "weight1") for n, t in args.items()}
    assert_op_as_accurate(lambda **t: fused_three(**t)[0], lambda **t: eager_three(**t)[0], args, what="one weight")


def test_several_layers_under_compile_vmap_and_no_grad(backend, device):
    args = tensors_of_three(2, 5, 16, dtype=torch.float32, device=device)
    want = fused_three(**args)[0]
    with torch.no_grad():
        assert torch.equal(fused_three(**args)[0], want)
    torch._dynamo.reset()
    compiled = torch.compile(fused_three, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**args)[0], want)
    xs = torch.stack([args["x"], args["x"] * 2]).detach()
    got = torch.func.vmap(lambda x: fused_three(**args | {"x": x})[0])(xs)
    torch.testing.assert_close(got[0], want)


def test_several_layers_save_what_one_does(backend, device):
    args = tensors_of_three(2, 5, 16, dtype=torch.float32, device=device)
    assert saved_numel(args, fused_three) == 2 * 5 * 16 + 2 * 10


def test_several_layers_that_do_not_fit(device):
    args = three(**tensors_of_three(2, 5, 16, dtype=torch.float32, device=device))
    with pytest.raises(ValueError, match="bias must be one for each weight, or None, got 2 for 3 weights"):
        ops.layer_norm_linear(**args | {"bias": args["bias"][:2]})
    with pytest.raises(ValueError, match="bias must be one for each weight, or None, got 0 for 0 weights"):
        ops.layer_norm_linear(**args | {"weight": (), "bias": None})
    with pytest.raises(ValueError, match=r"bias\[1\] must have shape \(out,\) = \(8,\)"):
        ops.layer_norm_linear(**args | {"bias": [args["bias"][0]] * 3})


@pytest.mark.parametrize("kind", ["integer", "large", "offset"])
def test_inputs(kind, backend, device):
    args = tensors(2, 5, 72, dtype=torch.float32, device=device, kind=kind)
    assert_op_as_accurate(with_residual, eager_with_residual, args, what=kind)


def test_residual_is_passed_through(backend, device):
    args = tensors(2, 5, 16, dtype=torch.float32, device=device)
    out, residual = with_residual(**args)
    assert residual.data_ptr() == args["x"].data_ptr()
    assert torch.equal(residual, args["x"])
    # each output alone
    (dx,) = torch.autograd.grad(residual.square().sum(), args["x"], retain_graph=True)
    assert torch.equal(dx, 2 * args["x"])
    (dx,) = torch.autograd.grad(out.square().sum(), args["x"])
    (want,) = torch.autograd.grad(ops.layer_norm_linear(**args).square().sum(), args["x"])
    assert torch.equal(dx, want)
    with torch.no_grad():
        assert with_residual(**args)[1] is args["x"]


def gradients_of(args, function=with_residual):
    wanted = [t for t in args.values() if t.requires_grad]
    out, residual = function(**args)
    douts = [inputs("normal", *t.shape, dtype=t.dtype, device=t.device, seed=i) for i, t in enumerate((out, residual))]
    if not residual.requires_grad:
        return [out, *torch.autograd.grad(out, wanted, douts[0])]
    return [out, *torch.autograd.grad((out, residual), wanted, douts)]


def saved_numel(args, function=with_residual):
    saved = {}
    parameters = {t.untyped_storage().data_ptr() for n, t in args.items() if n != "x"}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.update({t.untyped_storage().data_ptr(): t.numel()}), lambda t: t
    ):
        function(**args)
    return sum(n for pointer, n in saved.items() if pointer not in parameters)


def test_frozen_parameters(backend, device):
    """Whatever is frozen, the other gradients are the same."""
    args = tensors(2, 5, 16, dtype=torch.float32, device=device)
    everything = dict(zip(args, gradients_of(args)[1:], strict=True))
    norm = ("norm_weight", "norm_bias")
    for frozen in [(n,) for n in args] + [("weight", "bias"), norm, ("x", *norm), ("x", *norm, "weight")]:
        partly = {n: t.detach().requires_grad_(n not in frozen) for n, t in args.items()}
        for name, got in zip((n for n in args if n not in frozen), gradients_of(partly)[1:], strict=True):
            torch.testing.assert_close(got, everything[name], atol=1e-6, rtol=1e-5, msg=f"{name} with {frozen} frozen")


def test_saves_x_and_statistics_only(backend, device):
    args = tensors(2, 5, 16, dtype=torch.float32, device=device)
    assert saved_numel(args) == 2 * 5 * 16 + 2 * 10
    only_bias = {n: t.detach().requires_grad_(n == "bias") for n, t in args.items()}
    assert saved_numel(only_bias) == 2 * 10


def test_gradcheck(device):
    args = tensors(2, 3, 4, dtype=torch.float64, device=device, out=5)
    names = tuple(args)
    assert torch.autograd.gradcheck(
        lambda *values: with_residual(**dict(zip(names, values, strict=True))), tuple(args.values())
    )


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_follows_eager(x_dtype, backend, device):
    args = tensors(2, 5, 16, dtype=torch.float32, device=device)
    args["x"] = args["x"].detach().to(x_dtype).requires_grad_()
    results = []
    for function in (with_residual, eager_with_residual):
        with torch.autocast(device.type, torch.bfloat16):
            out, residual = function(**args)
        assert residual.dtype == x_dtype
        loss = out.float().square().sum() + residual.float().square().sum()
        results.append([out, *torch.autograd.grad(loss, list(args.values()))])
    exact = eager(**{n: t.double() for n, t in args.items()})
    assert_as_accurate(results[0][0], results[1][0], exact, what="autocast")
    for name, got, want in zip(args, *(r[1:] for r in results), strict=True):
        assert got.dtype == want.dtype == args[name].dtype, name
        assert (got - want).norm() < 0.03 * want.norm(), name


BAD = {
    "x must be float32": (TypeError, {"x": torch.ones(2, 5, 16).long()}),
    "x must have shape (..., in)": (ValueError, {"x": torch.ones(2, 5, 15)}),
    "weight must have x's dtype": (TypeError, {"weight": torch.ones(40, 16).half()}),
    "weight must be (out, in)": (ValueError, {"weight": torch.ones(16)}),
    "bias must have shape": (ValueError, {"bias": torch.ones(16)}),
    "norm_weight must have shape (in,)": (ValueError, {"norm_weight": torch.ones(40)}),
    "norm_weight must be a tensor": (TypeError, {"norm_weight": None}),
    "norm_bias must have x's dtype": (TypeError, {"norm_bias": torch.ones(16).double()}),
    "norm_bias must be on x's device": (ValueError, {"norm_bias": torch.ones(16, device="meta")}),
    "eps must be finite and not negative, got -1.0": (ValueError, {"eps": -1.0}),
}


@pytest.mark.parametrize("message", BAD, ids=[m.replace(" ", "_") for m in BAD])
def test_bad_arguments(message, device):
    error, wrong = BAD[message]
    args = tensors(2, 5, 16, dtype=torch.float32, device=device)
    wrong = {n: t.to(device) if isinstance(t, torch.Tensor) and not t.is_meta else t for n, t in wrong.items()}
    with pytest.raises(error) as raised:
        ops.layer_norm_linear(**(args | wrong))
    assert str(raised.value).startswith(message)
