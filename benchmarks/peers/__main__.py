"""The tests of timm and transformers, with and without fastvit: `make peers`.

    python -m benchmarks.peers                              all runs, and benchmarks/results/cpu/peers.json
    python -m benchmarks.peers --suite timm --run accelerate -k "fx and not backward"
    python -m benchmarks.peers --models vit_tiny_patch16_224

Both suites come from the sdists at the versions of constraints.txt, downloaded into out/peers. Runs: timm's tests with
`accelerate` on every model that `timm.create_model` makes, and with `fastvit.create_model` instead for names that both
have; transformers' ModelTesterMixin with `accelerate` on every model, and with attn_implementation="fastvit". Tests
that do not pass then run without fastvit. A difference is a test that ends in another way there, and does not fail
there. Differences that are meant are in deliberate.toml, with the reason.

Outcomes are kept in out/peers as they come, and a second call continues until the code changes. With -k
or --models, nothing is written to the results, and outcomes of earlier calls are reported, too. Exits 1 at a difference
that deliberate.toml does not have, and at an entry of it that nothing meets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.libraries import load
from benchmarks.harness.provenance import ROOT, sources, write_json
from benchmarks.harness.record import environment
from benchmarks.peers import compare, models
from benchmarks.peers.plugin import PLAIN, RUNS, VARIABLE, Job

FOLDER = ROOT / "out" / "peers"
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "peers.json"
PARAMETERIZED = "parameterized==0.9.0"  # transformers' tests import it


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


def run_tests(job: Job, options: argparse.Namespace) -> None:
    """Run the tests of a job in a pytest of their own; outcomes go to the job's file."""
    description = FOLDER / f"job-{job.suite}-{job.run}.json"
    write_json(description, asdict(job))
    folder = download(job.suite)
    packages = FOLDER / "packages"
    environ = os.environ | {
        VARIABLE: str(description),
        "FASTVIT_PEERS_TRANSFORMERS": str(folder / "tests"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if job.suite == "timm":
        chosen = [str(path) for path in sorted(folder.glob("tests/test_*.py")) if "create_model" in path.read_text()]
        chosen += ["-c", str(folder / "pyproject.toml")]
    else:
        if not packages.is_dir():
            pip("install", "--no-deps", "--target", str(packages), PARAMETERIZED)
        chosen = [str(ROOT / "benchmarks/peers/transformers_suite.py"), "-c", os.devnull, "--noconftest"]
    command = [
        sys.executable, "-P", "-m", "pytest", *chosen, "--rootdir", str(folder), "-p", "benchmarks.peers.plugin",
        "-p", "no:cacheprovider", "-q", "--tb=line", "--disable-warnings", "--no-header", "-n", str(options.workers),
        "--max-worker-restart", "20", *(["-k", options.k] if options.k and job.only is None else []),
    ]  # fmt: skip
    log = FOLDER / f"log-{job.suite}-{job.run}.txt"
    with log.open("w") as file:
        code = subprocess.run(command, cwd=folder, env=environ, stdout=file, stderr=subprocess.STDOUT).returncode
    if code not in (0, 1, 5):  # passed, some failed, none chosen
        raise SystemExit(f"pytest ended with {code}: see {log}")


def outcomes(job: Job, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the tests of a job whose outcomes are not known yet; returns all outcomes."""
    path, code = Path(job.record), {"sources": sources(*models.FOLDERS)}
    if not path.exists() or json.loads(path.read_text().partition("\n")[0]) != code:
        path.write_text(json.dumps(code) + "\n")
    known = compare.read_lines(path)
    todo = None if job.only is None else sorted(set(job.only) - {row["id"] for row in known})
    if todo is None or todo:
        run_tests(replace(job, only=todo, done=[row["id"] for row in known]), options)
    return compare.read_lines(path)


def compare_run(suite: str, run: str, found: models.Found, options: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    chosen: Any = {"create_model": found.shared, "attention": found.transformers}.get(run, getattr(found, suite))
    if options.models and suite == "timm":
        chosen = options.models
    own = outcomes(Job(suite, run, str(FOLDER / f"{suite}-{run}.jsonl"), chosen), options)
    suspects = [row["id"] for row in own if row["models"] and row["outcome"] != "passed"]
    plain_job = Job(suite, PLAIN, str(FOLDER / f"{suite}-{PLAIN}.jsonl"), chosen, only=suspects)
    plain = {row["id"]: row for row in outcomes(plain_job, options)}
    return compare.compare(f"{suite} {run}", own, plain) | {"seconds": round(time.perf_counter() - start)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=RUNS, nargs="+", default=list(RUNS))
    parser.add_argument("--run", choices=sorted({run for runs in RUNS.values() for run in runs}), nargs="+")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="of timm, instead of those that are found")
    parser.add_argument("--parameters", type=float, default=30e6, help="models of timm with more are left out (3e7)")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--again", action="store_true", help="forget the outcomes that are kept")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="pytest's: only these tests")
    options = parser.parse_args(arguments)
    if options.models and (unknown := {*options.models} - {*load("timm").list_models()}):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if options.again:
        for path in FOLDER.glob("*.jsonl"):
            path.unlink()
    found = models.found(FOLDER / "models.json", options.parameters)
    chosen = [(suite, run) for suite in options.suite for run in RUNS[suite] if run in (options.run or RUNS[suite])]
    results, every = [], not (options.models or options.k)
    for suite, run in chosen:
        results.append(compare_run(suite, run, found, options))
        results[-1]["unmet"] = results[-1]["unmet"] if every else []
        print("\n".join(compare.lines(results[-1])), flush=True)
    if every and len(chosen) == sum(map(len, RUNS.values())):
        where = environment(torch.device("cpu"), torch.float32) | {"suites": [pinned(name) for name in RUNS]}
        write_json(RESULT, {"environment": where, "models": asdict(found), "runs": results})
    return int(any(result["differences"] or result["unmet"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
