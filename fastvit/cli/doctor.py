"""`fastvit doctor`: what there is on this machine, and what is missing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
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
    from dataclasses import asdict

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
    from dataclasses import replace

    same: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.topic == "ops":
            same.setdefault((finding.value, finding.status), []).append(finding.name)
    for finding in findings:
        names = same.get((finding.value, finding.status), []) if finding.topic == "ops" else []
        if len(names) < 2:
            yield finding
        elif names[0] == finding.name:
            yield replace(finding, name=f"{len(names)} ops", value=f"{finding.value} ({', '.join(names)})")
