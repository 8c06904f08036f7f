"""ops.qk_norm: values, gradients, places."""

import pytest
import torch
from op_cases import tensors_of
from oracle import assert_op_as_accurate, inputs
from rotary_inputs import EPS, LAYOUTS, SPELLINGS, norm_shapes, norms, table, widened

from fastvit import ops
from fastvit.ops.qk_norm.op import qk_norm_bwd
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.call import UNKEPT
from fastvit.study.accuracy import formulas


def normalise(module, kind, rotary=None, eps=EPS):
    """Return module.qk_norm of the q and k of a packed qkv."""

    def call(qkv, **of_norms):
        return module.qk_norm(*qkv.unbind(2)[:2], *norms(kind, **of_norms, eps=eps), widened(rotary, qkv))

    return call


def check(shape, kind, dtype, device, rotary=None):
    B, N, H, d = shape
    tensors = tensors_of({"qkv": (B, N, 3, H, d), **norm_shapes(d, kind)}, dtype, device)
    assert_op_as_accurate(normalise(ops, kind, rotary), normalise(formulas, kind, rotary), tensors)


@pytest.mark.parametrize(
    ("shape", "prefix", "interleaved", "kind", "dtype"),
    [
        ((1, 19, 5, 64), 3, False, "layer", torch.float32),  # shares of steps that are not full
        ((1, 19, 5, 64), 3, False, "layer", torch.bfloat16),
        ((2, 9, 2, 72), 0, True, "rms", torch.float32),  # a padded head
        ((2, 9, 2, 72), 0, True, "rms", torch.float16),
        ((1, 9, 3, 256), 3, True, "layer", torch.float16),
        ((1, 40, 1, 16), 40, False, "no bias", torch.bfloat16),  # nothing but prefix
        ((2, 21, 2, 24), 1, False, "rms", torch.bfloat16),
    ],
    ids=str,
)
def test_accuracy(shape, prefix, interleaved, kind, dtype, backend, device):
    """float32 tables, whatever q and k are."""
    _, N, _, d = shape
    check(shape, kind, dtype, device, ops.Rotary(*table(N - prefix, d, device=device), prefix, interleaved))


# Programs that sum over several steps, some over fewer than others, and some over those of two blocks of tokens;
# halves of a head that are and that are not a multiple of 8 elements
@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [((B, N, 1, 16), kind, torch.float32) for B, N in ((13, 3), (5, 130)) for kind in ("layer", "rms")]
    + [
        ((1, 17, 3, d), kind, dtype)
        for d in (24, 32)
        for kind, dtype in (("layer", torch.bfloat16), ("no bias", torch.float32), ("rms", torch.float16))
    ],
    ids=str,
)
def test_without_positions(shape, kind, dtype, backend, device):
    check(shape, kind, dtype, device)


@pytest.mark.parametrize("kind_of_input", ["integer", "large", "offset"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_inputs(kind_of_input, kind, backend, device):
    """A mean of 1000 exposes a one-pass variance, and lanes beyond the head that enter it (d = 72)."""
    tensors = tensors_of({"qkv": (2, 19, 3, 2, 72), **norm_shapes(72, kind)}, torch.float32, device, kind_of_input)
    for name in tensors.keys() - {"qkv"}:
        tensors[name] = inputs("normal", 72, dtype=torch.float32, device=device, seed=5).requires_grad_()
    rotary = ops.Rotary(*table(18, 72, device=device), 1)
    assert_op_as_accurate(normalise(ops, kind, rotary), normalise(formulas, kind, rotary), tensors, what=kind_of_input)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_rounded_once(dtype, backend, device):
    """Not between the norm and the rotation: nearly always to the nearest number."""
    qkv = inputs("normal", 2, 50, 3, 2, 32, dtype=dtype, device=device)
    of_norms = {
        n: inputs("normal", 32, dtype=dtype, device=device, seed=s) for s, n in enumerate(norm_shapes(32, "layer"))
    }
    sin, cos = table(50, 32, device=device)
    double = {name: t.double() for name, t in of_norms.items()}
    exact = normalise(formulas, "layer", ops.Rotary(sin.double(), cos.double()))(qkv.double(), **double)
    for got, want in zip(normalise(ops, "layer", ops.Rotary(sin, cos))(qkv, **of_norms), exact, strict=True):
        assert (got != want.to(dtype)).float().mean() < 0.002


@pytest.mark.parametrize(("shape", "interleaved"), [((3,), False), ((2, 1), True), ((2, 3), True)], ids=str)
def test_tables_of_a_sample_or_a_head(shape, interleaved, backend, device):
    """In more than one block of tokens."""
    rotary = ops.Rotary(*table(*shape, 75, 24, device=device), 2, interleaved)
    check((2, 77, 3, 24), "layer", torch.float32, device, rotary)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_eps(kind, backend, device):
    """Heads as small as its root, where it counts, in numbers of heads that fill shares and that do not; and none."""
    for eps, heads in ((0.02, 4), (0.0, 5)):
        tensors = tensors_of({"qkv": (2, 17, 3, heads, 16), **norm_shapes(16, kind)}, torch.float32, device)
        tensors["qkv"] = (tensors["qkv"].detach() * 0.1).requires_grad_()
        assert_op_as_accurate(normalise(ops, kind, eps=eps), normalise(formulas, kind, eps=eps), tensors)


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
    got = qk_norm_bwd(*arguments, call=UNKEPT[Path(backend)], out=(dq, dk))
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
