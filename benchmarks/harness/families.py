"""Models of other libraries that `fastvit.accelerate` knows: architectures, small and whole, with random weights.

    python -m benchmarks.harness.families benchmarks/results/cpu/families.json

runs every architecture whole at its own image size, untouched and accelerated, writes the agreement and what is fused,
and `python -m benchmarks.report.results` makes a table of it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastvit
from benchmarks.harness.clock import Clock, Quantiles
from benchmarks.harness.columns import make
from benchmarks.harness.libraries import load, randomize
from benchmarks.harness.provenance import write_json
from benchmarks.harness.record import environment


@dataclass(frozen=True)
class Architecture:
    """small, whole: arguments that make a test's model (two blocks, a small image) and the model people use."""

    library: str
    name: str
    build: Callable[..., nn.Module]
    small: dict[str, Any]
    whole: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.library}-{self.name}"

    def model(self, *, whole: bool = False, seed: int = 0) -> nn.Module:
        """Build the model in evaluation mode, with random weights."""
        torch.manual_seed(seed)
        model = self.build(self.name, **(self.whole if whole else self.small)).eval()
        randomize(model)
        return model

    def image(self, model: nn.Module, batch: int) -> Tensor:
        """Draw images (B, C, H, W), or videos (B, T, C, H, W) as transformers' models take them."""
        shape = (*frames(model), 3, *image_size(model))
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1))


def image_size(model: Any) -> tuple[int, int]:
    """Return (height, width) as timm, transformers or torchvision stores it."""
    if hasattr(model, "patch_embed"):
        H, W = model.patch_embed.img_size
        return H, W
    config = getattr(model, "config", model)
    size = config.crop_size if hasattr(config, "crop_size") else config.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def frames(model: Any) -> tuple[int, ...]:
    """Return (T,) for a model of videos, () for one of images."""
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in ("num_frames", "frames_per_clip"))
    return tuple(count for count in found if count is not None)


