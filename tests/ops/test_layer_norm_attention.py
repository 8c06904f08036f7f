"""ops.layer_norm_attention against float64 and eager PyTorch, on both backends."""

import pytest
import torch
from op_cases import outputs_and_gradients, saved_numel, tensors_of
from oracle import assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.study.accuracy import formulas

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS = ("qkv_weight", "qkv_bias")
B, N, H, D, HEAD_DIM = 2, 17, 2, 24, 16  # H * HEAD_DIM is not D


def tensors(dtype, device, B=B, N=N, D=D, out=D, **options):
    inner = H * HEAD_DIM
    shapes = {"x": (B, N, D), "norm_weight": (D,), "norm_bias": (D,)}
    shapes |= {"qkv_weight": (3 * inner, D), "qkv_bias": (3 * inner,), "proj_weight": (out, inner), "proj_bias": (out,)}
    return tensors_of(shapes | options, dtype, device)


def parted(args):
    """With q, k and v as layers of their own."""
    args = dict(args)
    for name in LAYERS:
        parts = args.pop(name).detach().chunk(3)
        args |= {f"{name}{i}": part.clone().requires_grad_() for i, part in enumerate(parts)}
    return args


def of(module, **options):
    """The op or its formula with x as its residual; of tensors as `tensors` or `parted` make them."""

    def run(**given):
        for name in LAYERS:
            if name not in given:
                given[name] = [given.pop(f"{name}{i}") for i in range(3)]
        given.setdefault("residual", given["x"])
        return module.layer_norm_attention(**given, num_heads=H, **options)

    return run


fused, eager = of(ops), of(formulas)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_at_once(dtype, backend, device):
    args = tensors(dtype, device, layer_scale=(D,), row_scale=(B,))
    assert_op_as_accurate(of(ops, scale=0.3), of(formulas, scale=0.3), args, what="packed")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_three_layers(dtype, backend, device):
    args = parted(tensors(dtype, device))
    assert_op_as_accurate(fused, eager, args, what="three")
    assert_op_as_accurate(fused, eager, args | {"qkv_bias1": None}, what="k without bias")


def test_three_layers_are_a_packed_one(backend, device):
    """In float32 up to the order of sums. Held against float64 they would test PyTorch's kernel of attention, which on
    some CPUs has up to five times the formula's error in the gradients of q and k."""
    packed = tensors(torch.float32, device)
    (whole,), want = outputs_and_gradients(fused, packed)
    (parts,), got = outputs_and_gradients(fused, parted(packed))
    found = {name: torch.cat([got.pop(f"{name}{i}") for i in range(3)]) for name in LAYERS}
    for name, t in {"out": parts, **got, **found}.items():
        expected = whole if name == "out" else want[name]
        torch.testing.assert_close(t, expected, rtol=0, atol=1e-5 * float(expected.abs().max()), msg=name)


def test_without_options(backend, device):
    """No biases, no residual; one token, whose attention has no gradient; another width of the output."""
    for n in (1, 17):
        args = tensors(torch.float32, device, B=3, N=n, D=13, out=5)
        args |= {"qkv_bias": None, "proj_bias": None, "residual": None}
        assert_op_as_accurate(fused, eager, args, what=f"{n} tokens")


@pytest.mark.parametrize("wide", [False, True], ids=["same", "float32"])
def test_other_residual(wide, backend, device):
    """A residual that is not x; a float32 one after bfloat16 matmuls makes a float32 output."""
    dtype = torch.float32 if wide else torch.bfloat16
    for scale in ({"layer_scale": (8,)}, {"row_scale": (B,)}, {}):
        args = tensors(torch.bfloat16, device, out=8, **scale)
        args["residual"] = inputs("normal", B, N, 8, dtype=dtype, device=device, seed=77).requires_grad_()
        assert_op_as_accurate(fused, eager, args, what=str(scale))


def test_dropout(backend, device):
    """Outputs and gradients are those of single ops with the same seed; another seed draws another mask."""
    args = tensors(torch.float32, device)

    def one_by_one(x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias):
        qkv = ops.layer_norm_linear(x, norm_weight, norm_bias, qkv_weight, qkv_bias).unflatten(-1, (3, H, -1))
        return ops.linear(ops.attention_qkvpacked(qkv, dropout_p=0.4).flatten(2), proj_weight, proj_bias, residual=x)

    got, want = outputs_and_gradients(of(ops, dropout_p=0.4), args), outputs_and_gradients(one_by_one, args)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    again = outputs_and_gradients(of(ops, dropout_p=0.4), args)
    torch.testing.assert_close(again, got, atol=0, rtol=0)
    torch.manual_seed(5)
    assert not torch.equal(of(ops, dropout_p=0.4)(**args), got[0][0])


NORMS = {"rms": ("rms", False), "layer": ("layer", True), "no bias": ("layer", False)}  # kind, whether with a bias


