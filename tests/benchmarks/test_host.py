"""The host's time: for small ops."""

from benchmarks import host


def test_small_ops_are_measured():
    rows = list(host.small_ops(1, ops=("layer_norm", "attention_varlen")))
    assert {name.split(" ")[0] for name, *_ in rows} == {"layer_norm", "attention_varlen"}
    assert all(float(fused) > 0 for *_, fused in rows)
    assert next(row for row in rows if row[0].startswith("layer_norm B1"))[2] == "-", "no SDPA"
