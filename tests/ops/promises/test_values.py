"""Outputs and gradients are as accurate as eager's, element by element, and what is exact in eager is exact."""

import pytest
from oracle import assert_op_as_accurate
from value_cases import CASES

from fastvit import ops
from fastvit.reference import ops as formulas


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_accurate_as_eager(case, backend, device):
    """By the oracle's rule: every output and every gradient against float64, next to eager's error."""
    assert_op_as_accurate(case.function(ops), case.function(formulas), case.draw(device), what=str(case))
