"""Nothing that is remembered of a call is stale: random calls launch what they launch when nothing is remembered."""

import json

import pytest
from compiling import needs_triton, python


@needs_triton
@pytest.mark.parametrize("calls", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_random_calls_launch_what_first_calls_do(calls: int) -> None:
    """With parameters exchanged, gradients wanted or not, other dtypes, strides, alignments and subclasses, and with
    other modes, settings, environment variables and threads between them (helpers/stub_random_calls.py)."""
    counts = json.loads(python("tests/helpers/stub_random_calls.py", str(calls)).splitlines()[-1])
    assert "problem" not in counts, counts["problem"]
    assert counts["calls"] == calls
    assert counts["launches"] > calls
    assert counts["remembered"] > calls / 8
