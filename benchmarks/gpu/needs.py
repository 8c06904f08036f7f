"""Check before the first command that a run on a GPU has all that it needs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from fastvit.study.machine import why_no_gpu

_PACKAGES = {"triton": "triton", "pytest": "pytest", "pytest_benchmark": "pytest-benchmark"}  # module -> its package
_SCHEMES = (sysconfig.get_default_scheme(), "posix_prefix")  # Triton takes the second where the first is Debian's own


def complaint(*, rehearse: bool) -> str:
    """Return in a few lines why the run cannot begin, or ""."""
    if not rehearse and (reason := why_no_gpu()):
        return (
            f"make gpu needs a GPU: {reason}, in {sys.executable}.\n"
            "fastvit doctor says more; --rehearse runs every command in miniature without one."
        )
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    lines = [f"missing {', '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}"] * bool(missing)
    if not rehearse and (reason := missing_for_triton()):
        lines.append(reason)
    return "\n".join(f"make gpu: {line}" for line in lines)


def missing_for_triton() -> str:
    """Say what Triton needs to build its launchers and does not find here, or ""."""
    compilers = [os.environ.get("CC"), "gcc", "clang"]
    if not any(shutil.which(name) for name in compilers if name):
        return "no C compiler: Triton needs CC, gcc or clang for what launches its kernels"
    headers = [Path(sysconfig.get_paths(scheme)["include"]) / "Python.h" for scheme in _SCHEMES]
    if not any(header.exists() for header in headers):
        return f"no {headers[0]}: Triton compiles what launches its kernels with it"
    return ""
