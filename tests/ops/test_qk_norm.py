"""ops.qk_norm, and norms of q and k within layer_norm_attention: values, gradients, places."""

import pytest
import torch
from op_cases import tensors_of
from oracle import assert_op_as_accurate, inputs
from rotary_inputs import LAYOUTS, SPELLINGS, table
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.ops.qk_norm.op import qk_norm_bwd
from fastvit.study.accuracy import formulas

EPS = 1e-5


def parameters(d, kind):
    names = ("q_weight", "k_weight") if kind != "layer" else ("q_weight", "q_bias", "k_weight", "k_bias")
    return dict.fromkeys(names, (d,))


def norms(kind, q_weight, k_weight, q_bias=None, k_bias=None):
    kind = "rms" if kind == "rms" else "layer"
    return ops.Norm(q_weight, q_bias, EPS, kind), ops.Norm(k_weight, k_bias, EPS, kind)


def normalise(module, kind, positions=None):
    """module.qk_norm of the q and k of a packed qkv; tables in the dtype of what they are multiplied with."""

    def call(qkv, **of_norms):
        rotary = positions
        if rotary is not None:
            sin, cos = (t.to(torch.promote_types(t.dtype, qkv.dtype)) for t in rotary[:2])
            rotary = rotary._replace(sin=sin, cos=cos)
        return module.qk_norm(*qkv.unbind(2)[:2], *norms(kind, **of_norms), rotary)

    return call


@pytest.mark.parametrize(
    ("B", "N", "H", "d", "prefix", "interleaved", "kind", "dtype"),
    [
        (1, 19, 5, 64, 3, False, "layer", torch.float32),  # shares of steps that are not full
        (1, 19, 5, 64, 3, False, "layer", torch.bfloat16),
        (2, 9, 2, 72, 0, True, "rms", torch.float32),  # a padded head
        (2, 9, 2, 72, 0, True, "rms", torch.float16),
        (1, 9, 3, 256, 3, True, "layer", torch.float16),
        (1, 40, 1, 16, 40, False, "no bias", torch.bfloat16),  # nothing but prefix
        (2, 21, 2, 24, 1, False, "rms", torch.bfloat16),
    ],
    ids=str,
)
def test_accuracy(B, N, H, d, prefix, interleaved, kind, dtype, backend, device):
    """float32 tables, whatever q and k are."""
    tensors = tensors_of({"qkv": (B, N, 3, H, d), **parameters(d, kind)}, dtype, device)
    rotary = ops.Rotary(*table(N - prefix, d, device=device), prefix, interleaved)
    assert_op_as_accurate(normalise(ops, kind, rotary), normalise(formulas, kind, rotary), tensors)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("B", "N"), [(13, 3), (5, 130)])
def test_more_steps_than_programs(B, N, kind, backend, device):
    """So that programs sum over several, some over fewer than others, and some over those of two blocks of tokens."""
    tensors = tensors_of({"qkv": (B, N, 3, 1, 16), **parameters(16, kind)}, torch.float32, device)
    assert_op_as_accurate(normalise(ops, kind), normalise(formulas, kind), tensors)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("layer", torch.bfloat16), ("no bias", torch.float32), ("rms", torch.float16)], ids=str
)
def test_without_positions(kind, dtype, backend, device):
    for d in (24, 32):  # of halves that are and that are not a multiple of 8 elements
        tensors = tensors_of({"qkv": (1, 17, 3, 3, d), **parameters(d, kind)}, dtype, device)
        assert_op_as_accurate(normalise(ops, kind), normalise(formulas, kind), tensors)


