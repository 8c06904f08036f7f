"""Mean and standard deviation of the images that a model of the zoo was trained with.

They are those of timm's configuration of the same name (`timm.get_pretrained_cfg`). Where a name has weights of several
trainings, as CLIP ViT-L/14 of OpenAI and LAION, timm's default decides. Models without published weights, such as ours
for CIFAR, have 0.5."""

from __future__ import annotations

from fnmatch import fnmatchcase

Statistics = tuple[tuple[float, ...], tuple[float, ...]]

IMAGENET: Statistics = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP: Statistics = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF: Statistics = (0.5,) * 3, (0.5,) * 3  # Google's ViTs, SigLIP, Perception Encoder: pixels from -1 to 1
UNIT: Statistics = (0.0,) * 3, (1.0,) * 3

_BY_NAME = (  # the first row with a pattern that fits
    (UNIT, ("*_miil", "*_tipsv2")),
    (HALF, ("vit_large_patch14_clip_???",)),  # LAION's
    (CLIP, ("*_clip_*",)),
    (IMAGENET, ("eva_giant_patch14_560",)),
    (CLIP, ("eva*", "aimv2_*", "*_radio_*", "vit_betwixt_patch16_rope_*")),
    (IMAGENET, ("deit*", "*_dinov2", "*_dinov3*", "*_lingbot", "vit_intern300m_*")),
    (IMAGENET, ("vit_*_rope_224", "vit_*_rope_ape_224")),
    (IMAGENET, ("vit_huge_*_gap_*", "vit_giant_*_gap_*")),  # I-JEPA
    (IMAGENET, ("vit_small_patch8_224",)),  # DINO
)


def statistics(name: str) -> Statistics:
    """Return (mean, std) for a name of the zoo, three values each, for pixels from 0 to 1."""
    return next((values for values, patterns in _BY_NAME if any(fnmatchcase(name, p) for p in patterns)), HALF)
