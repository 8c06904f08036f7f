"""A NaN reaches what is computed from it, and nothing else; what is hidden or dropped changes nothing."""

import pytest
import torch
from op_cases import FORMULAS, ROWS, function, made, outputs_and_gradients, outputs_of, wanted
from oracle import inputs

from fastvit import ops
from fastvit.reference import ops as formulas

# the first tensor, and keys, which other queries see
PLACES = [(name, next(iter(ROWS[name].tensors))) for name in FORMULAS if "pixels" not in ROWS[name].tensors]
PLACES += [(name, key) for name in FORMULAS for key in ("k", "branch") if key in ROWS[name].tensors]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_nan_stays_in_its_place(place, backend, device):
    """One element, a third into every dimension that has a name: where the formula has NaN, and nowhere else. Gradients
    have NaN at least where the formula's have; but those of causal attention, see below."""
    name, key = place
    tensors = made(name, 2, 18, device, H=1 if "windows" in name else 2)
    given = tensors[key].detach().clone()
    shape = zip(ROWS[name].tensors[key], given.shape, strict=True)
    given[tuple(size // 3 if isinstance(dimension, str) else 0 for dimension, size in shape)] = torch.nan
    poisoned = tensors | {key: given.requires_grad_()}
    clean = outputs_of(function(name)(**{key: t.detach() for key, t in tensors.items()}))
    (dirty, gradients), (exact, exact_gradients) = (
        outputs_and_gradients(function(name, module), poisoned) for module in (ops, formulas)
    )
    assert any(t.isnan().any() for t in exact)
    assert_nan_where(exact, dirty, clean)
    for of, formula in exact_gradients.items():
        assert name == "attention causal" or gradients[of][formula.isnan()].isnan().all(), of


def assert_nan_where(exact, dirty, clean):
    for formula, got, before in zip(exact, dirty, clean, strict=True):
        reached = formula.isnan()
        assert got[reached].isnan().all()
        assert torch.equal(got[~reached], before[~reached])


# 0 * NaN of a hidden pair is NaN in some formulas of PyTorch for causal attention, and 0 in others
@pytest.mark.parametrize("name", [name for name in FORMULAS if "causal" not in name])
def test_nan_of_a_gradient_stays_in_its_place(name, backend, device):
    """One element of the gradient of the first result, in the same way."""
    many = "windows" in name  # programs
    tensors = made(name, 1 if many else 2, 6, device, H=1 if many else 2)
    leaves = [*wanted(tensors).values()]

    def gradients(module, poison):
        outputs = outputs_of(function(name, module)(**tensors))
        douts = [inputs("normal", *o.shape, dtype=o.dtype, device=device, seed=50) for o in outputs]
        if poison:
            douts[0][tuple(size // 3 for size in douts[0].shape)] = torch.nan
        return torch.autograd.grad(outputs, leaves, douts)

    assert_nan_where(gradients(formulas, True), gradients(ops, True), gradients(ops, False))
