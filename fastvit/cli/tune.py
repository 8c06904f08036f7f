"""`fastvit tune`: measure launch choices on this GPU."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit import _triton
from fastvit._output import not_writable
from fastvit.cli import options, step_options, terminal

if TYPE_CHECKING:
    from fastvit.study.sources.model_source import ModelSource
    from fastvit.tuning.calls import OpCall
    from fastvit.tuning.model import Machine, Skipped
    from fastvit.tuning.tuner import Result, Tuner

_DEFAULT = "vit_base_patch16_224"
_EPILOG = """Which tile sizes, warps and pipeline stages are fastest depends on the GPU. This
records the ops that a step of the model calls, and for each runs the shipped
choice and the candidates in turn, on random tensors of the same shapes. The op
that takes most of the step comes first. A choice is kept if its results agree
and it is more than 2 % faster. A second call measures only what is missing.

The table, tuned_<gpu>.json, is in $FASTVIT_CACHE_DIR, or else in fastvit in
$XDG_CACHE_HOME or ~/.cache. Every program that imports fastvit on a GPU of this
name uses it. A fastvit with other kernels ignores it, with a warning.

examples:
  fastvit tune vit_large_patch16_224 --batch 64 --mode train
  fastvit tune module:function --dtype amp --minutes 10
  fastvit tune --show
  fastvit tune --forget
  fastvit tune --rehearse  without a GPU: the same in miniature
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    options.add_model(parser, f"{options.MODEL} (default: {_DEFAULT})", nargs="?")
    parser.add_argument("--batch", type=options.batch, default=32, metavar="B", help="images")
    step_options.configure(parser)
    parser.add_argument("--minutes", type=_minutes, metavar="M", help="stop measuring after so long")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="show the tables in use on this GPU")
    instead.add_argument("--forget", action="store_true", help="delete your table for this GPU")
    instead.add_argument(
        "--rehearse", action="store_true", help="all steps on a tiny model in Triton's interpreter, without a GPU"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of a rehearsal's table (default: none is kept)")


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of minutes, got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    if args.out is not None and not args.rehearse:
        raise ValueError("--out is for --rehearse; $FASTVIT_CACHE_DIR chooses the folder of measured tables")
    _triton.check("fastvit tune")
    if args.rehearse:
        return _rehearse(args)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise ValueError("with TRITON_INTERPRET=1 no kernel runs on a GPU; --rehearse runs all steps without one")
    from fastvit.ops.runtime.device import cache_folder
    from fastvit.tuning.model import gpu_at_hand

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a table that is ignored is reported below
            machine = gpu_at_hand()
    except ValueError as error:
        raise ValueError(f"{error}; `fastvit tune --rehearse` runs all steps without one") from None
    folder = cache_folder()
    if folder is None:
        raise ValueError("there is no home folder to keep the table in: set FASTVIT_CACHE_DIR")
    if args.show:
        return _show(machine, folder)
    if args.forget:
        return _forget(machine, folder)
    return _on_gpu(args, machine, folder)


def _on_gpu(args: argparse.Namespace, machine: Machine, folder: Path) -> int:
    from fastvit.kernels import _tuned
    from fastvit.study.sources.find import find
    from fastvit.tuning.model import compile_calls, compile_candidates
    from fastvit.tuning.tuner import Tuner, entries_of, timer_of

    until = time.monotonic() + 60 * (args.minutes or math.inf)
    if args.model is None:
        print(f"no MODEL is given: {_DEFAULT}", file=sys.stderr)
    source = find(args.model or _DEFAULT)
    calls = step_options.calls(source, args, args.batch)
    if reason := not_writable(folder):  # checked before anything takes time
        raise ValueError(f"{reason}; FASTVIT_CACHE_DIR names another")
    path = folder / _tuned.file_name(machine.gpu)
    before = _tuned.users(machine.arch, machine.gpu, folder)
    if before is not None and before.ignored:
        print(f"{path} is replaced: {before.ignored}", file=sys.stderr)
        path.unlink()
    tuner = Tuner(
        machine.device, timer_of(machine.device), path, machine.gpu, _measured,
        shipped=entries_of(_tuned.shipped(machine.arch, machine.gpu)), prepare=compile_candidates(machine),
    )  # fmt: skip
    with terminal.working("compile") as step:
        step("the kernels of the model")
        compile_calls(calls, machine, tuner.entries)
    return _tune(source, calls, args, tuner, machine.multiprocessors, until)


def _rehearse(args: argparse.Namespace) -> int:
    if args.model is not None:
        raise ValueError(f"--rehearse has a tiny model of its own: leave out {args.model}")
    if args.out is not None and (reason := not_writable(args.out)):
        raise ValueError(f"--out: {reason}")
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from fastvit.kernels import _tuned
    from fastvit.ops.runtime import backend as backends

    if not backends.INTERPRET:
        raise ValueError("--rehearse needs a process of its own: triton is imported already")
    args.batch, args.image_size, args.dtype = 2, None, "fp32"  # bfloat16 is wrong in the interpreter
    with tempfile.TemporaryDirectory() as temporary, backends.use_backend("triton", strict=True):
        folder = args.out or Path(temporary)
        from fastvit.tuning.model import REHEARSAL, tiny_model
        from fastvit.tuning.tuner import Tuner, timer_of

        print("a rehearsal, in Triton's interpreter: its figures say nothing about a GPU", file=sys.stderr)
        source = tiny_model()
        calls = step_options.calls(source, args, args.batch)
        cpu, path = REHEARSAL.device, folder / _tuned.file_name(REHEARSAL.gpu)
        tuner = Tuner(cpu, timer_of(cpu), path, REHEARSAL.gpu, _measured, most=1, rounds=(1, 3))
        until = time.monotonic() + 60 * (args.minutes or math.inf)
        return _tune(source, calls, args, tuner, REHEARSAL.multiprocessors, until, kept=args.out is not None)


def _measured() -> dict[str, Any]:
    """Return date, versions and "sources" of a measurement. A table is used only if its "sources" are equal."""
    import torch
    import triton

    from fastvit import __version__
    from fastvit.kernels import _tuned

    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    versions = {"fastvit": __version__, "torch": torch.__version__, "triton": triton.__version__}
    return {"when": when, "sources": _tuned.sources()} | versions


def _tune(
    source: ModelSource, calls: list[OpCall], args: argparse.Namespace, tuner: Tuner, multiprocessors: int,
    until: float, *, kept: bool = True,
) -> int:  # fmt: skip
    from fastvit.tuning.model import ModelTuning, Skipped

    tuning = ModelTuning(calls, tuner, multiprocessors)
    with terminal.progress(len(calls), "timing") as step:
        skipped = tuning.time_calls(step)
    works = tuning.works()
    what = step_options.in_words(source, args, args.batch)
    print(f"{what}: {len(calls)} ops, {len(works)} choices to measure", flush=True)
    for op in skipped:
        print(_line(op), flush=True)
    done, late, lines = 0, 0, list[str]()
    bar = sys.stdout.isatty() and sys.stderr.isatty()  # lines would break the bar
    try:
        with terminal.progress(len(works), "tuning") as step:
            for result in tuning.tune(works, until, step):
                late += isinstance(result, Skipped) and result.late
                done += not isinstance(result, Skipped)
                if not (isinstance(result, Skipped) and result.late):
                    lines.append(_line(result))
                    if not bar:
                        print(lines[-1], flush=True)
    except KeyboardInterrupt:
        late = len(works) - done
        raise
    finally:
        if bar and lines:
            print("\n".join(lines), flush=True)
        if late:
            print(f"choices not measured: {late}" + "; the same command goes on with them" * kept, flush=True)
        if kept and tuner.path.exists():
            print(f"choices that differ from the shipped ones: {len(tuner.chosen)}, in {tuner.path}", flush=True)
    for mode in step_options.modes(args):
        step_of = tuning.step(mode)
        name = "a training step" if mode == "train" else "a forward pass"
        print(f"{step_of.calls} fused ops of {name}: {step_of.before * 1e3:.2f} -> {step_of.after * 1e3:.2f} ms")
    return 0


def _line(result: Result | Skipped) -> str:
    """Describe a result: "attention forward N=197 d=64: 41.2 -> 38.0 us, 128x64, 8 warps, 3 stages"."""
    from fastvit.tuning.model import Skipped
    from fastvit.tuning.names import choice_in_words, key_in_words

    if isinstance(result, Skipped):
        return f"{result.label}: not measured, {result.reason}"
    name, before = key_in_words(result.table, result.key), f"{result.shipped * 1e6:.1f}"
    if result.chosen is None:
        return f"{name}: {before} us, as shipped; {result.tried} tried, {result.unfit} unfit"
    return f"{name}: {before} -> {result.seconds * 1e6:.1f} us, {choice_in_words(result.table, result.chosen)}"


def _show(machine: Machine, folder: Path) -> int:
    from fastvit.kernels import _tuned
    from fastvit.tuning.names import choice_in_words, key_in_words
    from fastvit.tuning.tuner import entries_of, name_of

    shipped = _tuned.shipped(machine.arch, machine.gpu)
    users = _tuned.users(machine.arch, machine.gpu, folder)
    print(f"{machine.gpu}, {machine.arch}")
    for name, table, without in (("shipped", shipped, "none"), ("yours", users, "none; `fastvit tune` measures one")):
        if table is None:
            print(f"{name}: {without}")
        elif table.ignored:
            print(f"{name}: {table.path} is ignored: {table.ignored}")
        else:
            print(f"{name}: {table.path}, {len(table.choices)} choices")
    samples, measured = {}, {}
    if users is not None and not users.ignored:
        data = json.loads(users.path.read_text())
        samples, measured = data.get("samples", {}), data["measured"]
        print(f"       measured {measured.get('when')} with triton {measured.get('triton')}")
    shipped_choices, own_choices = entries_of(shipped), entries_of(users)
    for (name, key), choice in sorted((shipped_choices | own_choices).items()):
        shipped_words = (
            choice_in_words(name, shipped_choices[name, key]) if (name, key) in shipped_choices else "by its rule"
        )
        line = f"{key_in_words(name, key)}: {choice_in_words(name, choice)}"
        sample = samples.get(name_of(name, key), {}) if (name, key) in own_choices else None
        if sample is None:
            line += " (shipped)"
        elif "gain" in sample:
            before = sample["shipped"]["median"] * 1e6
            line += f", {before / sample['gain']:.1f} us; shipped: {shipped_words}, {before:.1f} us"
        print(line)
    return 0


def _forget(machine: Machine, folder: Path) -> int:
    from fastvit.kernels import _tuned

    path = folder / _tuned.file_name(machine.gpu)
    try:
        path.unlink()
    except FileNotFoundError:
        print(f"there is no table for {machine.gpu}: {path}")
    else:
        print(f"deleted {path}")
    return 0
