"""Options and helpers that `tune` and `warmup` share: which step of which model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fastvit.cli import options

if TYPE_CHECKING:
    from fastvit.study.sources.model_source import ModelSource
    from fastvit.tuning.calls import OpCall

DTYPES = ("fp32", "tf32", "bf16", "fp16", "amp")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add --image-size, --dtype and --mode."""
    options.add_image_size(parser)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="tf32: float32 with matmuls in TF32; amp: under autocast to bf16",
    )
    parser.add_argument("--mode", choices=("train", "infer", "both"), default="both", help="whose kernels")


def modes(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the modes of the steps that were asked for."""
    return ("infer", "train") if args.mode == "both" else (args.mode,)


def calls(source: ModelSource, args: argparse.Namespace, batch: int) -> list[OpCall]:
    """Return the fused ops of the steps that were asked for. Sets PyTorch's precision of float32 matmuls for them."""
    import torch

    from fastvit.tuning.calls import calls_of

    size, _ = source.sizes(args.image_size)
    torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
    dtype = "fp32" if args.dtype == "tf32" else args.dtype
    return calls_of(source, size, batch, dtype, modes(args))


def in_words(source: ModelSource, args: argparse.Namespace, *batches: int) -> str:
    """Describe the step, such as "vit_base_patch16_224, batch 32, 224 px, bf16"."""
    from fastvit.study.sources.model_source import pixels

    size, _ = source.sizes(args.image_size)
    return f"{source.name}, batch {', '.join(map(str, batches))}, {pixels(size)} px, {args.dtype}"
