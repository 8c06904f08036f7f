"""The rows that the first minutes on a GPU time, their table, and the verdict."""

import time
import types
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import headline, summary, verdict
from benchmarks.gpu.journal import BEGUN, Journal, Record
from benchmarks.harness.workloads import workloads
from fastvit import ops
from fastvit.kernels import _configs, _tuned
from fastvit.tuning.clock import Clock

CPU = torch.device("cpu")
ROW = "attention B1 N50 H3 d64 forward"


def record(kind: str, name: str, status: str = "passed", **found: Any) -> Record:
    return {"kind": kind, "name": name, "status": status, **found}


def time_of(seconds: float) -> dict[str, float]:
    return {"median": seconds}


def test_a_row_of_wrong_results_says_so(tmp_path, monkeypatch):
    (workload,) = workloads("quick", ops=("layer_norm",))
    journal = Journal(tmp_path, "a GPU", code="code")

    def row() -> Record:
        headline.measure(journal, Clock(CPU), workload, "inference", "a row", 0.01)
        return journal.records()[0]

    assert row()["status"] == "passed"
    monkeypatch.setattr(ops, "layer_norm", lambda x, *_, **__: torch.zeros_like(x))
    assert row()["status"] == "failed"
    assert "differs from eager by 1 of the largest result" in row()["reason"]
    monkeypatch.setattr(ops, "layer_norm", lambda x, *_, **__: 1 // 0)
    assert row()["status"] == "failed"
    assert "ZeroDivisionError" in row()["reason"]


def test_a_row_is_begun_once_in_a_call(tmp_path):
    """A row that ends its process is left out by the next process, and begun again in a later call."""
    journal = Journal(tmp_path, "a GPU", code="code")
    (_, _, first_row), (_, _, second_row) = headline.left(journal, True, "first", 0.0)
    since = time.time()
    journal.add("row", first_row, BEGUN)
    assert [name for *_, name in headline.left(journal, True, "first", since)] == [second_row]
    journal.add("row", second_row, "passed")
    assert headline.left(journal, True, "first", since) == []
    assert [name for *_, name in headline.left(journal, True, "first", time.time())] == [first_row]


def assert_in_turns(order: list[str]) -> None:
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len(set(rounds)) > 1


def test_providers_take_turns_in_random_order(monkeypatch):
    order: list[str] = []

    def step(name: str) -> Callable[[], tuple[torch.Tensor, ...]]:
        def work() -> tuple[torch.Tensor, ...]:
            order.append(name)
            return (torch.ones(1),)

        return work

    row = headline.Row(workloads("quick", ops=("layer_norm",))[0], "inference", Clock(CPU), 0.001)
    row.figures = {name: {} for name in "abc"}
    monkeypatch.setattr(headline, "CALLED_ROUNDS", 8)
    row.seconds = 1e-9  # one call a loop
    row._time_calls({name: step(name) for name in "abc"})
    assert_in_turns(order[-24:])
    row.seconds = 0.001
    order.clear()
    monkeypatch.setattr(headline, "warm", lambda work, clock: 1e-4)
    row._time({name: step(name) for name in "abc"})
    assert_in_turns(order)
    assert row.figures["a"]["graph"]["rounds"] == 3, "0.001 s for rounds of three times 0.1 ms"


def test_a_row_gets_its_share_of_the_time_left(monkeypatch):
    monkeypatch.setattr(headline, "time", types.SimpleNamespace(time=lambda: 1000.0))
    assert headline.seconds_for(32, 1000.0 + 32 * headline.SHARE) == 1.0
    assert headline.seconds_for(1, 2000.0) == headline.MOST
    assert headline.seconds_for(3, 900.0) == headline.LEAST, "too late, but a row that is begun has rounds"


def test_a_row_says_which_measured_choices_it_took(monkeypatch):
    key = (_tuned.bucket(788), 1536, 384, 2, 0)

    def use() -> bool:
        return _configs.use_triton_gemm(788, 1536, 384, 2, False, "sm_90")

    assert use(), "looked up before, and kept"
    monkeypatch.setattr(_tuned, "choice", lambda arch, table, *of: (0,) if of == key else None)
    names: set[str] = set()
    with headline._taken(names):
        assert not use()
        _configs.gemm(788, 1536, 384, 2, "sm_90")
    assert names == {"use_triton_gemm[10,1536,384,2,0]"}
    _tuned.clear_caches()


def test_the_table_says_what_is_wrong_and_what_is_missing():
    figures = {
        "eager": {"called": time_of(3e-4), "graph": time_of(1.5e-4)},
        "cudnn": {"skipped": "RuntimeError: No available kernel"},
        "fastvit": {"called": time_of(1e-4), "graph": time_of(5e-5)},
    }
    unhidden = {"fastvit": {"called": time_of(1e-4), "remark": "the GPU waited for the host"}}
    records = [
        record("correct", "mlp x bf16", case="mlp x", dtype="bf16", ratios=[0.5, 1.25]),
        record("correct", "mlp x fp16", "failed", case="mlp x", dtype="fp16", ratios=[None, 1.0], reason="inaccurate"),
        record("correct", "mlp x fp32", BEGUN, case="mlp x", dtype="fp32"),
        record("environment", "ceilings", bytes_per_second=4e9, flops_per_second=1e12, cached_bytes_per_second=None),
        record("row", ROW, op="attention", mode="inference", providers=figures, tuned=["gemm[1]"]),
        record("row", "block forward", op="block", mode="inference", providers=unhidden, tuned=[]),
        record("row", "model forward", BEGUN),
        record("step", "correct mlp", "failed", last=["Segmentation fault", "exit status 139"]),
    ]
    text = summary.markdown(records, summary.Rates(records))
    assert "| mlp x | 0.50, 1.25 | **inaccurate** not finite, 1.00 | **did not end** |" in text
    # Its bytes bind: four tensors of 50 x 3 x 64 in bfloat16, 76,800 bytes in 50 us
    assert f"| {ROW} | 150.0 | - | - | 50.0 | 0.00154 TB/s | 38% | 3.00x eager | 1 |" in text
    assert f"| {ROW} | 300.0 | - | - | 100.0 | 3.00x eager |" in text
    assert f"- {ROW}, cudnn: RuntimeError: No available kernel" in text
    assert "| block forward | - | - | - | - | - | - |  | - |" in text, "no time of the host as one of the GPU"
    assert "- block forward, fastvit: the GPU waited for the host" in text
    assert "| model forward (**did not end**) |" in text
    lines = summary.short(records)
    assert "mlp: 1 of 3 correct, worst error ratio 1.25" in lines
    assert f"{ROW}: 50.0 us, eager 3.00x; as called eager 3.00x" in lines


def test_the_verdict_has_what_is_wrong_first_and_compares_what_was_timed():
    def row(name: str, op: str, mode: str, **times: float) -> Record:
        return record("row", name, op=op, mode=mode, providers={k: {"graph": time_of(v)} for k, v in times.items()})

    def model(provider: str, seconds: float) -> Record:
        about = {"model": "m", "style": "default", "mode": "inference", "provider": provider}
        return record("compiled", f"m {provider}", graph=time_of(seconds), **about)

    records = [
        record("plan", "results", expected={"row": ["a", "b", "c", "d", "e"], "correct": ["mlp x"]}),
        row("a", "attention", "inference", eager=5.0, flash=3.0, cudnn=1.5, fastvit=2.0),
        row("b", "attention", "inference", eager=5.0, flash=4.0, cudnn=5.0, fastvit=2.0),
        row("c", "block", "training", eager=1.0, fastvit=2.0),
        record("row", "d", "failed", op="block", mode="inference", reason="OutOfMemoryError", wrong=False),
        record("correct", "mlp x", "failed", case="mlp x", dtype="bf16", ratios=[9.0, 1.0], reason="inaccurate"),
        record("step", "sanitize", "skipped", last=["SKIPPED: no compute-sanitizer"]),
        model("sdpa", 3.0),
        model("fastvit", 2.0),
    ]
    said = verdict.lines(records)
    assert said[:5] == [
        "7 results: 1 wrong, 1 failed, 1 missing",
        "WRONG: mlp x: inaccurate 9.00, 1.00",
        "FAILED: d: OutOfMemoryError",
        "MISSING: e",
        "sanitize: skipped SKIPPED: no compute-sanitizer",
    ]
    table = {" ".join(line.split()) for line in said[5:]}
    assert "attention, forward 1.75 (1.50 to 2.00) 1.38 (0.75 to 2.00) 2" in table
    assert "block, both passes - 0.50 1" in table
    assert "fused modules, forward 1.50 1" in table
    assert max(map(len, said)) <= 80
