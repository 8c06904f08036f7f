"""ops.mlp and ops.layer_norm_mlp against float64 and eager PyTorch, on both backends."""

import functools

import pytest
import torch
from op_cases import saved_numel, tensors_of
from oracle import GRADIENT, assert_as_accurate, assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.ops.dropout.op import draw_seeds, dropout_op
from fastvit.study.accuracy import formulas
from fastvit.study.accuracy.formulas import ACTIVATIONS

NORM = ("norm_weight", "norm_bias")
FC = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


def either(module):
    """Return the module's layer_norm_mlp if there are parameters of a norm, else its mlp."""

    def run(**tensors):
        return (module.layer_norm_mlp if "norm_weight" in tensors else module.mlp)(**tensors)

    return run


fused, eager = either(ops), either(formulas)


def tensors(*shape, hidden=40, out=None, dtype, device, norm=False, layer_scale=False, drop_path=False):
    """x (*shape), the parameters, and what is asked for."""
    D, out = shape[-1], out or shape[-1]
    shapes = {"x": shape} | ({"norm_weight": (D,), "norm_bias": (D,)} if norm else {})
    shapes |= {"fc1_weight": (hidden, D), "fc1_bias": (hidden,), "fc2_weight": (out, hidden), "fc2_bias": (out,)}
    shapes |= ({"layer_scale": (out,)} if layer_scale else {}) | ({"row_scale": shape[:1]} if drop_path else {})
    return tensors_of(shapes, dtype, device)


def with_residual(function, **options):
    """x is its own residual"""
    return lambda x, **kwargs: function(x=x, residual=x, **kwargs, **options)


@pytest.mark.parametrize(
    ("norm", "dtype", "recompute"),
    [
        (False, torch.float32, "none"),
        (False, torch.bfloat16, "all"),
        (False, torch.float16, "activation"),
        (True, torch.float32, "all"),
        (True, torch.bfloat16, "activation"),
        (True, torch.float16, "none"),
    ],
    ids=str,
)
def test_everything_at_once(norm, dtype, recompute, backend, device):
    args = tensors(3, 7, 24, dtype=dtype, device=device, norm=norm, layer_scale=True, drop_path=True)
    assert_op_as_accurate(with_residual(fused, recompute=recompute), with_residual(eager), args, what=recompute)


@pytest.mark.parametrize(
    ("recompute", "dtype"), [("none", torch.float32), ("activation", torch.bfloat16), ("all", torch.float32)], ids=str
)
def test_rms_norm(recompute, dtype, backend, device):
    args = tensors(3, 7, 24, dtype=dtype, device=device, norm=True, layer_scale=True) | {"norm_bias": None}
    calls = with_residual(fused, recompute=recompute, norm="rms"), with_residual(eager, norm="rms")
    assert_op_as_accurate(*calls, args, what=recompute)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, backend, device):
    for dtype in (torch.float32, torch.bfloat16):
        args = tensors(2, 5, 16, dtype=dtype, device=device, out=8)
        run = functools.partial(fused, activation=activation)
        assert_op_as_accurate(run, functools.partial(eager, activation=activation), args, what=activation)


@pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
def test_without_options(norm, backend, device):
    """No biases, no scales, no residual; one token; odd sizes."""
    args = tensors(1, 1, 13, hidden=27, out=5, dtype=torch.float32, device=device, norm=norm)
    args |= {"fc1_bias": None, "fc2_bias": None}
    assert_op_as_accurate(fused, eager, args, what="plain")


@pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
def test_other_residual(norm, backend, device):
    """A residual that is not x, with one scale at a time; more rows than hidden units."""
    for scale in ({"layer_scale": True}, {"drop_path": True}, {}):
        args = tensors(5, 11, 16, hidden=32, dtype=torch.bfloat16, device=device, norm=norm, **scale)
        args["residual"] = inputs("normal", 5, 11, 16, dtype=torch.bfloat16, device=device, seed=77).requires_grad_()
        assert_op_as_accurate(fused, eager, args, what=str(scale))


def test_float32_residual_stream(backend, device):
    """bfloat16 matmuls on a float32 stream: the output and the residual's gradient stay float32."""
    args = tensors(2, 5, 16, dtype=torch.bfloat16, device=device, layer_scale=True)
    args["residual"] = inputs("normal", 2, 5, 16, dtype=torch.float32, device=device, seed=77).requires_grad_()
    assert_op_as_accurate(fused, eager, args, what="stream")


@pytest.mark.parametrize("hidden", [16, 64], ids=["more_rows", "fewer_rows"])
def test_small_layer_scale_in_float16(hidden, backend, device):
    """DINOv2's 1e-5 with the gradients that loss scaling makes of it: layer_scale * weight would underflow, and the
    weight's gradient before layer_scale would overflow."""
    args = tensors(4, 8, 16, hidden=hidden, dtype=torch.float32, device=device, layer_scale=True)
    args["layer_scale"] = torch.full((16,), 1e-5, device=device, requires_grad=True)
    dout = inputs("offset", 4, 8, 16, dtype=torch.float32, device=device, seed=70) * 8

    def gradients(function, dtype):
        cast = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in args.items()}
        with torch.autocast(device.type, torch.float16, enabled=dtype is None):
            out = with_residual(function)(**cast)
        return torch.autograd.grad(out, list(cast.values()), dout.to(out.dtype))

    runs = gradients(fused, None), gradients(eager, None), gradients(eager, torch.float64)
    for name, got, same, exact in zip(args, *runs, strict=True):
        assert_as_accurate(got, same, exact, factor=GRADIENT, what=name)


@pytest.mark.parametrize(("norm", "recompute"), [(False, "none"), (True, "activation"), (True, "all")])
def test_dropout(norm, recompute, backend, device):
    """Against eager with the masks that the op draws from the same seeds."""
    args = tensors(3, 7, 24, dtype=torch.float32, device=device, norm=norm, layer_scale=True, drop_path=True)
    torch.manual_seed(11)
    seeds = draw_seeds(2, device)
    masks = [
        dropout_op(torch.ones(21, n, device=device), seed, 0.3).view(3, 7, n)
        for seed, n in zip(seeds.split(1), (40, 24), strict=True)
    ]
    assert not torch.equal(masks[0][..., :24], masks[1])

    def seeded(**kwargs):
        torch.manual_seed(11)
        return fused(**kwargs, dropout_p=0.3, recompute=recompute)

    assert_op_as_accurate(with_residual(seeded), with_residual(eager, factors=masks), args, what="dropout")


def test_saves_what_recompute_says(backend, device):
    args = tensors(2, 5, 16, hidden=32, dtype=torch.float32, device=device, norm=True)
    x, hidden, statistics = 160, 320, 20
    for recompute, want in (("none", x + 2 * hidden), ("activation", x + hidden), ("all", x)):
        numel = saved_numel(with_residual(fused, recompute=recompute), args)
        assert numel == want + statistics
    args = {n: t.detach().requires_grad_(n == "fc2_bias") for n, t in args.items()}
    numel = saved_numel(with_residual(fused), args)
    assert numel == statistics  # nothing that fc2's bias needs
