"""The list of workloads, workloads.txt: which op at which sizes, and for which use. Benchmarks, tuning, the traffic
count, the sanitizer and ahead-of-time compilation take theirs from it; `Workload.runner` builds the same call for
each."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.families import VIT_B_16
from benchmarks.harness.providers import OPS
from benchmarks.harness.workload import Workload

LIST = Path(__file__).with_name("workloads.txt")
INSTALLED = [name for name in VIT_B_16 if importlib.util.find_spec(name) is not None]  # libraries


def workloads(*uses: str, ops: tuple[str, ...] = ()) -> list[Workload]:
    """Return the workloads of any of the uses and, if given, of these ops, in the order of the list."""
    if unknown := {*ops} - {*OPS}:
        raise ValueError(f"no op {sorted(unknown)}, the ops are {sorted(OPS)}")
    return [w for w in _all() if w.uses & {*uses} and (not ops or w.op in ops)]


@functools.cache
def _all() -> tuple[Workload, ...]:
    return tuple(w for w in _read() if w.sizes.get("library", "") in ("", *INSTALLED))


def _read() -> Iterator[Workload]:
    op = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("["):
            op = line.strip("[]")
        elif line and not line.startswith("#"):
            words = line.split()
            pairs = [word.partition("=")[::2] for word in words if "=" in word]
            uses = frozenset(word for word in words if "=" not in word)
            for values in itertools.product(*(text.split(",") for _, text in pairs)):
                sizes: dict[str, Any] = {}
                for (name, _), text in zip(pairs, values, strict=True):
                    sizes[name] = _value(text, sizes)
                yield Workload(op, sizes, uses, sizes.pop("parts", 1), sizes.pop("max_rounds", 200))


def _value(text: str, sizes: dict[str, Any]) -> Any:
    """Read a number, True, a word, or a multiple or a part of D."""
    if found := re.fullmatch(r"(\d*)D(?:/(\d+))?", text):
        return int(found[1] or 1) * sizes["D"] // int(found[2] or 1)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