def output(result: Any) -> Tensor:
    """Return the logits; for a headless model all tokens, joined with the pooled ones where they exist."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, tuple) and not hasattr(result, "last_hidden_state"):
        return torch.cat([t.flatten(1) for t in result], 1)
    if getattr(result, "logits", None) is not None:
        return result.logits
    pooled = getattr(result, "pooler_output", None)
    tokens = result.last_hidden_state
    return tokens if pooled is None else torch.cat([tokens, pooled[:, None]], 1)


def _timm(name: str, **options: Any) -> nn.Module:
    return load("timm").create_model(name, **options)


def _transformers(name: str, **options: Any) -> nn.Module:
    transformers = load("transformers")
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


def _torchvision(name: str, **options: Any) -> nn.Module:
    models = load("torchvision").models
    return models.VisionTransformer(**options) if options else getattr(models, name)()


def _hugging_face(name: str, **whole: Any) -> Architecture:
    small = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    if "Dinov2" not in name:
        small["intermediate_size"] = 160
    elif "mlp_ratio" in whole:
        small["mlp_ratio"] = 2
    if "DINOv3" in name:
        small["num_register_tokens"] = 4
    if name.startswith("VideoMAE"):
        small["num_frames"] = 4
    elif name.startswith("VJEPA2"):
        of_layers = {
            key: small[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size")
        }
        small = {**whole, **of_layers, "crop_size": small["image_size"], "frames_per_clip": 4}
    return Architecture("transformers", name, _transformers, small, whole)


def _small_timm(name: str, img_size: int, **more: Any) -> Architecture:
    return Architecture("timm", name, _timm, {"img_size": img_size, "depth": 2, **more}, {})


def _small_torchvision(name: str, patch: int, D: int, heads: int) -> Architecture:
    small = {"image_size": 4 * patch, "patch_size": patch, "num_layers": 2, "num_heads": heads}
    return Architecture("torchvision", name, _torchvision, small | {"hidden_dim": D, "mlp_dim": 2 * D}, {})


ARCHITECTURES = [
    _small_timm("vit_tiny_patch16_224", 64),
    _small_timm("vit_small_patch32_224", 96, drop_path_rate=0.2),
    _small_timm("vit_base_patch16_224", 64),
    _small_timm("vit_base_patch16_clip_quickgelu_224", 64),
    _small_timm("vit_base_patch32_clip_224", 96),
    _small_timm("vit_base_patch16_siglip_gap_224", 64),
    _small_timm("vit_base_patch16_siglip_224", 64),
    _small_timm("vit_so400m_patch14_siglip_224", 56),
    _small_timm("vit_medium_patch16_gap_240", 64),
    _small_timm("vit_huge_patch14_224", 56),
    _small_timm("deit_tiny_patch16_224", 64),
    _small_timm("deit_small_distilled_patch16_224", 64),
    _small_timm("deit3_small_patch16_224", 64),
    _small_timm("vit_small_patch14_dinov2", 70),
    _small_timm("vit_small_patch14_reg4_dinov2", 70),
    _small_timm("vit_small_patch16_rope_224", 64),
    _small_timm("vit_small_patch16_dinov3", 64),
    _small_timm("vit_small_patch16_dinov3_qkvb", 64),
    _small_timm("vit_small_plus_patch16_dinov3", 64),
    _small_timm("eva02_base_patch14_224", 56),
    _small_timm("vit_pe_spatial_tiny_patch16_512", 64),
    _small_timm("eva02_base_patch16_clip_224", 64, embed_dim=192, num_heads=3),
    _small_timm("beit3_base_patch16_224", 64, embed_dim=192, num_heads=3),
    _small_timm("aimv2_large_patch14_224", 56, embed_dim=256, num_heads=2),
    _hugging_face("ViTForImageClassification"),
    _hugging_face("DeiTForImageClassification"),
    _hugging_face("Dinov2Model", image_size=518, patch_size=14),
    _hugging_face("Dinov2WithRegistersModel", image_size=518, patch_size=14),
    _hugging_face("DINOv3ViTModel"),
    _hugging_face("CLIPVisionModel"),
    _hugging_face("SiglipVisionModel"),
    _hugging_face("Aimv2VisionModel"),
    _hugging_face("InternVLVisionModel"),
    _hugging_face("VideoMAEModel", use_mean_pooling=False),
    # a few frames, and without the predictor's layers, which are the encoder's
    _hugging_face("VJEPA2Model", frames_per_clip=8, pred_num_hidden_layers=0),
    _small_torchvision("vit_b_16", 16, 192, 3),
    _small_torchvision("vit_b_32", 32, 128, 2),
    _small_torchvision("vit_h_14", 14, 160, 2),
]


VIT_B_16: dict[str, Callable[..., nn.Module]] = {
    "timm": lambda depth=12: _timm("vit_base_patch16_224", depth=depth),
    "transformers": lambda depth=12: _transformers(
        "ViTForImageClassification", num_hidden_layers=depth, num_labels=1000
    ),
    "torchvision": lambda depth=12: _torchvision(
        "", image_size=224, patch_size=16, num_layers=depth, num_heads=12, hidden_dim=768, mlp_dim=3072
    ),
}


def agree(architecture: Architecture) -> dict[str, Any]:
    """Compare one whole model with its accelerated self at batch 1 in float32.

    difference: the largest, over the largest |output| of the library's own model. fused: the ops that run, by class of
    module. skipped: class and reason. seconds: of `accelerate`.
    """
    model = architecture.model(whole=True)
    image = architecture.image(model, 1)
    with torch.inference_mode():
        own = output(model(image))
        start = time.perf_counter()
        report = fastvit.accelerate(model)
        seconds = time.perf_counter() - start
        difference = float((output(model(image)) - own).abs().max() / own.abs().max())
    return {
        "library": architecture.library,
        "name": architecture.name,
        "image_size": image_size(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "difference": difference,
        "fused": {entry.kind: entry.detail for entry in report.accelerated},
        "skipped": {entry.kind: entry.detail for entry in report.skipped},
        "seconds": seconds,
    }


def speed(library: str, rounds: int) -> dict[str, Any]:
    """Time ViT-B/16 at 224 px, batch 1, inference: the median in ms, accelerated, and untouched time / accelerated time
    in pairs of runs, in alternating order."""
    model = VIT_B_16[library]().eval()
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    clock = Clock(torch.device("cpu"))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode():
        for i in range(-2, rounds):
            for accelerated in (i % 2 == 0, i % 2 == 1):
                fastvit.accelerate(model) if accelerated else fastvit.restore(model)
                taken = clock.time(lambda: model(image))
                seconds[accelerated] += [taken] * (i >= 0)  # the first two warm up
    ratios = Quantiles.of([own / fused for own, fused in zip(*seconds.values(), strict=True)])
    fused = Quantiles.of(seconds[True])
    return {"library": library, "milliseconds": 1e3 * fused.median, "faster": asdict(ratios)}


def render(path: Path) -> list[str]:
    """Return the table of a result file."""
    results = json.loads(path.read_text())
    where = results["environment"]
    fused = [[op for ops in row["fused"].values() for op in ops.split(", ")] for row in results["agreements"]]
    common = [op for op in dict.fromkeys(fused[0]) if all(op in ops for ops in fused)]
    rows = [
        (
            row["library"], row["name"], ", ".join(sorted({*ops} - {*common})), ", ".join(row["skipped"]),
            "x".join(map(str, dict.fromkeys(row["image_size"]))), f"{row['difference']:.1e}",
        )
        for row, ops in zip(results["agreements"], fused, strict=True)
    ]  # fmt: skip
    slowest = max(row["seconds"] for row in results["agreements"])
    ratios = ", ".join(f"{row['library']} {row['faster']['median']:.2f}x" for row in results["speeds"])
    return [
        *make(("library", "model", "also", "left alone", "px", "difference"), rows, left=4, wrap=3),
        "",
        f"every model: {', '.join(common)}",
        "also: ops of that model besides. left alone: classes that stay as they are.",
        "difference: the largest, over the largest |output|.",
        f"{where['device']}, float32, {where['threads']} threads, torch {where['torch']}",
        ", ".join(f"{name} {version}" for name, version in where["libraries"].items()),
        f"accelerate() took at most {1e3 * slowest:.0f} ms. ViT-B/16 at 224 px, one image, inference,",
        "untouched / accelerated, median of the ratios of paired runs:",
        ratios,
    ]


def main(path: Path) -> None:
    rows = []
    for architecture in ARCHITECTURES:
        rows.append(agree(architecture))
        print(f"{architecture}: {rows[-1]['difference']:.1e}, {1e3 * rows[-1]['seconds']:.1f} ms", flush=True)
    where = environment(torch.device("cpu"), torch.float32) | {
        "libraries": {name: load(name).__version__ for name in VIT_B_16}
    }
    found = {"agreements": rows, "speeds": [speed(name, 60) for name in VIT_B_16]}
    write_json(path, {"environment": where, **found})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What accelerate does with every known architecture.")
    parser.add_argument("path", type=Path, help="the result file")
    main(parser.parse_args().path)
