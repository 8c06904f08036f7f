"""ops.dropout and its registered op: mask statistics, reproducibility, gradients, fused end of a branch."""

import pytest
import torch
from oracle import assert_as_accurate, inputs

from fastvit import ops
from fastvit.ops.dropout.op import dropout_op


def seed_of(value, device):
    return torch.tensor([value], device=device)


def test_keeps_the_right_share_and_scales(backend, device):
    p = 0.3
    x = inputs("normal", 64, 4099, dtype=torch.float32, device=device).abs() + 0.1
    y = ops.dropout(x, p)
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / (1 - p))
    # binomial: five standard deviations over all, per row and per column
    for mask, n in ((kept.float().mean(), x.numel()), (kept.float().mean(1), 4099), (kept.float().mean(0), 64)):
        assert ((mask - (1 - p)).abs() < 5.5 * (p * (1 - p) / n) ** 0.5).all()


def test_nan_is_not_dropped(backend, device):
    """0 * NaN is NaN, in eager too."""
    x = torch.ones(4, 40, device=device)
    x[2] = torch.nan
    assert torch.equal(ops.dropout(x, 0.5).isnan(), x.isnan())


def test_elements_are_independent(backend, device):
    """No two of the four runs that share a Philox call, no two rows and no two seeds have the same mask."""
    ones = torch.ones(8, 1024, device=device)
    first, second = (dropout_op(ones, seed_of(s, device), 0.5) > 0 for s in (1, 2))
    groups = torch.cat([first.reshape(32, 256), second.reshape(32, 256)]).float() * 2 - 1
    correlation = groups @ groups.T / 256
    assert (correlation - torch.eye(64, device=device)).abs().max() < 0.4  # 6 standard deviations of 1 / 16


def test_gradient_has_the_same_mask(backend, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = inputs("normal", 3, 7, 50, dtype=dtype, device=device).requires_grad_()
        y = ops.dropout(x, 0.4)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        mask = (y != 0).to(dtype)
        assert 0 < mask.mean() < 1
        exact = mask.double() / 0.6
        assert_as_accurate(dx, mask / 0.6, exact, what="dx")
        assert_as_accurate(y, x * mask / 0.6, x.double() * exact, what="y")


def test_mask_depends_on_seed_and_shape_only(backend, device):
    seed = seed_of(5, device)
    wide = inputs("normal", 6, 40, dtype=torch.float32, device=device).abs() + 1
    masks = [dropout_op(x, seed, 0.5) != 0 for x in (wide, wide.bfloat16(), torch.cat([wide, wide], 1)[:, :40])]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_end_of_a_branch(residual_dtype, backend, device):
    """residual + row_scale * layer_scale * dropout(x) in one pass, against the mask drawn alone."""
    B, N, D = 3, 5, 50
    x = inputs("normal", B * N, D, dtype=torch.bfloat16, device=device)
    residual = inputs("normal", B * N, D, dtype=residual_dtype, device=device, seed=1)
    layer_scale = inputs("normal", D, dtype=torch.bfloat16, device=device, seed=2)
    row_scale = torch.tensor([0.0, 1.25, 2.0], device=device, dtype=torch.bfloat16)
    seed = seed_of(7, device)
    keep = dropout_op(torch.ones_like(x, dtype=torch.float32), seed, 0.5)
    got = dropout_op(x, seed, 0.5, layer_scale, row_scale, residual)

    def eager(dtype):
        per_row = row_scale.repeat_interleave(N)[:, None].to(dtype)
        return residual.to(torch.promote_types(dtype, residual_dtype)) + x.to(dtype) * keep.to(
            dtype
        ) * per_row * layer_scale.to(dtype)

    assert_as_accurate(got, eager(torch.bfloat16), eager(torch.float64), what="branch")


def test_follows_manual_seed(device):
    x = inputs("normal", 4, 40, dtype=torch.float32, device=device).requires_grad_()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append((ops.dropout(x, 0.5), ops.dropout(x, 0.5)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1])


def test_any_shape_and_off(backend, device):
    for shape in ((), (0, 3), (3, 0), (5,), (2, 3, 4, 5)):
        x = torch.ones(shape, device=device, requires_grad=True)
        y = ops.dropout(x, 0.5)
        assert y.shape == shape
        assert ((y == 0) | (y == 2)).all()
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, y)
        assert ops.dropout(x, 0.5, training=False) is ops.dropout(x, 0.0) is x
