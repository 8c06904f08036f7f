"""Decide about every module of a model: whether it is fused, by which handler, why not, and what the report advises.

A module of a known class (`HANDLERS`) is fused if its reader can describe it. One of another class is guessed from its
class name and layers: if it does work that the ops are for, it is skipped, and the report says why.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from fastvit.blocks.read import LINEAR
from fastvit.blocks.spec import AdaptedLinear
from fastvit.blocks.submodules import CannotFuse, class_name, qualified_name
from fastvit.integrations.forward import ClassHandler, check_forward, parts_of, reason_of
from fastvit.integrations.libraries import dino, open_clip, pytorch, timm, torchvision
from fastvit.integrations.op_names import ops_that_run
from fastvit.integrations.transformers import families, grids, layers, varlen
from fastvit.report import FUSED_ALREADY, Status

_FILES = (pytorch, timm, layers, families, grids, varlen, torchvision, dino, open_clip)
# A view of the files' tables, which grow by the copies that `transformers/copies.py` finds
HANDLERS: ChainMap[Any, ClassHandler] = ChainMap(*(file.HANDLERS for file in _FILES))
EMBEDDINGS = timm.EMBEDDINGS | torchvision.EMBEDDINGS | dino.EMBEDDINGS | open_clip.EMBEDDINGS

_ATTENTION = re.compile(r"att(entio)?n", re.IGNORECASE)
_MLP = re.compile(r"(mlp|ffn|feed_?forward|swiglu)(?!.*head)", re.IGNORECASE)
_BLOCK = re.compile(r"block", re.IGNORECASE)
_NORM = re.compile(r"(layer|rms)_?norm(?!.*2d)", re.IGNORECASE)  # 2d: norms of images, not of tokens
_PATCHES = re.compile(r"patch_?embed", re.IGNORECASE)


class Decision(NamedTuple):
    """The outcome for a module: status and detail as in `Entry`; handler: of a module that gets a fused forward."""

    name: str
    module: nn.Module
    status: Status
    detail: str = ""
    handler: ClassHandler | None = None


def decide(
    module: nn.Module, patches: ClassHandler, seen: set[int], name: str = "", handler: ClassHandler | None = None
) -> Iterator[Decision]:
    """Decide about a module and all modules in it, in the order of named_modules().

    Args:
        module, name: the module, and its name in the model.
        patches: the handler of a patch embedding's convolution.
        seen: ids of the modules that are decided about.
        handler: the module's, if its parent determines it.
    """
    if id(module) in seen:
        return
    if qualified_name(module).startswith("fastvit."):
        yield from _all_in(module, name, seen, "as it was", FUSED_ALREADY)
        return
    seen.add(id(module))
    handler = handler or HANDLERS.get(type(module)) or HANDLERS.get(qualified_name(module))
    reason = None
    if handler is not None:
        try:
            if "forward" in module.__dict__:
                raise CannotFuse("it has a forward of its own")
            check_forward(module, type(module))
            description = handler.read(module)
        except Exception as error:
            reason = None if _convolutions(module) and not _linear_layers(module) else reason_of(error)
        else:
            yield Decision(name, module, "accelerated", ops_that_run(module, description, handler.op), handler)
            called = {id(inner) for call in parts_of(description, AdaptedLinear) for inner in call.module.modules()}
            yield from _all_in(module, name, seen, "part of", name, called)
            return
    inside: list[Decision] = []
    for child_name, child in module.named_children():
        is_patches = type(child) in (nn.Conv2d, nn.Conv3d) and _embeds_patches(module, child_name)
        child_name = f"{name}.{child_name}" if name else child_name
        inside += decide(child, patches, seen, child_name, patches if is_patches else None)
    left = {id(decision.module) for decision in inside if decision.status == "as it was"}
    if handler is None and _could_be_fused(module, left):
        reason = _why_not_known(module)
    yield Decision(name, module, "skipped" if reason else "as it was", reason or "")
    yield from inside


def _embeds_patches(module: nn.Module, name: str) -> bool:
    """Return whether a module's convolution of that name embeds patches."""
    kind = qualified_name(module)
    if not kind.startswith("transformers.models."):
        return EMBEDDINGS.get(kind) == name
    return name.startswith("patch_") or (name in ("proj", "projection") and "Embed" in type(module).__name__)


