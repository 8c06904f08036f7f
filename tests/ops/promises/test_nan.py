"""A NaN reaches what is computed from it, and nothing else; what is hidden or dropped changes nothing."""

import torch
from op_cases import FORMULAS, ROWS, function, made, on_both, outputs_of

from fastvit import ops
from fastvit.reference import ops as formulas

# the first tensor, and keys, which other queries see
PLACES = [(name, next(iter(ROWS[name].tensors))) for name in FORMULAS if "pixels" not in ROWS[name].tensors]
PLACES += [(name, key) for name in FORMULAS for key in ("k", "branch") if key in ROWS[name].tensors]
INTERPRETED = [("layer_norm", "x"), ("linear gelu", "x"), ("layer_norm_mlp gated", "x"), ("qk_norm", "qkv")]
INTERPRETED += [("rotary_qkvpacked interleaved", "qkv"), ("attention_qkvpacked", "qkv"), ("attention_varlen", "k")]
INTERPRETED += [("attention_windows relative", "qkv"), ("patch_embed", "image")]


@on_both("place", PLACES, INTERPRETED)
def test_nan_stays_in_its_place(place, backend, device):
    """One element, a third into every dimension that has a name: where the formula has NaN, and nowhere else."""
    name, key = place
    tensors = {key: t.detach() for key, t in made(name, 2, 18, device).items()}
    given = tensors[key].clone()
    shape = zip(ROWS[name].tensors[key], given.shape, strict=True)
    given[tuple(size // 3 if isinstance(dimension, str) else 0 for dimension, size in shape)] = torch.nan
    clean = [t.clone() for t in outputs_of(function(name)(**tensors))]
    dirty, exact = (outputs_of(function(name, module)(**tensors | {key: given})) for module in (ops, formulas))
    assert any(t.isnan().any() for t in exact)
    for before, got, formula in zip(clean, dirty, exact, strict=True):
        reached = formula.isnan()
        assert got[reached].isnan().all()
        assert torch.equal(got[~reached], before[~reached])
