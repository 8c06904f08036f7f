"""Say what to install if a library of the extra `train` is missing, or is there and does not load."""

from __future__ import annotations

from collections.abc import Callable

from fastvit.cli import terminal

_INSTALLED_BY = '".[train]"'
_PACKAGES = {"sklearn": "scikit-learn", "skimage": "scikit-image", "PIL": "pillow"}


def guarded(main: Callable[[], int]) -> int:
    """Run an example and return its status; an error of the user's is one line and status 2. Examples import the
    libraries of the extra within `main`."""
    return terminal.guarded(lambda: _with_advice(main))


def _with_advice(main: Callable[[], int]) -> int:
    try:
        return main()
    except ImportError as error:
        text = str(error).replace("'fastvit[study]'", _INSTALLED_BY)
        if isinstance(error, ModuleNotFoundError) and error.name:
            name = error.name.split(".")[0]
            text = f"this needs {_PACKAGES.get(name, name)}, which is not installed: pip install {_INSTALLED_BY}"
        raise ImportError(text) from None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        raise ImportError(
            f"torchvision does not load with this torch ({error}): install both from one index, as in the README"
        ) from None
