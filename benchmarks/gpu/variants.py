"""Time changes of the kernels in Gluon on the GPU at hand, each against the kernel as it is.

    python -m benchmarks.gpu.variants                    # all of VARIANTS
    python -m benchmarks.gpu.variants --only values      # those whose name has this

A variant replaces text in a kernel's source. It is compared with the kernel as it is, then both are replayed as CUDA
graphs, in rounds of random order, with a cleared L2 cache. tests/kernels/test_attention_hopper.py holds every variant
against float64 in the emulator. What wins moves into the kernel; what loses becomes a line of benchmarks/NOTES.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import graphs
from benchmarks.harness.clock import Clock
from benchmarks.harness.columns import make
from benchmarks.harness.program import parser
from benchmarks.harness.timing import interleave, paired_interval
from fastvit import ops
from fastvit.cli.terminal import guarded
from fastvit.ops.runtime import call

Changes = Sequence[tuple[str, str]]  # text, and what stands in its place

SHORT = "attention_hopper_short"
# The trial that this kernel was made from took 0.89 of its time at N = 197 (attention_gluon.txt of the H200). It had
# buffers of their own for results, which do not fit beyond 208 tokens, and one barrier for queries and keys.
_OWN = [
    ("tiles = buffers(q, SLOTS * TILES)", "tiles = buffers(q, SLOTS * TILES + 2)"),
    ("finish(acc, top, total, out, q, ", "finish(acc, top, total, out, tiles.index(SLOTS * TILES + GROUP), "),
]
_EARLY = [
    ("        mbarrier.arrive(q_empty.index(1 - slot), count=1, pred=(tile < 2) & (step > 0))\n", ""),
    (
        "        mbarrier.arrive(k_empty.index(slot), count=1, pred=is_last)\n",
        "        mbarrier.arrive(k_empty.index(slot), count=1, pred=is_last)\n"
        "        mbarrier.arrive(q_empty.index(slot), count=1, pred=is_last)\n",
    ),
]
_VALUES = """        mbarrier.wait(v_empty.index(slot), parity)
        copy_parts(v, in_slot(values, slot), v_full.index(slot), b, h)
"""
_QUERIES = "        mbarrier.wait(q_empty.index(slot), parity)\n"
VARIANTS: dict[str, tuple[str, Changes]] = {
    "values before queries": (SHORT, [(_VALUES, ""), (_QUERIES, _VALUES + _QUERIES)]),
    "results in buffers of their own": (SHORT, _OWN),
    "and queries given back at once": (SHORT, [*_OWN, *_EARLY]),
    "and values before queries": (SHORT, [*_OWN, *_EARLY, (_VALUES, ""), (_QUERIES, _VALUES + _QUERIES)]),
}
CASES = {SHORT: ((256, 197, 12, 64), (64, 197, 12, 64), (32, 197, 12, 64), (256, 145, 12, 64))}  # B, N, H, d
TOLERANCE = 0.05  # relative to the largest result; bfloat16 sums in another order differ by about 0.01


def changed(module: str, changes: Changes, folder: Path) -> ModuleType:
    """Load a module of kernels with its source changed. folder: for the source, which Triton reads.

    Raises:
        ValueError: the source does not have the text.
    """
    spec = importlib.util.find_spec(f"fastvit.kernels.{module}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for old, new in changes:
        if old not in source:
            raise ValueError(f"{module} has no {old.strip()!r}")
        source = source.replace(old, new)
    path = folder / f"{module}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@contextmanager
def using(module: str, found: ModuleType) -> Iterator[None]:
    """Let launches take the kernels of this module within the context."""
    from fastvit.ops.attention import hopper

    with mock.patch.dict(sys.modules, {f"fastvit.kernels.{module}": found}), call.forgotten():
        hopper._kernel.cache_clear()
        try:
            yield
        finally:
            hopper._kernel.cache_clear()


def main(arguments: list[str] | None = None) -> int:
    options = parser("benchmarks.gpu.variants", __doc__)
    options.add_argument("--only", default="", help="variants whose name has this")
    options.add_argument("--rounds", type=int, default=60)
    chosen = options.parse_args(arguments)
    if not torch.cuda.is_available():
        options.error("no GPU")
    clock, wrong = Clock(torch.device("cuda")), 0
    with tempfile.TemporaryDirectory() as folder:
        for module in dict.fromkeys(module for module, _ in VARIANTS.values()):
            modules = {"as it is": importlib.import_module(f"fastvit.kernels.{module}")}
            for i, (name, (of, changes)) in enumerate(VARIANTS.items()):
                if of == module and chosen.only in name:
                    (own := Path(folder, str(i))).mkdir()
                    modules[name] = changed(module, changes, own)
            for case in CASES[module]:
                rows, agree = _measured(module, modules, case, clock, chosen.rounds)
                wrong += not agree
                title = "{} B{} N{} H{} d{}".format(module, *case)
                print(*make((title, "us", "ratio", "95 %"), rows), sep="\n", flush=True)
    return int(wrong > 0)


def _measured(
    module: str, modules: dict[str, ModuleType], case: tuple[int, ...], clock: Clock, rounds: int
) -> tuple[list[tuple[str, ...]], bool]:
    """Return a row for each module of kernels, and whether all results agree."""
    B, N, H, d = case
    qkv = torch.randn(B, N, 3, H, d, dtype=torch.bfloat16, device="cuda")
    works, results = {}, {}
    for name, found in modules.items():

        def work(found: ModuleType = found) -> Any:
            with using(module, found), torch.no_grad():
                return ops.attention_qkvpacked(qkv)

        works[name], results[name] = work, work()
    expected = results["as it is"].float()
    most = TOLERANCE * float(expected.abs().max())
    agree = {name: bool(((got.float() - expected).abs() <= most).all()) for name, got in results.items()}
    replays, remarks = graphs.capture_all({name: work for name, work in works.items() if agree[name]})
    samples = interleave(clock, replays, rounds)
    rows: list[tuple[str, ...]] = []
    for name in modules:
        if name not in samples:
            rows.append((name, remarks.get(name, "other results"), "", ""))
            continue
        base, own = samples["as it is"], samples[name]
        interval = paired_interval(own, base)
        us, ratio = 1e6 * statistics.median(own), statistics.median(own) / statistics.median(base)
        ends = "{:.3f} - {:.3f}".format(*interval) if interval else ""
        rows.append((name, f"{us:.1f}", f"{ratio:.3f}", ends))
    return rows, all(agree.values())


if __name__ == "__main__":
    sys.exit(guarded(main, name="benchmarks.gpu.variants"))
