"""The host's time: for small ops, and its table."""

import json

from benchmarks.host import __main__ as host
from benchmarks.host import calls


def test_small_ops_are_measured_and_shown(tmp_path):
    microseconds = calls.small_ops(1, 1, ops=("layer_norm", "attention_varlen"))
    assert {name.split(" ")[0] for name in microseconds} == {"layer_norm", "attention_varlen"}
    assert all(us > 0 for row in microseconds.values() for us in row.values())
    path = tmp_path / "host.json"
    where = {"device": "x", "torch": "y", "triton": "z"}
    step = {"us": 80.0, "kernels": 5, "vendor": 2, "stand_in": 3.7}
    launches = {"layer_norm_fwd_kernel": {"arguments": 20, "triton": 10.0, "direct": 2.5}}
    parts = {"launches": launches, "block": {"forward": step}, "ops": microseconds}
    path.write_text(json.dumps({"environment": where, "commit": "0" * 40, **parts}))
    lines = host.render(path)
    assert [line.split() for line in lines if line.startswith("forward")] == [["forward", "80", "5", "2", "3.7"]]
    assert next(line for line in lines if line.startswith("layer_norm B1")).split()[-2] == "-", "no SDPA"
