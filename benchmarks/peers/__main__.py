"""The tests of timm and transformers, with and without fastvit: `make peers`.

    python -m benchmarks.peers                              both suites, and benchmarks/results/cpu/peers.json
    python -m benchmarks.peers --suite timm -k "fx and not backward"

Both come from the sdists at the versions of constraints.txt, downloaded into out/peers: timm's tests with `accelerate`
on every model that `timm.create_model` makes, and transformers' ModelTesterMixin with `accelerate` on every model.
Tests that do not pass then run without fastvit. A difference is a test that ends in another way there, and does not
fail there. Differences that are meant are in deliberate.toml, with the reason. Exits 1 at any other, and, without -k,
at an entry of deliberate.toml that nothing meets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.harness.provenance import ROOT, write_json
from benchmarks.harness.record import environment
from benchmarks.peers.plugin import MODELS
from fastvit._output import write_file

FOLDER = ROOT / "out" / "peers"
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "peers.json"
DELIBERATE = Path(__file__).with_name("deliberate.toml")
SUITES = ("timm", "transformers")
PARAMETERIZED = "parameterized==0.9.0"  # transformers' tests import it
Outcomes = dict[str, dict[str, Any]]  # by test


def pinned(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().split()
    return next(line for line in lines if line.startswith(f"{name}=="))


def download(name: str) -> Path:
    """Download and unpack an sdist; returns its folder."""
    folder = FOLDER / pinned(name).replace("==", "-")
    if not folder.is_dir():
        pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(FOLDER), pinned(name))
        subprocess.run(["tar", "xzf", f"{folder}.tar.gz", "-C", str(FOLDER)], check=True)
    return folder


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def run_tests(suite: str, *options: str) -> Outcomes:
    """Run a suite in a pytest of its own."""
    folder, packages = download(suite), FOLDER / "packages"
    if suite == "timm":
        chosen = [str(path) for path in sorted(folder.glob("tests/test_*.py")) if "create_model" in path.read_text()]
        chosen += ["-c", str(folder / "pyproject.toml")]
    else:
        if not packages.is_dir():
            pip("install", "--no-deps", "--target", str(packages), PARAMETERIZED)
        chosen = [str(ROOT / "benchmarks/peers/transformers_suite.py"), "-c", os.devnull, "--noconftest"]
    environ = os.environ | {
        "FASTVIT_PEERS_TESTS": str(folder / "tests"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    xml = FOLDER / f"{suite}.xml"
    command = [
        sys.executable, "-P", "-m", "pytest", *chosen, "--rootdir", str(folder), "-p", "benchmarks.peers.plugin",
        "--junitxml", str(xml), "-p", "no:cacheprovider", "-q", "--tb=line", "--disable-warnings",
        *options,
    ]  # fmt: skip
    code = subprocess.run(command, cwd=folder, env=environ).returncode
    if code not in (0, 1, 5):  # passed, some failed, none chosen
        raise SystemExit(f"pytest ended with {code}")
    return read_outcomes(xml)


def read_outcomes(xml: Path) -> Outcomes:
    """Return outcome, error and number of models with fastvit in them, by test."""
    outcomes: Outcomes = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        row = outcomes.setdefault(name, {"outcome": "passed", "error": "", "models": 0})
        row["models"] += sum(int(p.get("value", 0)) for p in case.iter("property") if p.get("name") == "models")
        for outcome, tags in {"skipped": ("skipped",), "failed": ("failure", "error")}.items():
            for found in (child for child in case if child.tag in tags):
                row |= {"outcome": outcome, "error": " ".join(str(found.get("message")).split())}
                if "crashed while running" in row["error"]:
                    row["models"] += 1
    return outcomes


def compare(suite: str, own: Outcomes, plain: Outcomes, meant: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare a suite. own: outcomes with fastvit; plain: without it, of the tests that did not pass."""
    touched = {name: row for name, row in own.items() if row["models"]}
    suspects = {name: row for name, row in touched.items() if row["outcome"] != "passed"}
    differ = {
        name: row
        for name, row in suspects.items()
        if plain.get(name, {}).get("outcome") not in ("failed", row["outcome"])
    }
    deliberate: dict[str, int] = {}
    for entry in (entry for entry in meant if entry["suite"] == suite):
        met = [
            n for n, row in differ.items() if fnmatchcase(n, entry["tests"]) and re.search(entry["error"], row["error"])
        ]
        deliberate[f"{entry['tests']}: {entry['reason']}"] = len(met)
        differ = {name: row for name, row in differ.items() if name not in met}
    same = len(suspects) - len(differ) - sum(deliberate.values())  # skipped, or fail without fastvit, too
    counts = {"run": f"{suite} accelerate", "tests": len(touched), "passed": len(touched) - len(suspects), "same": same}
    return counts | {"differences": differ, "deliberate": deliberate}


def lines(result: Mapping[str, Any]) -> list[str]:
    """Format a run for the terminal and the page of results."""
    deliberate = sum(result["deliberate"].values())
    counts = f"{result['tests']} tests, {result['passed']} pass, {result['same']} end as without fastvit"
    text = [f"{result['run']}: {counts}, {deliberate} differ on purpose, {len(result['differences'])} differ"]
    text += [f"  {count or 'not met:'} {entry}" for entry, count in result["deliberate"].items()]
    return text + [
        f"  differs: {name}: {row['outcome']}: {row['error']}" for name, row in result["differences"].items()
    ]


def render(path: Path) -> list[str]:
    """Format the file of results, in lines of at most 100 characters."""
    data = json.loads(path.read_text())
    where = data["environment"]
    text = [line for result in data["runs"] for line in lines(result)]
    models = ", ".join(
        f"{count} {'models' if suite == 'timm' else 'classes'}" for suite, count in data["models"].items()
    )
    text += ["", f"{models}; {', '.join(where['suites'])}, torch {where['torch']}"]
    return [part for line in text for part in textwrap.wrap(line, 100, subsequent_indent=" " * 6) or [""]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, nargs="+", default=SUITES)
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="pytest's: only these tests")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    results, meant = [], tomllib.loads(DELIBERATE.read_text())["difference"]
    common = ["-n", "2", "--max-worker-restart", "20", *(["-k", options.k] if options.k else [])]
    for suite in options.suite:
        own = run_tests(suite, "--accelerate", *common)
        again = [name for name, row in own.items() if row["models"] and row["outcome"] != "passed"]
        only = FOLDER / f"{suite}-again.txt"
        write_file(only, "\n".join(name.partition("::")[2] for name in again))
        plain = run_tests(suite, *common, "--only", str(only)) if again else {}
        results.append(compare(suite, own, plain, meant))
        if options.k:  # what the chosen tests do not meet is not reported
            results[-1]["deliberate"] = {entry: n for entry, n in results[-1]["deliberate"].items() if n}
        print("\n".join(lines(results[-1])), flush=True)
    if not options.k and len(options.suite) == len(SUITES):
        where = environment(torch.device("cpu"), torch.float32) | {"suites": [pinned(name) for name in SUITES]}
        write_json(RESULT, {"environment": where, "models": {k: len(v) for k, v in MODELS.items()}, "runs": results})
    unmet = any(not count for result in results for count in result["deliberate"].values())
    return int(unmet or any(result["differences"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
