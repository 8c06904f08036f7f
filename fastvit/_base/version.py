"""The versions of installed packages, fastvit's among them."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


__version__ = version_of("fastvit") or "0.0.0+unknown"  # a checkout on the path need not be installed
