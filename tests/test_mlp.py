"""ops.mlp and ops.layer_norm_mlp against float64 and eager PyTorch, on both backends."""

import functools

import formulas
import pytest
import torch
from formulas import ACTIVATIONS
from oracle import GRADIENT, assert_as_accurate, assert_op_as_accurate, inputs
from torch.utils.checkpoint import checkpoint

from fastvit import ops
from fastvit.ops.dropout import draw_seeds, dropout_op

NORM = ("norm_weight", "norm_bias")
FC = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


def eager(norm_weight=None, norm_bias=None, **kwargs):
    if norm_weight is None:
        return formulas.mlp(**kwargs)
    return formulas.layer_norm_mlp(norm_weight=norm_weight, norm_bias=norm_bias, **kwargs)


def fused(norm_weight=None, norm_bias=None, **kwargs):
    if norm_weight is None:
        return ops.mlp(**kwargs)
    return ops.layer_norm_mlp(norm_weight=norm_weight, norm_bias=norm_bias, **kwargs)


def tensors(*shape, hidden=40, out=None, dtype, device, norm=False, layer_scale=False, drop_path=False):
    """x (*shape), the parameters, and what is asked for, all but row_scale with requires_grad."""
    D, out = shape[-1], out or shape[-1]
    shapes = {"x": shape}
    shapes |= {"norm_weight": (D,), "norm_bias": (D,)} if norm else {}
    shapes |= {"fc1_weight": (hidden, D), "fc1_bias": (hidden,), "fc2_weight": (out, hidden), "fc2_bias": (out,)}
    shapes |= {"layer_scale": (out,)} if layer_scale else {}
    result = {}
    for seed, (name, s) in enumerate(shapes.items()):
        t = inputs("normal", *s, dtype=torch.float64, device=device, seed=seed)
        t = t / s[1] ** 0.5 if len(s) == 2 and name != "x" else t
        result[name] = t.to(dtype).requires_grad_()
    if drop_path:
        result["row_scale"] = torch.tensor([0.0, 1.25, 1.25, 0.0, 1.25], dtype=dtype, device=device)[: shape[0]]
    return result


def with_residual(function, **options):
    """x is its own residual"""
    return lambda x, **kwargs: function(x=x, residual=x, **kwargs, **options)


