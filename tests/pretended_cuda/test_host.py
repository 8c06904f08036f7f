"""`python -m benchmarks.host` on the pretended device: its rows have every provider."""

from benchmarks.host import __main__ as host


def test_it_measures_every_provider(monkeypatch, capsys, recwarn):
    tables = []
    monkeypatch.setattr(host, "make", lambda columns, rows, **_: tables.append([*rows]) or ["a table"])
    for name in ("_PASSES", "_ROUNDS", "_LAUNCHES"):
        monkeypatch.setattr(host, name, 1)
    assert host.main() == 0
    *_, machine, note = capsys.readouterr().out.splitlines()
    assert machine.startswith("NVIDIA H200 (pretended), ")
    assert "launches do nothing" in note
    assert not [w for w in recwarn if "as without fastvit.graphs" in str(w.message)]

    rows, launches = tables
    providers = {what: given for what, _, *given, _, _ in rows}
    for workload in (*host.OPS, host.BLOCK, host.MODEL):
        given = providers.pop(f"{workload.op} {workload}".removeprefix("model "))
        assert [cell != "-" for cell in given] == [name in workload.providers for name in host.PROVIDERS]
    assert [cell != "-" for cell in providers.pop("fastvit.graphs(ViT-B/16) B1")] == [False, False, True]
    assert not providers
    assert len(rows) == 2 * 7 + 1, "both passes of a block under autocast, too"
    kernels = {name for name, _, triton, ours in launches if float(triton) > 0 and float(ours) > 0}
    assert {"layer_norm_fwd_kernel", "linear_fwd_kernel", "attention_bwd_dq_kernel"} <= kernels
