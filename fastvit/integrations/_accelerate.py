"""Putting fused forwards onto the modules of a model, and taking them off again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from fastvit.fuse import Unsupported, qualified_name
from fastvit.integrations import dinov2, generic, timm, torchvision, transformers
from fastvit.integrations._plan import Plan, fused_forward
from fastvit.integrations._report import Entry, Report, Status

_FAMILIES = (timm, transformers, torchvision, dinov2)
PLANS: dict[type | str, Plan] = {name: plan for family in (generic, *_FAMILIES) for name, plan in family.PLANS.items()}
EMBEDDINGS: dict[str, str] = {name: attr for family in _FAMILIES for name, attr in family.EMBEDDINGS.items()}


def accelerate(model: nn.Module, *, strict: bool = False) -> Report:
    """Makes the model's attention, MLP, LayerNorm, residual and patch embedding run as fused ops, in place.

    The instance keeps its modules, parameters (the same tensors), state_dict keys, hooks, dtype, device and mode: only
    the `forward` of modules of known classes is replaced, exactly of those classes and never of subclasses, as an
    attribute of the instance. Known are the Vision Transformers of timm, Hugging Face transformers 5, torchvision and
    Meta's DINOv2, and nn.LayerNorm anywhere. Call it before torch.compile. Calling it again starts afresh.

    Each accelerated module holds itself through its forward: memory of a deleted model is freed at the next garbage
    collection, or at once after `restore`. nn.DataParallel and torch.jit.script need the model restored.

    What an op cannot do is left to the module's own forward: for a module at once (qk-norm, adapters, hooks inside a
    fused span), with the reason in the report; for a call (an attention mask, attention weights asked for, hooks added
    later) with one warning.

    Args:
        model: any module.
        strict: raise if a module is skipped.

    Returns:
        A report of every module; printed, it is a table.

    Raises:
        TypeError: model is no nn.Module.
        ValueError: with strict, listing the skipped modules and reasons; or the model is compiled already. The model is
            then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ValueError(f"model is compiled already ({name or type(module).__name__}): accelerate it before")
    restore(model)
    decisions = list(_decide(model, "", set()))
    report = Report(tuple(entry for entry, _, _ in decisions))
    if strict and report.skipped:
        raise ValueError(f"strict: {len(report.skipped)} modules cannot be accelerated\n{report}")
    for _, module, plan in decisions:
        if plan is not None:
            module.forward = partial(fused_forward, plan, module)
    return report


def restore(model: nn.Module) -> None:
    """Takes off what `accelerate` put on; without effect on a model that is not accelerated."""
    for module in model.modules():
        if _is_ours(module.__dict__.get("forward")):
            del module.__dict__["forward"]


@contextlib.contextmanager
def accelerated(model: nn.Module, *, strict: bool = False) -> Iterator[Report]:
    """`accelerate`, with its model and strict, within the context, and `restore` at its end; gives the report."""
    report = accelerate(model, strict=strict)
    try:
        yield report
    finally:
        restore(model)


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func is fused_forward


_Decision = tuple[Entry, nn.Module, Plan | None]


def _decide(module: nn.Module, name: str, seen: set[int], plan: Plan | None = None) -> Iterator[_Decision]:
    """What happens to a module and to those in it, in the order of named_modules(). plan: from its parent, or None."""
    if id(module) in seen:
        return
    seen.add(id(module))
    kind = type(module).__name__
    if qualified_name(module).startswith("fastvit."):
        yield Entry(name, kind, "as it was", "fused already"), module, None
        yield from _rest(module, name, seen, "as it was", "fused already")
        return
    plan = plan or PLANS.get(type(module)) or PLANS.get(qualified_name(module))
    reason = None
    if plan is not None:
        try:
            if "forward" in module.__dict__:
                raise Unsupported("it has a forward of its own")
            plan.read(module)
        except Unsupported as unsupported:
            reason = str(unsupported)
        else:
            yield Entry(name, kind, "accelerated", plan.ops), module, plan
            yield from _rest(module, name, seen, "part of", name)
            return
    inside: list[_Decision] = []
    for child_name, child in module.named_children():
        is_patches = EMBEDDINGS.get(qualified_name(module)) == child_name and type(child) is nn.Conv2d
        child_name = f"{name}.{child_name}" if name else child_name
        inside += _decide(child, child_name, seen, generic.PATCHES if is_patches else None)
    if plan is None and _looks_fusible(module, {id(child): entry.status for entry, child, _ in inside}):
        reason = f"{kind} is not a class that fastvit knows"
    yield Entry(name, kind, "skipped" if reason else "as it was", reason or ""), module, None
    yield from inside


def _rest(module: nn.Module, name: str, seen: set[int], status: Status, detail: str) -> Iterator[_Decision]:
    """The same for all that is in a module and not seen yet."""
    for child_name, child in module.named_modules(prefix=name):
        if id(child) not in seen:
            seen.add(id(child))
            yield Entry(child_name, type(child).__name__, status, detail), child, None


# Class names of what the ops are for
_FUSIBLE = re.compile(
    r"att(entio)?n|mlp|ffn|feed_?forward|swiglu|block|layer_?norm|rms_?norm|patch_?embed", re.IGNORECASE
)


def _looks_fusible(module: nn.Module, statuses: dict[int, Status]) -> bool:
    """Whether an unknown module, by its name, does by itself what the ops are for: with parameters of its own, or with
    layers of which nothing is accelerated or skipped already."""
    if not _FUSIBLE.search(type(module).__name__):
        return False
    layers = [child for child in module.children() if isinstance(child, nn.Linear | nn.Conv2d)]
    return bool(module._parameters) or any(statuses.get(id(layer)) == "as it was" for layer in layers)