def _all_in(
    module: nn.Module, name: str, seen: set[int], status: Status, detail: str, called: Collection[int] = ()
) -> Iterator[Decision]:
    """Decide the same for a module and all modules in it that are not in `seen`. called: ids of those that run as
    modules."""
    for child_name, child in module.named_modules(prefix=name):
        if id(child) not in seen:
            seen.add(id(child))
            layers = _linear_layers(child) if part(child) == "MLP" else [child]
            if all(id(layer) in called for layer in layers):
                yield Decision(child_name, child, "as it was", f"called in {name}")
            else:
                yield Decision(child_name, child, status, detail)


def advice(decisions: Sequence[Decision]) -> tuple[str, ...]:
    """Say what to try for attention and MLPs that are skipped because their class is not known."""
    skipped = [module for _, module, status, _, _ in decisions if status == "skipped" and part(module)]
    kinds = dict.fromkeys(type(module).__name__ for module in skipped if qualified_name(module) not in HANDLERS)
    return (f'to fuse {", ".join(kinds)}, try torch.compile(model, backend="fastvit")',) if kinds else ()


# ---- modules of unknown classes ----


def part(module: nn.Module) -> Literal["attention", "MLP"] | None:
    """Return "attention" or "MLP" for a transformer's module that contains no other of its kind, otherwise None. It has
    linear layers: attention and MLPs made of convolutions do not count."""
    inside = list(module.modules())[1:]
    if _is_attention(module):
        return None if any(map(_is_attention, inside)) else "attention"
    return "MLP" if _is_mlp(module) and not any(map(_is_mlp, inside)) else None


def _is_attention(module: nn.Module) -> bool:
    if not _ATTENTION.search(type(module).__name__):
        return False
    return _linear_count(module) > 1 or any(p is not None and p.dim() > 1 for p in module._parameters.values())


def _is_mlp(module: nn.Module) -> bool:
    return bool(_MLP.search(type(module).__name__)) and _linear_count(module) > 1


def _linear_count(module: nn.Module) -> int:
    return sum(map(_is_linear, module.modules()))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or qualified_name(module) in LINEAR


def _linear_layers(module: nn.Module) -> list[nn.Module]:
    """Return the linear layers among a module's children, adapted and quantised ones included."""
    return [child for child in module.children() if _is_linear(getattr(child, "base_layer", child))]


def _convolutions(module: nn.Module) -> list[nn.Module]:
    """Return the convolutions among a module's children, adapted ones included."""
    return [child for child in module.children() if isinstance(getattr(child, "base_layer", child), nn.Conv2d)]


def _could_be_fused(module: nn.Module, left: set[int]) -> bool:
    """Return whether a module does work that the ops are for. left: ids of the modules in it that stay as they were."""
    name = type(module).__name__
    if _NORM.search(name):
        if getattr(module, "data_format", None) == "channels_first":  # transformers' norms of images (B, C, H, W)
            return False
        return any(parameter is not None for parameter in module._parameters.values())
    if _PATCHES.search(name):
        return any(id(layer) in left for layer in _convolutions(module))
    plain = [layer for layer in _linear_layers(module) if id(layer) in left]
    return part(module) == "attention" or (len(plain) > 1 and bool(_MLP.search(name) or _BLOCK.search(name)))


def _why_not_known(module: nn.Module) -> str:
    """Return why a module is skipped: its class is not known, or its convolution does not embed patches."""
    name = class_name(type(module), HANDLERS)
    if _PATCHES.search(type(module).__name__):
        reasons = [why for conv in _convolutions(module) if (why := _why_no_patches(conv))]
        if reasons:
            return f"{' and '.join(reasons)}, in {name}"
    return f"{name}{',' * (',' in name)} is not a class that fastvit knows"


def _why_no_patches(conv: nn.Module) -> str | None:
    if type(conv) is not nn.Conv2d:
        return f"its convolution is {class_name(type(conv))}"
    try:
        pytorch.read_patches(conv)
    except CannotFuse as error:
        return str(error)
    return None
