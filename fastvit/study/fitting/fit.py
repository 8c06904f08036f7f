"""Make a training step of a model fit into a memory budget: `fit` chooses what its blocks recompute, `unfit` undoes
it."""

from __future__ import annotations

import warnings

from torch import nn

from fastvit.blocks.recompute import recompute_as_by_default
from fastvit.modules.arguments import Pair
from fastvit.study.fitting.choices import put_on
from fastvit.study.fitting.costs import blocks_of
from fastvit.study.fitting.planning import plan_fit
from fastvit.study.fitting.report import Fit, count_of_images, size_in_words
from fastvit.study.memory.growth import checked_budget, checked_device
from fastvit.study.memory.step import Setting, StepSpec
from fastvit.study.sources.find import from_module
from fastvit.study.sources.model_source import DTYPES

# By name: to import some of them takes seconds
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "CheckpointWrapper")


def fit(
    model: nn.Module, *, budget: int | str, batch: int, image_size: Pair | None = None, optimizer: str = "adamw",
    dtype: str | None = None, device: str | None = None,
) -> Fit:  # fmt: skip
    """Let the model's blocks recompute as little as makes a training step fit into a memory budget, in place.

    The peak of every choice is planned on fake tensors: nothing is allocated, and the choices are the cheapest by the
    FLOPs that are computed again. Our models and models that `accelerate` knows recompute parts of blocks, without
    their last matmuls; blocks of other models are recomputed as a whole. The gradients are those without it, dropout
    included. Parameters, keys and modules stay as they are. Call it after `accelerate` and after adapters are added,
    before torch.compile, DistributedDataParallel and FSDP2. A second call replaces the first. Hooks do not run, except
    methods of the model's own modules and hooks of torch.nn.utils, timm, transformers and peft, such as weight_norm's.

        report = fastvit.fit(model, budget="24GiB", batch=64, image_size=518, dtype="amp")
        print(report)

    If a step of `batch` does not fit, the choices are for batches of `report.micro_batch` images, of which
    `report.accumulation` accumulate their gradients for a step (0: no accumulation fits), and a warning says so.

    Args:
        model: any module with a list of blocks of one class that takes images (B, C, H, W), or transformers' VideoMAE,
            ViViT, TimeSformer and V-JEPA 2 (without its predictor) with the number of frames of their configuration.
        budget: bytes, or text such as "24GiB". Memory that is not planned has to stay free: of the vendor's libraries
            (the usual copies of convolutions on a CPU are planned) and of a caching allocator, on a GPU the CUDA
            context, and with DistributedDataParallel its buckets, a copy of the gradients.
        batch: images of one step, on one device.
        image_size: an integer or (height, width); None for the size that the model names.
        optimizer: whose state and step are planned: "adamw", "sgd" (with momentum) or "none".
        dtype: "amp" for autocast to bfloat16; None for the parameters' own.
        device: "cuda" or "cpu"; None for the parameters' device.

    Returns:
        A report; printed, it says in a few lines what is recomputed.

    Raises:
        TypeError: model is no nn.Module.
        ValueError: not even one image fits; the model is compiled, distributed or checkpointed already, or has no list
            of blocks that run once each; and other wrong arguments. The model is unchanged then.
    """
    _check(model)
    source = from_module(model)
    size, _ = source.sizes(image_size)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None:
        raise ValueError(f"{type(model).__name__} has no parameters")
    dtype = dtype or next((name for name, of in DTYPES.items() if of is parameter.dtype), None)
    if dtype is None:
        raise ValueError(f"model must have parameters of {', '.join(DTYPES)}, got {parameter.dtype}")
    gpu = checked_device(device or ("cuda" if parameter.is_cuda else "cpu")) == "cuda"
    plan = plan_fit(StepSpec(source, size, batch, Setting("train", dtype, optimizer), gpu), checked_budget(budget))
    if not plan.micro_batch:
        raise ValueError(
            f"budget is {size_in_words(plan.budget)}, but a step of one image takes {size_in_words(plan.peak)} even "
            "if all blocks recompute" + " (text such as 24GiB names a unit)" * isinstance(budget, int)
        )
    if not plan.fits:
        alone = f"without accumulation {count_of_images(plan.largest_batch)} would"
        if plan.accumulation:
            alone = f"{plan.accumulation} batches of {plan.micro_batch} with accumulated gradients do; {alone}"
        warnings.warn(f"a batch of {batch} does not fit: {alone}", stacklevel=2)
    for block, choice in zip(blocks_of(model).values(), plan.choices, strict=True):
        put_on(block, choice)
    return plan


def unfit(model: nn.Module) -> None:
    """Undo `fit`. Does nothing to another model."""
    for module in model.modules():
        recompute_as_by_default(module)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    for name, part in model.named_modules():
        where, kind = name or "the model itself", type(part).__name__
        if part._compiled_call_impl is not None or hasattr(part, "_orig_mod"):
            raise ValueError(f"model is compiled already ({where}): fit it before")
        if kind in _WRAPPERS:
            raise ValueError(f"model has a {kind} already ({where}): fit it before")
        if any(getattr(part, flag, False) is True for flag in ("grad_checkpointing", "gradient_checkpointing")):
            raise ValueError(f"model recomputes whole blocks already ({where}): switch its checkpointing off")
    if any(type(p).__name__ == "DTensor" for p in model.parameters()):
        raise ValueError("model is sharded already: fit it before fully_shard")
