"""Which triton belongs to the installed torch, told without importing either of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

TESTED = {"2.11": "3.6.0", "2.13": "3.7.1", "2.15": "3.9.0"}  # torch -> triton


def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def how_to_install() -> str:
    """Return pip's command for the version that the installed torch requires, as its builds for GPUs do, or else the
    version that was tested with it."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return "pip install triton"
    required = re.search(r"^(pytorch-)?triton(-\w+)? *== *[\w.+]+", "\n".join(torch.requires or ()), re.MULTILINE)
    tested = TESTED.get(minor(torch.version))
    package = required[0].replace(" ", "") if required else f"triton=={tested}" if tested else "triton"
    return f"pip install {package}, which belongs to torch {torch.version}"


def minor(version: str) -> str:
    """Shorten a version, "2.13.0+cpu" to "2.13"."""
    return ".".join(version.split(".")[:2])


def check(what: str) -> None:
    """Raise ImportError, with the command to install it, if triton is missing.

    Args:
        what: the part of fastvit that needs it.
    """
    if not is_installed():
        raise ImportError(f"{what} needs triton, which is not installed: {how_to_install()}")
