"""Print as JSON the kernels that the first minutes compile, and those that their rows and their tuning launch. For
tests/benchmarks/test_gpu_first.py, in a process of its own: kernels are recorded, not interpreted."""

import json

import torch

from benchmarks.codegen.launches import Launch
from benchmarks.gpu import headline, precompile
from benchmarks.gpu.tables import HEADLINE, works
from benchmarks.harness.draw import Draw
from benchmarks.harness.workloads import Workload
from fastvit.tuning.candidates import candidates
from fastvit.tuning.tuner import base_entries, keys_of, using

Keys = set[tuple[str, tuple[int, ...]]]


def key(launch: Launch) -> str:
    return repr((launch.name, launch.signature, launch.constants, launch.attrs, launch.options))


def run(workload: Workload) -> None:
    runner = workload.runner("fastvit", Draw(torch.bfloat16, "meta"))
    runner.gradients()
    runner.infer()


def asked_by_rows() -> Keys:
    """Return the keys that rows look up, as shipped and where tuning has chosen our kernels."""
    found: Keys = set()
    for choices in ({}, {("use_triton_gemm", ()): (1,)}):
        with precompile._recording(precompile.REHEARSED), using(choices) as asked:
            for workload in headline.rows(False):
                run(workload)
        found |= {(table, of) for _, table, of in asked if table in HEADLINE}
    return found


def measured() -> Keys:
    found: Keys = set()
    with precompile._recording(precompile.REHEARSED):
        for work in works(headline=True):
            with using(base_entries(work.table, {})):
                call = work.build(torch.device("meta"))
            found |= {(work.table, of) for _, of in keys_of(call, work.table, {})}
    return found


def with_any_choice() -> set[str]:
    """Launch blocks and a model with every choice that tuning may make."""
    some = [w for w in headline.rows(False) if w.op in ("block", "layer_norm_mlp")]
    some.append(next(w for w in headline.rows(False) if w.op == "model"))
    with precompile._recording(precompile.REHEARSED) as recorder:
        for choice in candidates("gemm", ()):
            with using({("gemm", ()): choice, ("use_triton_gemm", ()): (1,)}):
                for workload in some:
                    run(workload)
    return {key(launch) for launch in recorder.launches.values()}


def main() -> None:
    launches = precompile.first_minutes(False, precompile.REHEARSED)
    rows = precompile.record([(w, "bf16") for w in headline.rows(False)], precompile.REHEARSED)
    compiled = [key(launch) for launch in launches]
    print(
        json.dumps(
            {
                "first": "rows" if compiled[: len(rows)] == [key(launch) for launch in rows] else compiled[0],
                "dtypes": list(dict.fromkeys(launch.dtype for launch in launches)),
                "asked by rows": sorted(asked_by_rows()),
                "measured": sorted(measured()),
                "not compiled": len(with_any_choice() - {*compiled}),
            }
        )
    )


if __name__ == "__main__":
    main()
