"""How kernels are called, at every batch size, held against Triton's own launches without a GPU. The checks run in a
process of their own (helpers/stub_launches.py, stub_random_calls.py), because this one may be Triton's interpreter."""

import json

import pytest
import torch
from compiling import needs_triton, python

from fastvit.ops.runtime.rows import as_rows


@needs_triton
def test_launches() -> None:
    problems = json.loads(python("tests/helpers/stub_launches.py").splitlines()[-1])
    assert problems.pop("checks") > 8
    assert not problems, "\n".join(problems.values())


@needs_triton
@pytest.mark.parametrize("calls", [200, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_random_calls_launch_what_first_calls_do(calls: int) -> None:
    """Nothing that is kept of a call is stale: with parameters exchanged, gradients wanted or not, other dtypes,
    strides, alignments and subclasses, and with other modes, settings, environment variables and threads between."""
    counts = json.loads(python("tests/helpers/stub_random_calls.py", str(calls)).splitlines()[-1])
    assert "problem" not in counts, counts["problem"]
    assert counts["calls"] == calls
    assert counts["launches"] > calls
    assert counts["replayed"] > calls / 50


def test_an_expanded_row_is_laid_out_alike_at_every_batch_size() -> None:
    assert {as_rows(torch.ones(B, 1, 8).expand(B, 5, 8)).stride() for B in (1, 2, 3)} == {(8, 1)}
