"""The version of fastvit."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fastvit")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0.0.0+unknown"
