"""Under autocast every op has eager's dtypes, and about its accuracy."""

import pytest
import torch
from op_cases import FORMULAS, ROWS, function, made, not_interpreted, outputs_of, wanted
from oracle import GRADIENT, assert_as_accurate, inputs

from fastvit import ops
from fastvit.reference import ops as formulas


@not_interpreted
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_autocast_follows_eager(name, x_dtype, backend, device):
    """In the dtypes of outputs and gradients, and about as accurate; also where the first tensor is in bfloat16."""
    tensors = made(name, 2, 6, device)
    (key, x), *_ = tensors.items()
    if x.is_floating_point():
        tensors[key] = x.detach().to(x_dtype).requires_grad_()
    double = {n: t.detach().double() if t.is_floating_point() else t for n, t in tensors.items()}
    for leaf in wanted(tensors):
        double[leaf].requires_grad_()
    runs = []
    for module, given, autocast in ((ops, tensors, True), (formulas, tensors, True), (formulas, double, False)):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            outputs = outputs_of(function(name, module)(**given))
        loss = sum(o.double().square().sum() for o in outputs)
        runs.append((outputs, torch.autograd.grad(loss, list(wanted(given).values()))))
    outputs, gradients = (list(zip(*kind, strict=True)) for kind in zip(*runs, strict=True))
    for triple in outputs:
        assert_as_accurate(*triple, what="autocast")
    squares = []  # of relative errors, fused and eager: one gradient has too few elements for the rule
    for leaf, (*computed, exact) in zip(wanted(tensors), gradients, strict=True):
        assert all(g.dtype == tensors[leaf].dtype for g in computed), leaf
        squares.append([((g.double() - exact).norm() / exact.norm()).square() for g in computed])
    fused, eager = (sum(column).sqrt() for column in zip(*squares, strict=True))
    assert fused <= GRADIENT * eager


@pytest.mark.parametrize("name", ROWS)
def test_autocast_around_the_backward_pass(name, device):
    """It changes nothing: the gradients are those of the dtypes that the forward pass has chosen, within autocast or
    not."""
    tensors = made(name, 2, 4, device)
    for forward in (False, True):
        runs = []
        for backward in (False, True):
            torch.manual_seed(4)
            with torch.autocast(device.type, torch.bfloat16, enabled=forward):
                outputs = outputs_of(function(name)(**tensors))
            douts = [inputs("normal", *o.shape, dtype=o.dtype, device=device, seed=50) for o in outputs]
            with torch.autocast(device.type, torch.bfloat16, enabled=backward):
                runs.append(torch.autograd.grad(outputs, list(wanted(tensors).values()), douts))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), forward


@pytest.mark.parametrize("option", ["pos_embed", "prefix"])
def test_a_wider_position_or_prefix_makes_a_wider_result(option, device):
    """Added in float32 to patches in bfloat16, as in eager."""
    tensors = {key: t.detach() for key, t in made("patch_embed", 2, 6, device).items()}
    with torch.autocast(device.type, torch.bfloat16):
        plain = {"bias": None, **{key: tensors[key] for key in ("image", "weight")}}
        assert ops.patch_embed(**plain).dtype is torch.bfloat16
        for dtype in (torch.float32, torch.bfloat16):
            given = plain | {option: tensors[option].to(dtype)}
            assert ops.patch_embed(**given).dtype is formulas.patch_embed(**given).dtype is dtype


def test_a_wider_layer_scale_is_not_rounded_to_the_matmul_s_dtype(device):
    """On ATen, where the matmul's own result is rounded: exact products of 8 and 24 bits."""
    tensors = {key: t.detach() for key, t in made("linear residual", 3, 17, device).items()}
    tensors["row_scale"] = tensors["row_scale"] * 1.1
    scales = {key: tensors[key] for key in ("layer_scale", "row_scale", "residual")}
    with torch.autocast(device.type, torch.bfloat16), ops.use_backend("aten"):
        got = ops.linear(**tensors)
        branch = ops.linear(**{key: t for key, t in tensors.items() if key not in scales})
    assert branch.dtype is torch.bfloat16
    layer_scale, row_scale, residual = (t.double() for t in scales.values())
    want = residual + row_scale[:, None, None] * layer_scale * branch.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
