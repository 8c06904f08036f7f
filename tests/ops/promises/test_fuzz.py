"""Every op with random sizes, dtypes, layouts, left-out arguments and wanted gradients, on both backends.

    FASTVIT_FUZZ=2000 pytest tests/ops/promises/test_fuzz.py -k mlp

tries that many other cases of each row instead of the few fixed ones. A case that fails is made small and printed; it
becomes a row of value_cases.py.
"""

import pytest

pytest.importorskip("hypothesis")  # a machine with a GPU may lack it
from fuzzing import examples, fuzz_cases
from hypothesis import given
from hypothesis import strategies as st

FUZZED = [
    "layer_norm",
    "add_layer_norm",
    "linear",
    "layer_norm_linear",
    "mlp gelu",
    "mlp swiglu",
    "layer_norm_mlp inner",
    "layer_norm_mlp gated",
    "layer_norm_attention rotary",
    "attention keys",
    "attention_qkvpacked",
    "attention relative",
    "attention_varlen",
    "attention_varlen cross",
    "attention_windows",
    "attention_windows relative",
    "rotary_qkvpacked",
    "qk_norm packed",
    "patch_embed",
    "patch_embed video",
]
every_row = pytest.mark.parametrize("name", FUZZED)


def fuzzed(count):
    """Return a test of a row with so many cases."""

    @examples(count)
    @given(st.data())
    def check(name, device, data):
        data.draw(fuzz_cases(name)).check(device)

    return check


@every_row
def test_fuzz(name, device):
    fuzzed(40)(name, device)


@every_row
def test_fuzz_of_kernels(name, triton_backend, device):
    fuzzed(4)(name, device)
