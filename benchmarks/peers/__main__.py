"""The tests of timm and transformers on accelerated models: `make peers`.

    python -m benchmarks.peers                              both suites
    python -m benchmarks.peers --suite timm -k "fx and not backward"

Both come from the sdists at the versions of constraints.txt, downloaded into out/peers: timm's tests with `accelerate`
on every model that `timm.create_model` makes, and transformers' ModelTesterMixin with `accelerate` on every model.
Tests that fail run again without fastvit: what passes there is a difference, and makes the exit status 1. Differences
that are meant are in deliberate.toml, with the reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.provenance import ROOT

FOLDER = ROOT / "out" / "peers"
PARAMETERIZED = "parameterized==0.9.0"  # transformers' tests import it


def download(name: str) -> Path:
    """Download and unpack an sdist; returns its folder."""
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith(f"{name}=="))
    folder = FOLDER / pinned.replace("==", "-")
    if not folder.is_dir():
        pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(FOLDER), pinned)
        subprocess.run(["tar", "xzf", f"{folder}.tar.gz", "-C", str(FOLDER)], check=True)
    return folder


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def run_tests(suite: str, folder: Path, *options: str) -> int:
    """Run a suite in a pytest of its own, and return its status."""
    packages = FOLDER / "packages"
    if suite == "timm":
        chosen = [str(path) for path in sorted(folder.glob("tests/test_*.py")) if "create_model" in path.read_text()]
        chosen += ["-c", str(folder / "pyproject.toml")]
    else:
        if not packages.is_dir():
            pip("install", "--no-deps", "--target", str(packages), PARAMETERIZED)
        chosen = [str(ROOT / "benchmarks/peers/transformers_suite.py"), "-c", os.devnull, "--noconftest"]
    paths = [str(ROOT), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"FASTVIT_PEERS_TESTS": str(folder / "tests"), "PYTHONPATH": os.pathsep.join(paths)}
    environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-m", "pytest", *chosen, "--rootdir", str(folder), "-p", "benchmarks.peers.plugin"]
    command += ["-o", f"cache_dir={FOLDER / suite}", "-q", "--tb=line", "--disable-warnings", *options]
    return subprocess.run(command, cwd=folder, env=environ).returncode


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("timm", "transformers"), nargs="+", default=("timm", "transformers"))
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="pytest's: only these tests")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    statuses = []
    for suite in options.suite:
        folder = download(suite)
        common = ["-n", "2", "--max-worker-restart", "20", *(["-k", options.k] if options.k else [])]
        status = run_tests(suite, folder, "--accelerate", *common)
        statuses.append(run_tests(suite, folder, "--last-failed", "-rp", *common) if status == 1 else status)
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
