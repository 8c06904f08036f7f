"""`fastvit doctor`: what there is on this machine, and what is missing."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from fastvit._output import wrapped
from fastvit.cli import options

if TYPE_CHECKING:
    from fastvit.study import Finding

_MARK = {"ok": " ", "note": "-", "trouble": "!"}
_EPILOG = """Changes nothing, except that it compiles one small kernel on a GPU, and never
fails: a failure is a line of its own. "!" marks what keeps fastvit from running
well, "-" what changes how it runs.

examples:
  fastvit doctor
  fastvit doctor --json > machine.json  for a bug report
  FASTVIT_BACKEND=aten fastvit doctor
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from fastvit import study

    findings = study.doctor()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return 0
    topic = ""
    for finding in _together(findings):
        if finding.topic != topic:
            topic = finding.topic
            print(topic)
        head = f"{_MARK[finding.status]} {finding.name:<17} "
        print(wrapped([head + finding.value], indent=len(head)))
    return 0


def _together(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Join ops with the same path in one line."""
    for (topic, value, _), group in itertools.groupby(findings, key=lambda f: (f.topic, f.value, f.status)):
        same = list(group)
        if topic == "ops" and len(same) > 1:
            names = ", ".join(finding.name for finding in same)
            same = [replace(same[0], name=f"{len(same)} ops", value=f"{value} ({names})")]
        yield from same