@pytest.mark.parametrize(
    ("dtype", "recompute"),
    [
        (torch.float32, "none"),
        (torch.float32, "activation"),
        (torch.float32, "all"),
        (torch.bfloat16, "none"),
        (torch.bfloat16, "activation"),
        (torch.bfloat16, "all"),
        (torch.float16, "activation"),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
def test_everything_at_once(norm, dtype, recompute, backend, device):
    args = tensors(3, 7, 24, dtype=dtype, device=device, norm=norm, layer_scale=True, drop_path=True)
    assert_op_as_accurate(with_residual(fused, recompute=recompute), with_residual(eager), args, what=recompute)


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


@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
@pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
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

    assert_op_as_accurate(with_residual(seeded), with_residual(eager, masks=masks), args, what="dropout")


def gradients_of(call, args):
    wanted = [t for t in args.values() if t is not None and t.requires_grad]
    out = call(**args)
    return [out, *torch.autograd.grad(out, wanted, inputs("normal", *out.shape, dtype=out.dtype, device=out.device))]


@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
def test_frozen_parameters(recompute, backend, device):
    """Whatever is frozen, the other gradients are bitwise the same, and nothing wider than needed is saved."""
    args = tensors(2, 5, 16, hidden=32, dtype=torch.float32, device=device, norm=True, layer_scale=True)
    call = with_residual(fused, recompute=recompute)
    everything = dict(zip(args, gradients_of(call, args)[1:], strict=True))
    fc1 = ("fc1_weight", "fc1_bias")
    for frozen in [
        (),
        ("x",),
        ("fc1_weight",),
        ("fc2_weight", "layer_scale"),
        FC,
        ("x", *NORM),
        ("x", *NORM, *fc1),
        ("x", *NORM, *FC),
    ]:
        partly = {n: t.detach().requires_grad_(n not in frozen) for n, t in args.items()}
        for name, got in zip((n for n in args if n not in frozen), gradients_of(call, partly)[1:], strict=True):
            torch.testing.assert_close(got, everything[name], atol=1e-6, rtol=1e-5, msg=f"{name} with {frozen} frozen")


def saved_numel(call, args):
    """Elements saved for backward, parameters excluded, by unique storage."""
    skip = {t.untyped_storage().data_ptr() for n, t in args.items() if n != "x"}
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call(**args)
    return sum(n for pointer, n in saved.items() if pointer not in skip), out


def test_saves_what_recompute_says(backend, device):
    args = tensors(2, 5, 16, hidden=32, dtype=torch.float32, device=device, norm=True)
    x, hidden, statistics = 160, 320, 20
    for recompute, want in (("none", x + 2 * hidden), ("activation", x + hidden), ("all", x)):
        numel, _ = saved_numel(with_residual(fused, recompute=recompute), args)
        assert numel == want + statistics
    args = {n: t.detach().requires_grad_(n == "fc2_bias") for n, t in args.items()}
    numel, _ = saved_numel(with_residual(fused), args)
    assert numel == statistics  # nothing that fc2's bias needs


def test_checkpoint_draws_the_same_masks(backend, device):
    args = tensors(2, 5, 16, dtype=torch.float32, device=device, norm=True)
    call = with_residual(fused, dropout_p=0.4)
    torch.manual_seed(5)
    want = gradients_of(call, args)
    torch.manual_seed(5)
    got = gradients_of(lambda **kwargs: checkpoint(lambda: call(**kwargs), use_reentrant=False), args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_empty_batch(recompute, norm, backend, device):
    args = tensors(0, 5, 16, dtype=torch.float32, device=device, norm=norm, layer_scale=True, drop_path=True)
    out, *gradients = gradients_of(with_residual(fused, recompute=recompute, dropout_p=0.1), args)
    assert out.shape == (0, 5, 16)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_gradcheck(device):
    for norm in (False, True):
        args = tensors(2, 3, 4, hidden=5, dtype=torch.float64, device=device, norm=norm, layer_scale=True)
        row_scale = torch.tensor([0.0, 2.0], dtype=torch.float64, device=device)

        def call(*values, names=tuple(args), **options):
            torch.manual_seed(0)
            return with_residual(fused, **options)(**dict(zip(names, values, strict=True)))

        for options in ({"recompute": "none"}, {"recompute": "all", "activation": "silu"}, {"dropout_p": 0.3}):
            assert torch.autograd.gradcheck(
                functools.partial(call, row_scale=row_scale, **options), tuple(args.values())
            )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
def test_compile(norm, dynamic, backend, device):
    options = {"dropout_p": 0.2} if norm else {"recompute": "all"}
    call = with_residual(fused, **options)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (2, 3):
        args = tensors(batch, 5, 16, dtype=torch.float32, device=device, norm=norm, layer_scale=True, drop_path=True)
        results = []
        for run in (compiled, call):
            torch.manual_seed(2)
            results.append(gradients_of(run, args))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
def test_autocast_follows_eager(norm, x_dtype, backend, device):
    args = tensors(2, 5, 16, dtype=torch.float32, device=device, norm=norm, layer_scale=True, drop_path=True)
    args["x"] = args["x"].detach().to(x_dtype).requires_grad_()
    results = []
    for call in (with_residual(fused), with_residual(eager)):
        with torch.autocast(device.type, torch.bfloat16):
            out = call(**args)
        leaves = [t for t in args.values() if t.requires_grad]
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    exact = with_residual(eager)(**{n: t.double() for n, t in args.items()})
    assert_as_accurate(results[0][0], results[1][0], exact, what="autocast")
    for name, got, want in zip(args, *(r[1:] for r in results), strict=False):
        assert got.dtype == want.dtype == args[name].dtype, name
        assert (got - want).norm() < 0.03 * want.norm(), name


BAD = {
    "x must be float32": (TypeError, {"x": torch.ones(2, 5, 16).long()}),
    "x must have shape (..., in)": (ValueError, {"x": torch.ones(2, 5, 15)}),
    "fc1_weight must have x's dtype": (TypeError, {"fc1_weight": torch.ones(40, 16).half()}),
    "fc1_weight must be (out, in)": (ValueError, {"fc1_weight": torch.ones(16)}),
    "fc1_bias must have shape": (ValueError, {"fc1_bias": torch.ones(16)}),
    "fc2_weight must have shape (out, hidden)": (ValueError, {"fc2_weight": torch.ones(16, 41)}),
    "fc2_weight must be a tensor": (TypeError, {"fc2_weight": None}),
    "fc2_weight must be on x's device": (ValueError, {"fc2_weight": torch.ones(16, 40, device="meta")}),
    "fc2_bias must have shape (out,)": (ValueError, {"fc2_bias": torch.ones(40)}),
    "activation must be one of gelu": (ValueError, {"activation": "gelu_erf"}),
    "recompute must be one of none, activation, all, got 'some'": (ValueError, {"recompute": "some"}),
    "dropout_p must be in [0, 1), got 1.0": (ValueError, {"dropout_p": 1.0}),
    "layer_scale must have shape (out,)": (ValueError, {"layer_scale": torch.ones(40)}),
    "row_scale must have shape (B,)": (ValueError, {"row_scale": torch.ones(5)}),
    "residual must have shape (..., out)": (ValueError, {"residual": torch.ones(2, 1, 16)}),
    "norm_weight must have shape (in,)": (ValueError, {"norm_weight": torch.ones(40)}),
    "norm_bias must have x's dtype": (TypeError, {"norm_bias": torch.ones(16).double()}),
    "eps must be finite and not negative, got -1.0": (ValueError, {"eps": -1.0}),
}


@pytest.mark.parametrize("message", BAD, ids=[m.replace(" ", "_") for m in BAD])
def test_bad_arguments(message, device):
    error, wrong = BAD[message]
    args = tensors(2, 5, 16, dtype=torch.float32, device=device, norm=True)
    wrong = {n: t.to(device) if isinstance(t, torch.Tensor) and not t.is_meta else t for n, t in wrong.items()}
    for function in (ops.layer_norm_mlp, ops.mlp):
        merged = args | wrong
        if function is ops.mlp:
            if any(n in ("eps", *NORM) for n in wrong):
                continue
            merged = {n: t for n, t in merged.items() if n not in NORM}
        with pytest.raises(error) as raised:
            function(**merged)
        assert str(raised.value).startswith(message)
