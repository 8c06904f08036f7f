"""Say what to install if a library of the extra `train` is missing, or is there and does not load."""

from __future__ import annotations

from collections.abc import Callable

from fastvit.cli import terminal


def guarded(main: Callable[[], int]) -> int:
    """Run an example and return its status; an error of the user's is one line and status 2. Examples import the
    libraries of the extra within `main`."""
    return terminal.guarded(lambda: _with_advice(main))


def _with_advice(main: Callable[[], int]) -> int:
    try:
        return main()
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        package = {"sklearn": "scikit-learn", "skimage": "scikit-image", "PIL": "pillow"}.get(name, name)
        raise ImportError(f'this needs {package}, which is not installed: pip install ".[train]"') from None
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        raise ImportError(
            f"torchvision does not load with this torch ({error}): install both from one index, as in the README"
        ) from None
