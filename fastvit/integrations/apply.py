"""Give the modules of a model fused forwards, and remove them again: `accelerate`, `restore`, `accelerated`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Sized
from functools import partial

import torch
from torch import nn

from fastvit.blocks.recompute import is_fitted
from fastvit.blocks.stand_in import put_on, take_off
from fastvit.cuda_graphs import check_without_graphs, remove
from fastvit.integrations import pixels
from fastvit.integrations.decide import advice, decide, part
from fastvit.integrations.forward import fused_forward
from fastvit.integrations.libraries import pytorch
from fastvit.integrations.transformers import copies
from fastvit.modules.arguments import checked_statistics
from fastvit.report import Entry, Report


def accelerate(
    model: nn.Module, *, strict: bool = False, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Report:
    """Make the model's attention, MLP, norms, residual and patch embedding run as fused ops, in place.

    The model keeps its modules, parameters (the same tensors), state_dict keys, hooks, dtype, device and mode. Only the
    `forward` of modules of known classes is replaced, by an attribute of the instance; subclasses of known classes are
    left alone. Known are the Vision Transformers of timm, Hugging Face transformers 5, torchvision, open_clip (its
    towers of text, too) and Meta's DINOv2 and DINOv3, SAM, VitDet and Swin of timm and transformers, classes of
    transformers with the code of a known one, and norms of PyTorch, timm and open_clip in any model. Call it before
    torch.compile. A second call replaces the first.

    Each accelerated module refers to itself through its forward, so the memory of a deleted model is freed at the next
    garbage collection, or at once after `restore`. Deep copies and pickles are accelerated; shallow copies, and the
    replicas of nn.DataParallel, run the modules' own forwards. torch.jit.script needs the model restored;
    DistributedDataParallel and FSDP2 do not.

    A linear layer with a LoRA adapter of peft, added before or later, is called as a module between the fused ops; with
    the adapter merged or disabled it is fused like any other. A layer that torch.ao.quantization.quantize_dynamic or
    torchao has quantised is called as a module too.

    The module's own forward runs where no op can do the same. If that is known at once (a gate in attention, other
    adapters, hooks on fused modules, a forward replaced on a class), the report has the reason. If it shows in a call
    (a causal mask, attention weights asked for, hooks added later, a class or its forward replaced later), there is one
    warning for each class and reason. torch.fx traces the modules' own forwards.

    Args:
        model: any module.
        strict: raise if a module is skipped, or if the ops compute no module of the model. Modules with the status
            "as it was", such as a classifier or a convolution inside the network, are not skipped.
        mean, std: C values each, in [0, 1]. uint8 images (B, C, H, W) are then normalised to (x / 255 - mean) / std;
            float images are taken as they are. No float copy is made, except in models of transformers, which cast
            `pixel_values` before the patch embedding: forward pre-hooks normalise them there.

    Returns:
        A report on every module; printed, it is a table.

    Raises:
        TypeError: model is not an nn.Module.
        ValueError: strict, and modules are skipped (listed with reasons) or none is known; or the model is compiled
            or has graphs already, contains an nn.DataParallel, or recomputes what `fastvit.fit` chose; or mean and
            std do not fit, or the patch embedding pads its images. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_without_graphs(model)
    for name, module in model.named_modules():
        _check(name or "the model itself", module)
    channels = len(mean) if isinstance(mean, Sized) else 3  # a number is refused later, with a count in the message
    mean, std = checked_statistics(mean, std, channels)
    patches = pytorch.patches(mean, std)
    restore(model)  # checks that nothing was fitted
    for kind in {type(module) for module in model.modules()}:  # all, before layers check the classes of their parts
        copies.learn(kind)
    decisions = list(decide(model, patches, set()))
    embeddings = [decision.name for decision in decisions if decision.handler is patches]
    if mean is not None:
        pixels.check(model, embeddings, len(mean))
    entries = tuple(
        Entry(name, type(module).__name__, status, detail, part(module))
        for name, module, status, detail, _ in decisions
    )
    report = Report(entries, advice(decisions))
    if strict and report.skipped:
        raise ValueError(f"strict: {len(report.skipped)} modules cannot be accelerated\n{report}")
    if strict and not any(entry.fused for entry in entries):
        raise ValueError(
            f"strict: no module of this {type(model).__name__} is known, so nothing would be accelerated; "
            "torch.compile(model, backend='fastvit') finds blocks in classes of any library"
        )
    for name, module, _, _, handler in decisions:
        if handler is not None:
            put_on(module, partial(fused_forward, handler, module, type(module), name))
    if mean is not None and std is not None:
        pixels.put_on(model, embeddings, mean, std)
    return report


def _check(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.DataParallel):
        raise ValueError(
            f"model has an nn.DataParallel ({name}), whose replicas run the modules' own forwards: accelerate the "
            "module in it and run that on one device, or in DistributedDataParallel"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"model has a ScriptModule ({name}), whose forward cannot be replaced: accelerate the module that it was "
            "made of, which torch.compile and torch.export take"
        )
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        raise ValueError(f"model is compiled already ({name}): accelerate it before")


def restore(model: nn.Module) -> None:
    """Undo `graphs` and `accelerate`. Does nothing to another model.

    Raises:
        ValueError: `fastvit.fit` has chosen what blocks recompute.
    """
    for name, module in model.named_modules():
        if is_fitted(module):
            raise ValueError(f"{name} recomputes what fastvit.fit chose: call fastvit.unfit(model) before, fit after")
    remove(model)
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, partial) and forward.func is fused_forward:
            take_off(module)
    pixels.take_off(model)


@contextlib.contextmanager
def accelerated(
    model: nn.Module, *, strict: bool = False, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Iterator[Report]:
    """Accelerate a model within a context, and restore it at the end. The arguments model, strict, mean and std, the
    errors and the report are those of `accelerate`."""
    report = accelerate(model, strict=strict, mean=mean, std=std)
    try:
        yield report
    finally:
        restore(model)
