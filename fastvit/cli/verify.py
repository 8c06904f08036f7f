"""`fastvit verify`: the fused ops against float64."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastvit.cli import options, terminal

if TYPE_CHECKING:
    from fastvit.study import Verdict

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SECONDS = "one core of a CPU takes 50 s for all ops, and 220 s for a ViT-B with --depth 2"
_EPILOG = f"""{_SECONDS}

the rule:
  error of fastvit <= 2 * error of eager PyTorch in the same dtype + one ulp,
  against float64, in the maximum and in the RMS; for gradients 3 times. A
  figure in the table is fastvit's error over (eager's error + ulp / 2 or 3):
  1.0 is as accurate as eager; 2 is allowed for outputs, 3 for gradients. A case
  with more is judged again on four draws of data together, so that no single
  rounding decides. If it still has more, it is a FAIL, and the status is 1.

examples:
  fastvit verify
  fastvit verify vit_base_patch16_224 --depth 2
  fastvit verify --ops attention,mlp --dtype bf16 --head-dim 64,80
  FASTVIT_BACKEND=aten fastvit verify --json > verdicts.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add = parser.add_argument
    options.add_model(parser, f"one model and its ops: {options.MODEL}", nargs="?")
    text = "fp32,bf16,fp16 (default: all of the device)"
    add("--dtype", type=options.words_of(tuple(_DTYPES)), metavar="T,...", help=text)
    add("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    text = "of attention (default: the model's, or 32,64,72,80,96,128)"
    add("--head-dim", type=options.several(options.count), metavar="d,...", help=text)
    add("--ops", type=lambda text: text.split(","), metavar="OP,...", help="names in fastvit.ops (default: all)")
    add("--depth", type=options.count, help="number of blocks to keep of the model (default: all)")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from fastvit import study
    from fastvit.study.accuracy.verification import OPS

    if args.model in OPS:
        raise ValueError(f"{args.model} is an op, not a model: fastvit verify --ops {args.model}")
    dtypes = args.dtype and [_DTYPES[word] for word in args.dtype]
    with terminal.progress(None, "verify") as step:
        found = study.verify(
            args.model, dtypes=dtypes, device=args.device, head_dims=args.head_dim, names=args.ops,
            depth=args.depth, step=step,
        )  # fmt: skip
        print(f"fastvit verify: {_SECONDS}", file=sys.stderr)
        verdicts = list(found)
    bad = [verdict for verdict in verdicts if not verdict.passed]
    if args.json:
        print(json.dumps({"passed": not bad, "verdicts": [_fields(verdict) for verdict in verdicts]}, indent=2))
    else:
        _table(verdicts)
        for verdict in bad:
            print(f"FAIL  {failure(verdict)}", file=sys.stderr)
    return int(bool(bad))


def _fields(verdict: Verdict) -> dict[str, Any]:
    """Return the fields, with None for infinity, which JSON does not have; `note` says whether the case ran."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(verdict).items()}


def failure(verdict: Verdict) -> str:
    """Describe in one line what is wrong."""
    size = f"head_dim {verdict.head_dim}" if verdict.head_dim else f"width {verdict.width}"
    what = f"{verdict.name} {verdict.dtype}, {size}, {verdict.tokens} tokens, {verdict.path}: "
    if verdict.output is None or verdict.gradient is None:
        return what + verdict.note
    note = f"{verdict.note}; " if verdict.note else ""
    gradient = f"gradient of {verdict.worst} {verdict.gradient:.2f} (at most 3)"
    return f"{what}{note}output {verdict.output:.2f} (at most 2), {gradient}"


def _table(verdicts: Sequence[Verdict]) -> None:
    dtypes = {long: short for short, long in _DTYPES.items() if any(v.dtype == long for v in verdicts)}
    found: dict[tuple[str, str, int], dict[str, Verdict]] = {}
    for verdict in verdicts:
        size = f"d {verdict.head_dim}" if verdict.head_dim else f"D {verdict.width}"
        found.setdefault((verdict.name, size, verdict.tokens), {})[verdict.dtype] = verdict
    rows = []
    for (name, size, tokens), row in found.items():
        passed = all(verdict.passed for verdict in row.values())
        paths = ", ".join(dict.fromkeys(verdict.path for verdict in row.values()))
        verdict_cell = "[green]PASS[/]" if passed else "[bold red]FAIL[/]"
        rows.append([name, size, str(tokens), paths, *(_figures(row.get(dtype)) for dtype in dtypes), verdict_cell])
    heads = ["op", "size", "tokens", "path", *dtypes.values(), ""]
    title = "training: error over eager's, of the outputs and of the gradients"
    terminal.print_table(heads, rows, title=title, words=(0, 1, 3))
    console = terminal.console()
    bad = sum(not verdict.passed for verdict in verdicts)
    for note in dict.fromkeys(verdict.note for verdict in verdicts if verdict.passed and verdict.note):
        console.print(f"on ATen, which Triton's kernels leave to it: {note}")
    count = f"{len(verdicts) - bad} of {len(verdicts)} hold"
    if any(not v.passed and v.path == "interpreter" and v.dtype == "bfloat16" for v in verdicts):
        console.print("Triton's interpreter multiplies bfloat16 wrongly by itself, which is no fault of the kernels")
    console.print(f"{count}: error over eager's, against float64; an output may have 2, a gradient 3")


def _figures(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.output is None or verdict.gradient is None:
        return "[bold red]error[/]"
    return " ".join(
        f"{ratio:.2f}" if ratio <= limit else f"[bold red]{ratio:.3g}[/]"
        for ratio, limit in ((verdict.output, 2.0), (verdict.gradient, 3.0))
    )
