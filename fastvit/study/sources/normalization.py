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

_BY_NAME = (  # the first pattern that fits
    ("*_miil", UNIT),
    ("*_tipsv2", UNIT),
    ("vit_large_patch14_clip_???", HALF),  # LAION's
    ("*_clip_*", CLIP),
    ("eva_giant_patch14_560", IMAGENET),
    ("eva*", CLIP),
    ("aimv2_*", CLIP),
    ("*_radio_*", CLIP),
    ("vit_betwixt_patch16_rope_*", CLIP),
    ("deit*", IMAGENET),
    ("*_dinov2", IMAGENET),
    ("*_dinov3*", IMAGENET),
    ("*_lingbot", IMAGENET),
    ("vit_*_rope_224", IMAGENET),
    ("vit_*_rope_ape_224", IMAGENET),
    ("vit_huge_*_gap_*", IMAGENET),  # I-JEPA
    ("vit_giant_*_gap_*", IMAGENET),  # I-JEPA
    ("vit_intern300m_*", IMAGENET),
    ("vit_small_patch8_224", IMAGENET),  # DINO
)


def statistics(name: str) -> Statistics:
    """Return (mean, std) for a name of the zoo, three values each, for pixels from 0 to 1."""
    return next((values for pattern, values in _BY_NAME if fnmatchcase(name, pattern)), HALF)
