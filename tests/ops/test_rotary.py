"""ops.rotary and ops.qk_norm: what is rounded once, written in place, copied, and read as one table."""

import pytest
import torch
from op_cases import tensors_of
from oracle import assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.ops.qk_norm.op import qk_norm_bwd
from fastvit.ops.rotary.op import rotary_op
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.call import UNKEPT
from fastvit.study.accuracy import formulas

EPS = 1e-5


def table(*shape, device):
    """Return (sin, cos) of angles that all differ, so that an entry from the wrong place shows."""
    angles = inputs("normal", *shape, dtype=torch.float64, device=device, seed=30) * 3
    return angles.sin().float(), angles.cos().float()


def test_16_bits_are_rounded_once(backend, device):
    """Arithmetic is float32, as in the libraries, and nothing is rounded between the norm and the rotation: the result
    is nearly always the nearest number."""
    dtype = torch.bfloat16
    qkv = inputs("normal", 2, 50, 3, 2, 32, dtype=dtype, device=device)
    sin, cos = table(50, 32, device=device)
    parameters = [inputs("normal", 32, dtype=dtype, device=device, seed=s) for s in range(4)]

    def run(module, qkv, sin, cos, parameters):
        q_norm, k_norm = (ops.Norm(*parameters[i : i + 2], EPS) for i in (0, 2))
        rotary = ops.Rotary(sin, cos)
        return module.rotary(qkv[:, :, 0], rotary), *module.qk_norm(*qkv.unbind(2)[:2], q_norm, k_norm, rotary)

    exact = run(formulas, qkv.double(), sin.double(), cos.double(), [t.double() for t in parameters])
    for got, want in zip(run(ops, qkv, sin, cos, parameters), exact, strict=True):
        assert (got != want.to(dtype)).float().mean() < 0.002


def test_prefix_tokens_and_values_are_copied(backend, device):
    """To the bit, whatever they are, and the rest does not see them."""
    qkv = inputs("normal", 2, 20, 3, 2, 16, dtype=torch.bfloat16, device=device)
    rotary = ops.Rotary(*table(17, 16, device=device), 3)
    clean = ops.rotary_qkvpacked(qkv, rotary)
    assert torch.equal(clean[:, :, 2], qkv[:, :, 2])
    qkv[:, :3, 0], qkv[:, :3, 1], qkv[:, :, 2] = torch.inf, -torch.inf, torch.nan
    got = ops.rotary_qkvpacked(qkv, rotary)
    assert torch.equal(got[:, :3, :2], qkv[:, :3, :2])
    assert got[:, :, 2].isnan().all()
    assert torch.equal(got[:, 3:, :2], clean[:, 3:, :2])


def test_rotation_in_place(backend, device):
    """The registered op's result, written over x; without that option x stays unchanged."""
    x = inputs("normal", 2, 85, 9, 24, dtype=torch.float32, device=device)  # several blocks of tokens
    sin, cos = (t[None, None] for t in table(82, 24, device=device))
    for transposed in (False, True):
        before = x.clone()
        want = rotary_op(x, sin, cos, 6, False, transposed)
        assert torch.equal(x, before)
        same = before.clone()
        got = rotary_op(same, sin, cos, 6, False, transposed, call=UNKEPT[Path(backend)], out=same)
        assert got is same
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradients_of_norms_in_place(kind, backend, device):
    """The registered op's results, written over its inputs, which are parts of a packed tensor."""
    dqkv, qkv = (inputs("normal", 2, 35, 3, 5, 24, dtype=torch.float32, device=device, seed=s) for s in (1, 2))
    weights = [inputs("normal", 24, dtype=torch.float32, device=device, seed=s) for s in (3, 4)]
    sin, cos = (t[None, None] for t in table(32, 24, device=device))
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


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_eps(kind, backend, device):
    """Heads as small as its root, where it counts, rotated and not; and an eps of 0."""
    for eps, heads in ((0.02, 2), (0.02, 3), (0.0, 3)):
        tensors = tensors_of(
            {"qkv": (1, 17, 3, heads, 16), "q_weight": (16,), "k_weight": (16,)}, torch.float32, device
        )
        tensors["qkv"] = (tensors["qkv"].detach() * 0.1).requires_grad_()

        def run(module, qkv, q_weight, k_weight, eps=eps, heads=heads):
            norms = (ops.Norm(weight, None, eps, kind) for weight in (q_weight, k_weight))
            rotary = ops.Rotary(*(t.to(qkv.dtype) for t in table(17, 16, device=device))) if heads == 2 else None
            return module.qk_norm(*qkv.unbind(2)[:2], *norms, rotary)

        assert_op_as_accurate(lambda **t: run(ops, **t), lambda **t: run(formulas, **t), tensors)


def test_an_expanded_table_is_one():
    """Which a program loads once for all; what differs along a dimension stays as it is."""
    launch = pytest.importorskip("fastvit.ops.rotary.launch")
    one, each = torch.randn(1, 1, 5, 16), torch.randn(2, 3, 5, 16)

    def read(sin, cos):
        sin, cos = launch.readable_tables(sin, cos, UNKEPT[Path.TRITON])
        assert sin.stride() == cos.stride()
        return launch.tables_as_read(sin)

    assert read(one.expand(2, 3, 5, 16), one.expand(2, 3, 5, 16)) == (1, 1, (0, 16, 0))
    assert read(one.expand(2, 3, 5, 16), each) == (2, 3, (240, 16, 80))
