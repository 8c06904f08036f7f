"""The meters of studies and benchmarks: memory, exponents, errors."""

import pytest
import torch
from torch import nn
from torch.profiler import profile

from fastvit.ops.runtime.backend import Path, choose_path
from fastvit.study.accuracy import rule
from fastvit.study.accuracy.rule import error_ratio
from fastvit.study.memory.peak import peak_bytes, running_peak, saved_bytes

CPU = torch.device("cpu")
MB = 1 << 20


def test_peak_of_a_known_temporary():
    assert running_peak([10, -10, 7, 5, -12, 11]) == 12
    assert running_peak([-100, 30]) == 0  # releases of what was allocated before
    x = torch.zeros(1 << 20)  # 4 MB, allocated before: does not count

    def work() -> torch.Tensor:
        temporary = torch.empty(16 << 20)  # 64 MB
        del temporary
        return x + 1  # 4 MB, when the 64 are gone

    work()
    assert 64 * MB <= peak_bytes(work, CPU) < 64.1 * MB


def test_peak_is_of_the_path_that_runs_without_a_profiler():
    """Under the dispatcher, rotary positions are not applied in place, which takes more memory."""
    paths: list[str] = []
    peak_bytes(lambda: paths.append(choose_path(torch.ones(1))), CPU)
    with profile():
        paths.append(choose_path(torch.ones(1)))
    assert paths[0] == choose_path(torch.ones(1)) != paths[1] == Path.DISPATCHER


def test_saved_bytes_counts_a_storage_once_and_no_parameter():
    x = torch.randn(128, 64, requires_grad=True)
    linear = nn.Linear(64, 64)

    def forward() -> torch.Tensor:
        h = linear(x)  # saves x and the weight
        return h.exp() + x.view(64, 128).square().sum()  # saves exp's output, and x again as a view

    parameters = tuple(linear.parameters())
    assert saved_bytes(forward, parameters) == 2 * x.nbytes
    assert saved_bytes(forward, ()) == 2 * x.nbytes + linear.weight.nbytes


def test_error_ratio_is_the_rule():
    exact = torch.full((4,), 1.0, dtype=torch.float64)
    ulp = 2.0**-23
    near, far = (torch.tensor([1.0 + k * ulp] * 4) for k in (1, 3))
    assert error_ratio(near, near, exact, 2.0) == pytest.approx(1 / 1.5)
    assert error_ratio(far, near, exact, 2.0) == pytest.approx(2.0)  # 3 ulp = 2 * 1 + 1: just allowed
    assert error_ratio(torch.full((4,), torch.nan), near, exact, 2.0) == float("inf")
    with pytest.raises(ValueError, match="float16"):
        error_ratio(near.half(), near, exact, 2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_ulp_is_the_spacing_of_the_dtype(dtype):
    limits = torch.finfo(dtype)
    x = torch.randn(1000, dtype=torch.float64) * 10.0 ** torch.linspace(-9, 3, 1000).double()
    x = torch.cat([x, torch.tensor([0.0, 1.0, 2.0, -1.0, limits.tiny, limits.tiny / 4], dtype=torch.float64)])
    near = x.to(dtype).abs()
    spacing = (torch.nextafter(near, torch.full_like(near, torch.inf)) - near).double()
    assert torch.equal(rule.ulp(x, dtype), spacing)
