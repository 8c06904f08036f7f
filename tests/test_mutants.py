"""The list of faults keeps pace with the code: each still applies, and the test that catches it exists."""

import re
from pathlib import Path

import pytest
from mutants import FAULTS, Fault, misfit


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_still_applies(fault: Fault) -> None:
    assert not misfit(fault)
    file, _, function = fault.test.partition(" -k ")[0].partition("::")
    text = Path(__file__).with_name(f"test_{file}.py").read_text()
    assert re.search(rf"^def {function}\(", text, re.MULTILINE)
