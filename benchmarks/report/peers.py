"""Show how many tests of timm and transformers passed on accelerated models, results/cpu/peers.json."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    deliberate = sum(result["deliberate"].values())
    counts = f"{result['tests']} tests, {result['passed']} pass, {result['same']} end as without fastvit"
    yield f"{result['run']}: {counts}, {deliberate} differ on purpose, {len(result['differences'])} differ"
    yield from (f"  {count} {entry}" for entry, count in result["deliberate"].items())


def render(path: Path) -> list[str]:
    """Format the file of results, in lines of at most 100 characters."""
    data = json.loads(path.read_text())
    text = [line for result in data["runs"] for line in _lines(result)]
    models = f"{data['models']['timm']} models, {data['models']['transformers']} classes"
    text += ["", f"{models}; {', '.join(data['environment']['suites'])}, torch {data['environment']['torch']}"]
    return [part for line in text for part in textwrap.wrap(line, 100, subsequent_indent=" " * 6) or [""]]
