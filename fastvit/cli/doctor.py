"""`fastvit doctor`: what there is on this machine, and what is missing."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from fastvit._base.output import wrapped
from fastvit.cli import options

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
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            print(topic)
        head = f"{_MARK[finding.status]} {finding.name:<17} "
        print(wrapped([head + finding.value], indent=len(head)))
    return 0