@pytest.mark.parametrize(
    ("norm", "scale_norm", "dtype"),
    [
        ("rms", None, torch.float32),
        ("rms", "rms", torch.bfloat16),
        ("rms", "no bias", torch.float16),
        ("layer", "layer", torch.bfloat16),
        ("layer", "rms", torch.float32),
        ("no bias", "layer", torch.float32),
    ],
    ids=str,
)
def test_norms(norm, scale_norm, dtype, backend, device):
    """Both kinds, with and without a bias, before the layers and before the projection."""
    args = tensors(dtype, device, B=3, layer_scale=(D,), row_scale=(3,))
    kind, bias = NORMS[norm]
    args["norm_bias"] = args["norm_bias"] if bias else None
    calls = [of(module, norm=kind) for module in (ops, formulas)]
    if scale_norm is not None:
        kind, bias = NORMS[scale_norm]
        args |= tensors_of({"scale_weight": (H * HEAD_DIM,), "scale_bias": (H * HEAD_DIM,)}, dtype, device)
        args["scale_bias"] = args["scale_bias"] if bias else None
        calls = [with_scale_norm(call, kind) for call in calls]
    assert_op_as_accurate(*calls, args, what=f"{norm}, {scale_norm}")


def with_scale_norm(call, kind="layer"):
    def run(scale_weight, scale_bias=None, norm_bias=None, **rest):
        return call(**rest, norm_bias=norm_bias, scale_norm=ops.Norm(scale_weight, scale_bias, 0.01, kind))

    return run


def test_scale_norm_saves_its_statistics_only(backend, device):
    args = tensors(torch.float32, device, scale_weight=(H * HEAD_DIM,), scale_bias=(H * HEAD_DIM,))
    plain = {name: t for name, t in args.items() if not name.startswith("scale")}
    more = saved_numel(with_scale_norm(fused), args) - saved_numel(fused, plain)
    assert more == 2 * B * N
    del args["norm_bias"]
    call = with_scale_norm(of(ops, norm="rms"))
    assert saved_numel(call, args) == saved_numel(fused, plain) + B * N  # no mean of the first
    only = {name: t.detach().requires_grad_(name == "scale_weight") for name, t in args.items()}
    assert saved_numel(call, only) == B * N * H * HEAD_DIM + 2 * B * N


def test_saves_what_is_wanted(backend, device):
    args = tensors(torch.float32, device, layer_scale=(D,), residual=(B, N, D))
    x, inner, statistics, lse = B * N * D, B * N * H * HEAD_DIM, 2 * B * N, B * N * H
    for wanted, want in (
        (args.keys(), x + 4 * inner + statistics + lse),
        (("norm_weight",), x + 4 * inner + statistics + lse),
        (("qkv_weight",), x + 4 * inner + lse),
        (("qkv_bias",), 4 * inner + lse),
        (("proj_weight",), inner),
        (("layer_scale",), inner),
        (("proj_bias",), 0),
        (("residual",), 0),
    ):
        partly = {name: t.detach().requires_grad_(name in wanted) for name, t in args.items()}
        assert saved_numel(fused, partly) == want, wanted


def test_three_layers_under_compile_vmap_and_no_grad(backend, device):
    args = parted(tensors(torch.float32, device))
    want = fused(**args)
    with torch.no_grad():
        assert torch.equal(fused(**args), want)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**args), want)
    xs = torch.stack([args["x"], args["x"] * 2]).detach()
    torch.testing.assert_close(torch.func.vmap(lambda x: fused(**args | {"x": x}))(xs)[0], want)


def test_only_the_residual_is_wanted(backend, device):
    """No gradient of the op itself: nothing runs backward."""
    args = {name: t.detach() for name, t in tensors(torch.float32, device).items()}
    residual = torch.zeros(B, N, D, device=device, requires_grad=True)
    out = fused(**args, residual=residual)
    (gradient,) = torch.autograd.grad(out, residual, out.detach())
    assert torch.equal(gradient, out)


@pytest.mark.parametrize(("normed", "recompute"), [(False, "all"), (True, "none"), (True, "attention")], ids=str)
def test_sequences_of_several_lengths_with_positions(normed, recompute, backend, device):
    """Layers, statistics and tables of all tokens; norms of q and k write into the packed gradient, too."""
    T, ends = 30, torch.tensor([0, 7, 7, 8, 30], dtype=torch.int32, device=device)
    args = tensors(torch.float32, device, layer_scale=(D,), row_scale=(T,))
    args["x"] = inputs("normal", T, D, dtype=torch.float32, device=device).requires_grad_()
    args |= tensors_of({"fixed_sin": (T, HEAD_DIM), "fixed_cos": (T, HEAD_DIM)}, torch.float32, device)
    if normed:
        args |= tensors_of({"q_weight": (HEAD_DIM,), "k_weight": (HEAD_DIM,)}, torch.float32, device)

    def of_sequences(module, **options):
        def run(fixed_sin, fixed_cos, q_weight=None, k_weight=None, **rest):
            norms = None if q_weight is None else (ops.Norm(q_weight, kind="rms"), ops.Norm(k_weight, kind="rms"))
            return of(module, rotary=ops.Rotary(fixed_sin, fixed_cos), qk_norm=norms, cu_seqlens=ends, **options)(
                **rest
            )

        return run

    for max_seqlen in (22, None):
        fused = of_sequences(ops, max_seqlen=max_seqlen, recompute=recompute)
        assert_op_as_accurate(fused, of_sequences(formulas), args)
