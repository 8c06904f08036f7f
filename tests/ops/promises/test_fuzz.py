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
from op_cases import on_both

from fastvit.ops.runtime import backend as backends

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
INTERPRETED = ["layer_norm", "add_layer_norm", "linear", "layer_norm_mlp gated", "attention keys"]
INTERPRETED += ["attention_varlen cross", "rotary_qkvpacked", "qk_norm packed", "patch_embed video"]


@on_both("name", FUZZED, INTERPRETED)
def test_fuzz(name, backend, device):
    few = backend == "triton" and backends.INTERPRET

    @examples(3 if few else 40)
    @given(st.data())
    def check(data):
        data.draw(fuzz_cases(name, few)).check(device)

    check()
