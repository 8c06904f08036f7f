"""Point `fastvit.kernels` at the folder `kernels` of this checkout.

A wheel has the device code in this place instead (pyproject.toml). A symbolic link would not do: git on Windows writes
a text file for it.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "kernels")]
