"""The tests of timm and transformers on accelerated models: `make peers`.

    python -m benchmarks.peers                              both suites
    python -m benchmarks.peers --suite timm -k "fx and not backward"

Both come from the sdists at the versions of constraints.txt, downloaded into out/peers: timm's tests with `accelerate`
on every model that `timm.create_model` makes, and transformers' ModelTesterMixin with `accelerate` on every model.
Tests that fail run again without fastvit: what passes there is a difference, and makes the exit status 1. Differences
that are meant are in deliberate.toml, with the reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import program
from benchmarks.harness.provenance import ROOT
from fastvit.cli.terminal import guarded

FOLDER = ROOT / "out" / "peers"
PACKAGES = FOLDER / "packages"
SUITES = ("timm", "transformers")
IMPORTED = ("parameterized==0.9.0", "expecttest==0.3.0")  # by tests of transformers, of timm


def download(name: str) -> Path:
    """Download and unpack an sdist, and install what its tests import; returns its folder."""
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith(f"{name}=="))
    folder = FOLDER / pinned.replace("==", "-")
    if not folder.is_dir():
        say(f"downloading {pinned} into {FOLDER}")
        pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(FOLDER), pinned)
        subprocess.run(["tar", "xzf", f"{folder}.tar.gz", "-C", str(FOLDER)], check=True)
    if not (PACKAGES / "expecttest").is_dir():
        say(f"installing {' '.join(IMPORTED)} into {PACKAGES}")
        pip("install", "--no-deps", "--target", str(PACKAGES), *IMPORTED)
    return folder


def say(text: str) -> None:
    print(f"benchmarks.peers: {text}", file=sys.stderr, flush=True)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def run_tests(suite: str, folder: Path, *options: str) -> int:
    """Run a suite in a pytest of its own, and return its status."""
    if suite == "timm":
        chosen = [str(path) for path in sorted(folder.glob("tests/test_*.py")) if "create_model" in path.read_text()]
        chosen += ["-c", str(folder / "pyproject.toml")]
    else:
        chosen = [str(ROOT / "benchmarks/peers/transformers_suite.py"), "-c", os.devnull, "--noconftest"]
    paths = [str(ROOT), str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"FASTVIT_PEERS_TESTS": str(folder / "tests"), "PYTHONPATH": os.pathsep.join(paths)}
    environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-m", "pytest", *chosen, "--rootdir", str(folder), "-p", "benchmarks.peers.plugin"]
    command += ["-o", f"cache_dir={FOLDER / suite}", "-q", "--tb=line", "--disable-warnings", *options]
    process = subprocess.Popen(command, cwd=folder, env=environ)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # until pytest has ended its workers
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = program.parser("benchmarks.peers", __doc__)
    parser.add_argument("--suite", choices=SUITES, nargs="+", metavar="SUITE", help="timm, transformers (default: all)")
    parser.add_argument("-k", metavar="EXPRESSION", help="pytest's: only these tests")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    statuses = []
    for suite in options.suite or SUITES:
        folder = download(suite)
        common = ["-n", "2", "--max-worker-restart", "20", *(["-k", options.k] if options.k else [])]
        say(f"{suite}'s tests with fastvit")
        status = run_tests(suite, folder, "--accelerate", "--cache-clear", *common)
        if status == 1:
            say("what failed, without fastvit")
            status = run_tests(suite, folder, "--last-failed", "-rp", *common)
        statuses.append(status)
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(guarded(main, name="benchmarks.peers"))
