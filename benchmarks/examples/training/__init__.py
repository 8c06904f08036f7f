"""Training of an image classifier: data, recipe, models, the loop, and how runs are compared."""

import importlib.util


def check_installed(*modules: str) -> None:
    """Raise ImportError, with the command that helps, if one of these is missing or torchvision does not fit torch."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise ImportError(f'not installed: {", ".join(missing)}. Run pip install ".[train]" in the clone')
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:  # RuntimeError: its operators do not load
        how = 'install both of one build (README.md, "Install"), then pip install ".[train]"'
        raise ImportError(f"torchvision does not fit torch: {how}. It says: {error}") from None
