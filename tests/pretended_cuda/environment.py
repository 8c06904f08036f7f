"""The environment of the pretended CUDA: torch built for CUDA, and none of NVIDIA's packages.

PRETENDED_TORCH chooses another version of torch than that of constraints.txt; each has a folder of its own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
TORCH = os.environ.get("PRETENDED_TORCH") or next(p.partition("==")[2] for p in PINS if p.startswith("torch=="))
HOME = ROOT / "out/cuda" / f"{TORCH}-cp3{sys.version_info.minor}"
PYTHON = HOME / "bin/python"
SITE = HOME / f"lib/python3.{sys.version_info.minor}/site-packages"
LIBRARIES = HOME / "pretended"
HEADERS = HOME / "headers"
ROOM = 7e9  # bytes for this environment and for .venv, which CI makes at the same time, and for what pip unpacks
REQUIREMENTS = [f"{ROOT}[bench,study,triton,weights]", "pytest-xdist", "timm", "torchvision", "transformers>=5"]


def pip(*arguments: str) -> str:
    """Run `pip install`. A user's configuration may name an index of CPU builds, so it does not count."""
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env=os.environ | {"PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True)
    return done.stderr.strip() or "pip gave no reason" if done.returncode else ""


def make() -> None:
    """Make the environment, or bring it up to date. SystemExit says in a sentence why it cannot be had."""
    made, pins = HOME / "made", HOME / "constraints.txt"
    sources = (ROOT / "pyproject.toml", ROOT / "constraints.txt", HERE / "environment.py")
    wanted = "".join(source.read_text() for source in sources)
    if made.exists() and made.read_text() == wanted:
        return
    is_new, free = not (SITE / "torch").exists(), shutil.disk_usage(ROOT).free
    if is_new and free < ROOM:
        raise SystemExit(f"The pretended CUDA wants {ROOM / 1e9:.0f} GB of disk, and {free / 1e9:.1f} GB are free")
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
    if is_new:
        print(f"Installing torch {TORCH} for CUDA into {HOME.relative_to(ROOT)}: 530 MB, once", flush=True)
        # `===`: 2.13.0+cpu, which may lie on the disk, is another version
        if reason := pip("--no-deps", "--no-cache-dir", f"torch==={TORCH}"):
            raise SystemExit(f"The CUDA build of torch {TORCH} cannot be had: {reason.splitlines()[-1]}")
        (metadata,) = SITE.glob("torch-*.dist-info/METADATA")
        metadata.write_text(re.sub(r"Requires-Dist: (nvidia|cuda)-.*\n", "", metadata.read_text()))
    others = [pin for pin in PINS if not pin.startswith(("torch", "triton"))]
    pins.write_text("\n".join([f"torch==={TORCH}", *others]))  # torch itself pins triton, and torchvision pins torch
    if reason := pip("--constraint", str(pins), "--editable", *REQUIREMENTS):
        raise SystemExit(f"The environment of the pretended CUDA cannot be made: {reason.splitlines()[-1]}")
    # Those of triton 3.6, which torch 2.11 pins, are of CUDA 12.8. Not in SITE, where torch would load the libraries
    # that the packages have
    headers = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
    if not HEADERS.exists() and (reason := pip("--no-deps", "--target", str(HEADERS), *headers)):
        raise SystemExit(f"The headers of CUDA 13 cannot be had: {reason.splitlines()[-1]}")
    (SITE / "pretended_cuda.pth").write_text(f"{HERE}\nimport no_cudnn\n")
    made.write_text(wanted)
