"""Tell the hooks that a model needs from those of its user, which do not run while it is planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

# Whose hooks a model may need in order to run: weight_norm, spectral_norm and pruning, normalisation of uint8 images,
# gradients of inputs for adapters
_LIBRARIES = ("torch.nn.utils.", "fastvit.", "timm.", "transformers.", "peft.")
_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = [f"_global{name}" for name in _OF_MODULES]


@contextlib.contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Within the context, let hooks on the model's modules and global hooks do nothing: tensors of a plan have no
    values that a hook could read.

    Hooks of `_LIBRARIES`, and methods of the model's own modules, run. Others are replaced, not removed, because a
    block with hooks on its submodules does not run fused.
    """
    modules, replaced = {*model.modules()}, []
    registries = [vars(module)[name] for module in modules for name in _OF_MODULES]
    registries += [getattr(torch_module, name) for name in _GLOBAL]
    for hooks in registries:
        for key, hook in hooks.items():
            if not _is_needed(hook, modules):
                replaced.append((hooks, key, hook))
                hooks[key] = _do_nothing
    try:
        yield
    finally:
        for hooks, key, hook in replaced:
            hooks[key] = hook


def has_foreign_hooks(model: nn.Module) -> bool:
    """Tell whether a module in the model, but not the model itself, has hooks that the model does not need."""
    modules = {*model.modules()}
    own = [hook for m in modules - {model} for name in _OF_MODULES for hook in vars(m)[name].values()]
    return not all(_is_needed(hook, modules) for hook in own)


def has_global_hooks() -> bool:
    """Tell whether there are hooks on all modules."""
    return any(getattr(torch_module, name) for name in _GLOBAL)


def _is_needed(hook: Any, modules: set[nn.Module]) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    owner, defined_in = getattr(hook, "__self__", None), str(getattr(hook, "__module__", ""))
    return (isinstance(owner, nn.Module) and owner in modules) or defined_in.startswith(_LIBRARIES)


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand for a hook."""