@pytest.mark.parametrize("kind_of_input", ["integer", "large", "offset"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_inputs(kind_of_input, kind, backend, device):
    """A mean of 1000 exposes a one-pass variance, and lanes beyond the head that enter it (d = 72)."""
    tensors = tensors_of({"qkv": (2, 19, 3, 2, 72), **parameters(72, kind)}, torch.float32, device, kind_of_input)
    for name in tensors.keys() - {"qkv"}:
        tensors[name] = inputs("normal", 72, dtype=torch.float32, device=device, seed=5).requires_grad_()
    rotary = ops.Rotary(*table(18, 72, device=device), 1)
    assert_op_as_accurate(normalise(ops, kind, rotary), normalise(formulas, kind, rotary), tensors, what=kind_of_input)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_rounded_once(dtype, backend, device):
    """Not between the norm and the rotation: nearly always to the nearest number."""
    qkv = inputs("normal", 2, 50, 3, 2, 32, dtype=dtype, device=device)
    of_norms = {
        n: inputs("normal", 32, dtype=dtype, device=device, seed=s) for s, n in enumerate(parameters(32, "layer"))
    }
    sin, cos = table(50, 32, device=device)
    double = {name: t.double() for name, t in of_norms.items()}
    exact = normalise(formulas, "layer", ops.Rotary(sin.double(), cos.double()))(qkv.double(), **double)
    for got, want in zip(normalise(ops, "layer", ops.Rotary(sin, cos))(qkv, **of_norms), exact, strict=True):
        assert (got != want.to(dtype)).float().mean() < 0.002


@pytest.mark.parametrize(("shape", "interleaved"), [((3,), False), ((2, 1), True), ((2, 3), True)], ids=str)
def test_tables_of_a_sample_or_a_head(shape, interleaved, backend, device):
    """In more than one block of tokens."""
    tensors = tensors_of({"qkv": (2, 77, 3, 3, 24), **parameters(24, "layer")}, torch.float32, device)
    rotary = ops.Rotary(*table(*shape, 75, 24, device=device), 2, interleaved)
    assert_op_as_accurate(normalise(ops, "layer", rotary), normalise(formulas, "layer", rotary), tensors)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_eps(kind, backend, device):
    """Heads as small as its root, where it counts, in numbers of heads that fill shares and that do not; and none."""
    for eps, heads in ((0.02, 4), (0.0, 5)):
        tensors = tensors_of({"qkv": (2, 17, 3, heads, 16), **parameters(16, kind)}, torch.float32, device)
        tensors["qkv"] = (tensors["qkv"].detach() * 0.1).requires_grad_()

        def run(module, eps=eps):
            def call(qkv, **of_norms):
                return module.qk_norm(*qkv.unbind(2)[:2], *(n._replace(eps=eps) for n in norms(kind, **of_norms)))

            return call

        assert_op_as_accurate(run(ops), run(formulas), tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, backend, device):
    """Layouts of q, of k, of both and of their gradients change no bit, of the parameters' gradients either."""
    q, k, dq, dk = (inputs("normal", 2, 12, 3, 24, dtype=torch.float32, device=device, seed=i) for i in range(4))
    weights = [inputs("normal", 24, dtype=torch.float32, device=device, seed=i).requires_grad_() for i in range(4)]
    rotary = ops.Rotary(*table(11, 24, device=device), 1)
    expanded = layout == "batch_expanded"

    def run(arrange_q, arrange_k):
        leaves = [arrange(t.detach()).requires_grad_() for arrange, t in ((arrange_q, q), (arrange_k, k))]
        out = ops.qk_norm(*leaves, ops.Norm(*weights[:2]), ops.Norm(*weights[2:]), rotary)
        assert all(t.is_contiguous() for t in out)
        return *out, *torch.autograd.grad(out, [*leaves, *weights], [arrange_q(dq), arrange_k(dk)])

    arrange = LAYOUTS[layout]
    if expanded:
        q, k, dq, dk = (t[:1].expand_as(t).contiguous() for t in (q, k, dq, dk))
    want = run(torch.clone, torch.clone)
    for choice in ((arrange, torch.clone), (torch.clone, arrange), (arrange, arrange)):
        assert all(torch.equal(a, b) for a, b in zip(run(*choice), want, strict=True))


@SPELLINGS
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_nan_stays_in_its_head(interleaved, kind, backend, device):
    """In outputs and in gradients of q and k; gradients of one token do not reach another."""
    q, k = (inputs("normal", 2, 20, 3, 16, dtype=torch.float32, device=device, seed=s).requires_grad_() for s in (1, 2))
    weights = [inputs("normal", 16, dtype=torch.float32, device=device, seed=s) for s in (3, 4)]
    rotary = ops.Rotary(*table(17, 16, device=device), 3, interleaved)

    def run(q, k, dout):
        out = ops.qk_norm(q, k, *norms(kind, *weights), rotary)
        return *out, *torch.autograd.grad(out, (q, k), dout)

    douts = [inputs("normal", 2, 20, 3, 16, dtype=torch.float32, device=device, seed=s) for s in (5, 6)]
    clean = run(q, k, douts)
    for of_q, token in ((True, 7), (False, 1), (False, 19)):  # a patch, a prefix token, the last of a part of a block
        dirty = [t.detach().clone() for t in (q, k)]
        dirty[not of_q][1, token, 2, 5] = torch.nan
        found = run(*(t.requires_grad_() for t in dirty), douts)
        for got, want, its in zip(found, clean, (of_q, not of_q, of_q, not of_q), strict=True):
            got = got.clone()
            if its:
                assert got[1, token, 2].isnan().all()
                got[1, token, 2] = want[1, token, 2]
            assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_in_place_is_the_same(kind, backend, device):
    """The registered op's results, written over its inputs, which are parts of a packed tensor."""
    dqkv, qkv = (inputs("normal", 2, 85, 3, 5, 24, dtype=torch.float32, device=device, seed=s) for s in (1, 2))
    weights = [inputs("normal", 24, dtype=torch.float32, device=device, seed=s) for s in (3, 4)]
    sin, cos = (t[None, None] for t in table(82, 24, device=device))
    (dq, dk, dv), (q, k, _) = dqkv.unbind(2), qkv.unbind(2)
    before = dqkv.clone()
    arguments = dq, dk, q, k, *weights, sin, cos, EPS, kind == "rms", kind == "layer", False
    want = qk_norm_bwd(*arguments)
    assert torch.equal(dqkv, before)
    got = qk_norm_bwd(*arguments, dq, dk, backend=backend)
    assert got[0] is dq
    assert got[1] is dk
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(dv, before[:, :, 2])


def test_a_norm_may_serve_both(backend, device):
    """One weight for q and for k, and one tensor as both."""
    x, weight = (
        inputs("normal", *s, dtype=torch.float32, device=device).requires_grad_() for s in ((2, 9, 2, 16), (16,))
    )
    fused, eager = (
        lambda x, weight, module=module: module.qk_norm(x, x, ops.Norm(weight), ops.Norm(weight))
        for module in (ops, formulas)
    )
    assert_op_as_accurate(fused, eager, {"x": x, "weight": weight})


# ---- within layer_norm_attention ----

SHAPES = {
    "x": (2, 23, 32), "norm_weight": (32,), "norm_bias": (32,), "qkv_weight": (144, 32), "qkv_bias": (144,),
    "proj_weight": (32, 48), "proj_bias": (32,), "layer_scale": (32,), "row_scale": (2,),
}  # fmt: skip


def half(call, kind, positions=None, **options):
    """call, of layer_norm_attention's arguments, with norms of q and k."""

    def run(x, **rest):
        rotary = positions
        if rotary is not None:
            sin, cos = (t.to(torch.promote_types(t.dtype, x.dtype)) for t in rotary[:2])
            rotary = rotary._replace(sin=sin, cos=cos)
        of_norms = {name: rest.pop(name) for name in list(rest) if name[:2] in ("q_", "k_")}
        of_heads = {"num_heads": 2, "qk_norm": norms(kind, **of_norms), "rotary": rotary}
        return call(x=x, residual=x, **of_heads, **options, **rest)

    return run


def with_our_attention(**arguments):
    """The formula with ops.attention in it, but for float64. The gradients of the norms are sums over all tokens, in
    which rounding of q's and k's gradients shows that test_attention, element by element, allows flash attention: the
    row sums of its scores' gradients are not as near zero as eager's."""
    ours = arguments["x"].dtype is not torch.float64
    with pytest.MonkeyPatch.context() as patch:
        if ours:
            patch.setattr(formulas, "attention", lambda q, k, v, **_: ops.attention(q, k, v))
        return formulas.layer_norm_attention(**arguments)


@pytest.mark.parametrize(
    ("kind", "rotated", "dtype"),
    [
        ("layer", "halves", torch.float32),
        ("layer", "halves", torch.bfloat16),
        ("no bias", "", torch.float16),
        ("rms", "", torch.bfloat16),
        ("rms", "interleaved", torch.float32),
        ("rms", "interleaved", torch.float16),
    ],
    ids=str,
)
def test_layer_norm_attention(rotated, kind, dtype, backend, device):
    """k's bias with positions only: without them, its gradient is zero but for rounding."""
    tensors = tensors_of({**SHAPES, **parameters(24, kind)}, dtype, device)
    rotary = ops.Rotary(*table(2, 1, 18, 24, device=device), 5, rotated == "interleaved") if rotated else None
    fused, eager = (half(call, kind, rotary) for call in (ops.layer_norm_attention, with_our_attention))
    assert_op_as_accurate(fused, eager, tensors)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_with_other_options(kind, backend, device):
    """Three layers, a norm in front of the projection, and RMSNorm in front of all."""
    shapes = {name: shape for name, shape in SHAPES.items() if name not in ("norm_bias", "qkv_weight", "qkv_bias")}
    shapes |= {f"{n}_layer": (48, 32) for n in "abc"} | {"scale": (48,), **parameters(24, kind)}
    tensors = tensors_of(shapes, torch.float32, device)

    def run(function):
        def call(a_layer, b_layer, c_layer, scale, **rest):
            layers = {"qkv_weight": (a_layer, b_layer, c_layer), "qkv_bias": (None,) * 3, "norm_bias": None}
            return half(function, kind, rotary, norm="rms", scale_norm=ops.Norm(scale), **layers)(**rest)

        return call

    rotary = ops.Rotary(*table(23, 24, device=device))
    assert_op_as_accurate(run(ops.layer_norm_attention), run(with_our_attention), tensors)


def test_directly_and_through_the_dispatcher(backend, device):
    """In place in the packed gradient, and as ops: the same bits; and a retained graph gives them twice."""
    tensors = tensors_of({**SHAPES, **parameters(24, "layer")}, torch.float32, device)
    rotary = ops.Rotary(*table(22, 24, device=device), 1)
    wanted = [t for t in tensors.values() if t.requires_grad]

    def run():
        out = half(ops.layer_norm_attention, "layer", rotary)(**tensors)
        return out, *(torch.autograd.grad(out.sum(), wanted, retain_graph=retain) for retain in (True, False))

    direct, first, second = run()
    with FlopCounterMode(display=False) as counted:
        dispatched, third, _ = run()
    assert torch.equal(direct, dispatched)
    for several in zip(first, second, third, strict=True):
        assert all(torch.equal(several[0], one) for one in several[1:])
    with FlopCounterMode(display=False) as without:
        out = ops.layer_norm_attention(num_heads=2, residual=tensors["x"], **{n: tensors[n] for n in SHAPES})
        for retain in (True, False):
            out.sum().backward(retain_graph=retain)
    assert counted.get_total_flops() == without.get_total_flops() > 0
