"""Build and load the C sources that lie next to Python modules.

Once a machine, as Triton builds its own launchers: with the C compiler that it needs anyway, and in its cache. Where
that does not work, callers have a slower way in Python."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType

import torch

_LIBRARIES = Path(torch.__file__).parent / "lib"
_why_not: dict[Path, str] = {}  # source -> why it could not be built or loaded


@functools.cache
def load(source: Path) -> ModuleType | None:
    """Return the module that the C source defines as `PyInit_<stem>`, linked with libtorch, or None; see `why_not`. The
    first build on a machine takes about a second."""
    try:
        build = importlib.import_module("triton.runtime.build")
        module: ModuleType = build.compile_module_from_src(
            src=source.read_text(),
            name=source.stem,
            library_dirs=[str(_LIBRARIES)],
            libraries=["torch_cpu", "torch_python"],
        )
        return module
    except Exception as error:  # of the import, the compiler or the linker, of which Triton documents none
        _why_not[source] = (str(error).splitlines() or [type(error).__name__])[0]
        return None


def why_not(source: Path) -> str | None:
    """Return why a source could not be built or loaded, or None if it was."""
    return _why_not.get(source)
