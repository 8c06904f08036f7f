"""ops.rotary and ops.qk_norm: what is rounded once, copied, and read as one table."""

import pytest
import torch
from op_cases import tensors_of
from oracle import assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.reference import ops as formulas

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
        sin, cos = launch.readable_tables(sin, cos)
        assert sin.stride() == cos.stride()
        return launch.tables_as_read(sin)

    assert read(one.expand(2, 3, 5, 16), one.expand(2, 3, 5, 16)) == (1, 1, (0, 16, 0))
    assert read(one.expand(2, 3, 5, 16), each) == (2, 3, (240, 16, 80))
