"""ops.rotary and ops.rotary_qkvpacked: values, layouts, places."""

from itertools import cycle

import pytest
import torch
from op_cases import assert_layout_does_not_matter, tensors_of
from oracle import assert_op_as_accurate, inputs
from rotary_inputs import LAYOUTS, SPELLINGS, table, widened

from fastvit import ops
from fastvit.ops.rotary.op import rotary_op
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.call import UNKEPT
from fastvit.study.accuracy import formulas


@pytest.mark.parametrize(
    ("B", "N", "H", "d", "prefix", "interleaved", "dtype"),
    [
        (2, 41, 6, 64, 5, False, torch.bfloat16),
        (1, 50, 3, 32, 1, True, torch.float32),
        (1, 50, 3, 32, 1, False, torch.float16),
        (3, 33, 2, 72, 0, False, torch.float32),
        (3, 33, 2, 72, 0, True, torch.bfloat16),
        (2, 40, 1, 16, 40, True, torch.float16),
        (1, 18, 5, 128, 1, False, torch.float32),
        (2, 9, 2, 256, 3, True, torch.bfloat16),
    ],
    ids=str,
)
def test_accuracy(B, N, H, d, prefix, interleaved, dtype, backend, device):
    """float32 tables, whatever q and k are."""
    qkv = inputs("normal", B, N, 3, H, d, dtype=dtype, device=device).requires_grad_()
    rotary = ops.Rotary(*table(N - prefix, d, device=device), prefix, interleaved)
    fused, eager = (
        lambda qkv, module=module: module.rotary_qkvpacked(qkv, widened(rotary, qkv)) for module in (ops, formulas)
    )
    assert_op_as_accurate(fused, eager, {"qkv": qkv})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_rounded_once(dtype, backend, device):
    """Arithmetic is float32, as in the libraries: the result is nearly always the nearest number."""
    x = inputs("normal", 2, 50, 2, 32, dtype=dtype, device=device)
    sin, cos = table(50, 32, device=device)
    exact = formulas.rotary(x.double(), ops.Rotary(sin.double(), cos.double()))
    got = ops.rotary(x, ops.Rotary(sin, cos))
    assert (got != exact.to(dtype)).float().mean() < 0.002


@pytest.mark.parametrize(
    ("shape", "interleaved"), zip([(), (1,), (3,), (1, 3), (2, 1), (2, 3)], cycle([False, True])), ids=str
)
def test_tables_of_a_sample_or_a_head(shape, interleaved, backend, device):
    """And their gradients, which are sums over what shares them; in more than one block of tokens."""
    sin, cos = (t.requires_grad_() for t in table(*shape, 75, 24, device=device))
    qkv = inputs("normal", 2, 77, 3, 3, 24, dtype=torch.float32, device=device).requires_grad_()
    tensors = {"qkv": qkv, "sin": sin, "cos": cos}
    fused, eager = (
        lambda qkv, sin, cos, module=module: module.rotary_qkvpacked(qkv, ops.Rotary(sin, cos, 2, interleaved))
        for module in (ops, formulas)
    )
    assert_op_as_accurate(fused, eager, tensors)
    alone, eager_alone = (
        lambda qkv, sin, cos, module=module: module.rotary(qkv[:, :, 1], ops.Rotary(sin, cos, 2, interleaved))
        for module in (ops, formulas)
    )
    assert_op_as_accurate(alone, eager_alone, tensors)


@pytest.mark.parametrize("of_cos", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_tables_in_16_bits(of_cos, backend, device):
    """Both tables, or one with a float32 one, whose gradient keeps its dtype."""
    sin, cos = table(64, 32, device=device, dtype=torch.bfloat16)
    sin, cos = sin.requires_grad_(), cos.to(of_cos).requires_grad_()
    x = inputs("normal", 4, 64, 2, 32, dtype=of_cos, device=device)
    fused, eager = (
        lambda sin, cos, module=module: module.rotary(
            x.to(torch.promote_types(x.dtype, sin.dtype)), ops.Rotary(sin, cos)
        )
        for module in (ops, formulas)
    )
    assert_op_as_accurate(fused, eager, {"sin": sin, "cos": cos})


@SPELLINGS
def test_prefix_tokens_and_values_are_copied(interleaved, backend, device):
    """To the bit, whatever they are, and the rest does not see them; nor does a token see another."""
    qkv = inputs("normal", 2, 20, 3, 2, 16, dtype=torch.bfloat16, device=device)
    rotary = ops.Rotary(*table(17, 16, device=device), 3, interleaved)
    clean = ops.rotary_qkvpacked(qkv, rotary)
    assert torch.equal(clean[:, :, 2], qkv[:, :, 2])
    qkv[:, :3, 0], qkv[:, :3, 1], qkv[:, :, 2], qkv[1, 7, :2] = torch.inf, -torch.inf, torch.nan, torch.nan
    got = ops.rotary_qkvpacked(qkv, rotary)
    assert torch.equal(got[:, :3, :2], qkv[:, :3, :2])
    assert got[:, :, 2].isnan().all()
    assert got[1, 7].isnan().all()
    got[1, 7, :2] = clean[1, 7, :2]
    assert torch.equal(got[:, 3:, :2], clean[:, 3:, :2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, backend, device):
    """Layouts of q, of the tables and of the gradient."""
    table_shape = (2, 3, 11, 24)
    shapes = {"x": (2, 12, 3, 24), "fixed_sin": table_shape, "fixed_cos": table_shape}
    tensors = {name: LAYOUTS[layout](t) for name, t in tensors_of(shapes, torch.float32, device).items()}
    assert_layout_does_not_matter("rotary halves", tensors, LAYOUTS[layout], bitwise=True)


def test_in_place_is_the_same(backend, device):
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
