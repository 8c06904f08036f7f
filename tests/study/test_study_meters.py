"""The meters of studies and benchmarks: memory, exponents, errors."""

import math
import weakref

import pytest
import torch
from torch import nn

from fastvit.study.accuracy import rule
from fastvit.study.accuracy.rule import Compared, pooled_ratios
from fastvit.study.memory.peak import saved_bytes


def test_saved_bytes_counts_a_storage_once_and_no_parameter():
    x = torch.randn(128, 64, requires_grad=True)
    linear = nn.Linear(64, 64)

    def forward() -> torch.Tensor:
        h = linear(x)  # saves x and the weight
        result = h.exp()
        results.append(weakref.ref(result))
        return result + x.view(64, 128).square().sum()  # saves exp's output, and x again as a view

    results = []
    parameters = tuple(linear.parameters())
    assert saved_bytes(forward, parameters) == 2 * x.nbytes
    assert saved_bytes(forward, ()) == 2 * x.nbytes + linear.weight.nbytes
    assert [result() for result in results] == [None, None], "autograd's graph is gone"


def ratio(got, eager, exact):
    one = Compared("output", torch.tensor(got), torch.tensor(eager), torch.tensor(exact, dtype=torch.float64))
    return pooled_ratios(lambda draw: [one])["output"]


def test_the_rule():
    """Against eager's error and an ulp, on the maximum and the RMS, of several draws as of one tensor."""
    ulp, inf = 2.0**-23, math.inf
    near, far = ([1 + k * ulp] * 4 for k in (1, 3))
    assert ratio(near, near, [1.0] * 4) == pytest.approx(1 / 1.5)
    assert ratio(far, near, [1.0] * 4) == pytest.approx(2.0)  # 3 ulp = 2 * 1 + 1: just allowed
    assert ratio([1 + 1e-3] * 1000, [1 + 1e-3] + [1.0] * 999, [1.0] * 1000) > 10  # the maximum is the same
    assert ratio([1 + 1e-3] + [1.0] * 999, [1 + 5e-4] * 1000, [1.0] * 1000) == pytest.approx(2, rel=1e-2)
    assert ratio([math.nan] * 4, near, [1.0] * 4) == ratio([1.0, 1.0], [1.0, inf], [1.0, inf]) == inf
    assert ratio([1.0, inf], [1.0, inf], [1.0, inf]) == 0
    # where eager overflows, its error would allow everything
    assert ratio([1.0, 1.0], [inf, 1.0], [1.0, 1.0]) == 0 < 2 < ratio([1.0, 1.5], [inf, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="float16"):
        rule.errors(torch.ones(1).half(), torch.ones(1), torch.ones(1).double())
    exact = torch.randn(4, 100, dtype=torch.float64)
    got, eager = (exact + torch.randn_like(exact) * 1e-3).float(), (exact + torch.randn_like(exact) * 1e-3).float()
    each = [rule.errors(*triple) for triple in zip(got, eager, exact, strict=True)]
    for whole, parts in zip(rule.errors(got, eager, exact), zip(*each, strict=True), strict=True):
        assert rule.Error.pooled(parts)[0] == whole[0]
        assert rule.Error.pooled(parts)[1:] == pytest.approx(whole[1:], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_ulp_is_the_spacing_of_the_dtype(dtype):
    limits = torch.finfo(dtype)
    x = torch.randn(1000, dtype=torch.float64) * 10.0 ** torch.linspace(-9, 3, 1000).double()
    x = torch.cat([x, torch.tensor([0.0, 1.0, 2.0, -1.0, limits.tiny, limits.tiny / 4], dtype=torch.float64)])
    near = x.to(dtype).abs()
    spacing = (torch.nextafter(near, torch.full_like(near, torch.inf)) - near).double()
    assert torch.equal(rule.ulp(x, dtype), spacing)
