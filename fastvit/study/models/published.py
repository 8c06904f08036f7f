"""Published ImageNet-1k accuracies for names of the zoo."""

from __future__ import annotations

from typing import NamedTuple


class Top1(NamedTuple):
    """Accuracy of one checkpoint on the validation set of ImageNet-1k.

    Attributes:
        weights: timm's tag of the checkpoint: `<name>.<weights>` is its name there.
        image_size: of the evaluation, in pixels.
        percent: top-1.
    """

    weights: str
    image_size: int
    percent: float


# For each name the checkpoint with the highest figure in timm's list: results/results-imagenet.csv of
# github.com/huggingface/pytorch-image-models at commit 4e5207c7 of 2025-10-30. Names that are missing have no figure
# there.
TOP1 = {
    "deit3_base_patch16_224": Top1("fb_in22k_ft_in1k", 224, 85.728),
    "deit3_base_patch16_384": Top1("fb_in22k_ft_in1k", 384, 86.742),
    "deit3_huge_patch14_224": Top1("fb_in22k_ft_in1k", 224, 87.18),
    "deit3_large_patch16_224": Top1("fb_in22k_ft_in1k", 224, 86.99),
    "deit3_large_patch16_384": Top1("fb_in22k_ft_in1k", 384, 87.736),
    "deit3_medium_patch16_224": Top1("fb_in22k_ft_in1k", 224, 84.55),
    "deit3_small_patch16_224": Top1("fb_in22k_ft_in1k", 224, 83.082),
    "deit3_small_patch16_384": Top1("fb_in22k_ft_in1k", 384, 84.846),
    "deit_base_patch16_224": Top1("fb_in1k", 224, 81.98),
    "deit_base_patch16_384": Top1("fb_in1k", 384, 83.108),
    "deit_small_patch16_224": Top1("fb_in1k", 224, 79.856),
    "deit_tiny_patch16_224": Top1("fb_in1k", 224, 72.19),
    "eva02_base_patch14_448": Top1("mim_in22k_ft_in22k_in1k", 448, 88.678),
    "eva02_large_patch14_448": Top1("mim_m38m_ft_in22k_in1k", 448, 90.056),
    "eva02_small_patch14_336": Top1("mim_in22k_ft_in1k", 336, 85.77),
    "eva02_tiny_patch14_336": Top1("mim_in22k_ft_in1k", 336, 80.648),
    "eva_giant_patch14_224": Top1("clip_ft_in1k", 224, 88.896),
    "eva_giant_patch14_336": Top1("m30m_ft_in22k_in1k", 336, 89.566),
    "eva_giant_patch14_560": Top1("m30m_ft_in22k_in1k", 560, 89.79),
    "eva_large_patch14_196": Top1("in22k_ft_in22k_in1k", 196, 88.59),
    "eva_large_patch14_336": Top1("in22k_ft_in22k_in1k", 336, 89.238),
    "flexivit_base": Top1("1200ep_in1k", 240, 84.678),
    "flexivit_large": Top1("1200ep_in1k", 240, 85.646),
    "flexivit_small": Top1("1200ep_in1k", 240, 82.576),
    "test_vit": Top1("r160_in1k", 160, 40.982),
    "test_vit2": Top1("r160_in1k", 160, 42.25),
    "vit_base_patch16_224": Top1("augreg2_in21k_ft_in1k", 224, 85.108),
    "vit_base_patch16_224_miil": Top1("in21k_ft_in1k", 224, 84.278),
    "vit_base_patch16_384": Top1("augreg_in21k_ft_in1k", 384, 86.01),
    "vit_base_patch16_clip_224": Top1("laion2b_ft_in12k_in1k", 224, 86.204),
    "vit_base_patch16_clip_384": Top1("laion2b_ft_in12k_in1k", 384, 87.21),
    "vit_base_patch16_rope_224": Top1("naver_in1k", 224, 83.714),
    "vit_base_patch16_rope_ape_224": Top1("naver_in1k", 224, 83.78),
    "vit_base_patch16_rope_reg1_gap_256": Top1("sbb_in1k", 256, 83.872),
    "vit_base_patch32_224": Top1("augreg_in21k_ft_in1k", 224, 80.732),
    "vit_base_patch32_384": Top1("augreg_in21k_ft_in1k", 384, 83.358),
    "vit_base_patch32_clip_224": Top1("laion2b_ft_in12k_in1k", 224, 83.304),
    "vit_base_patch32_clip_384": Top1("laion2b_ft_in12k_in1k", 384, 85.398),
    "vit_base_patch32_clip_448": Top1("laion2b_ft_in12k_in1k", 448, 85.792),
    "vit_base_patch8_224": Top1("augreg2_in21k_ft_in1k", 224, 86.252),
    "vit_betwixt_patch16_reg1_gap_256": Top1("sbb_in1k", 256, 83.652),
    "vit_betwixt_patch16_reg4_gap_256": Top1("sbb2_e200_in12k_ft_in1k", 256, 85.734),
    "vit_betwixt_patch16_reg4_gap_384": Top1("sbb2_e200_in12k_ft_in1k", 384, 86.618),
    "vit_betwixt_patch16_rope_reg4_gap_256": Top1("sbb_in1k", 256, 83.906),
    "vit_huge_patch14_clip_224": Top1("laion2b_ft_in12k_in1k", 224, 88.288),
    "vit_huge_patch14_clip_336": Top1("laion2b_ft_in12k_in1k", 336, 88.634),
    "vit_large_patch14_clip_224": Top1("openai_ft_in12k_in1k", 224, 88.162),
    "vit_large_patch14_clip_336": Top1("openai_ft_in12k_in1k", 336, 88.26),
    "vit_large_patch16_224": Top1("augreg_in21k_ft_in1k", 224, 85.856),
    "vit_large_patch16_384": Top1("augreg_in21k_ft_in1k", 384, 87.096),
    "vit_large_patch16_rope_224": Top1("naver_in1k", 224, 84.646),
    "vit_large_patch16_rope_ape_224": Top1("naver_in1k", 224, 84.66),
    "vit_large_patch32_384": Top1("orig_in21k_ft_in1k", 384, 81.508),
    "vit_little_patch16_reg1_gap_256": Top1("sbb_in12k_ft_in1k", 256, 83.8),
    "vit_little_patch16_reg4_gap_256": Top1("sbb_in1k", 256, 82.52),
    "vit_medium_patch16_gap_256": Top1("sw_in12k_ft_in1k", 256, 84.442),
    "vit_medium_patch16_gap_384": Top1("sw_in12k_ft_in1k", 384, 85.556),
    "vit_medium_patch16_reg1_gap_256": Top1("sbb_in1k", 256, 83.462),
    "vit_medium_patch16_reg4_gap_256": Top1("sbb_in12k_ft_in1k", 256, 84.956),
    "vit_medium_patch16_rope_reg1_gap_256": Top1("sbb_in1k", 256, 83.81),
    "vit_mediumd_patch16_reg4_gap_256": Top1("sbb2_e200_in12k_ft_in1k", 256, 86.608),
    "vit_mediumd_patch16_reg4_gap_384": Top1("sbb2_e200_in12k_ft_in1k", 384, 87.438),
    "vit_mediumd_patch16_rope_reg1_gap_256": Top1("sbb_in1k", 256, 84.316),
    "vit_small_patch16_224": Top1("augreg_in21k_ft_in1k", 224, 81.402),
    "vit_small_patch16_384": Top1("augreg_in21k_ft_in1k", 384, 83.814),
    "vit_small_patch16_rope_224": Top1("naver_in1k", 224, 81.222),
    "vit_small_patch16_rope_ape_224": Top1("naver_in1k", 224, 81.016),
    "vit_small_patch32_224": Top1("augreg_in21k_ft_in1k", 224, 76.01),
    "vit_small_patch32_384": Top1("augreg_in21k_ft_in1k", 384, 80.476),
    "vit_so150m2_patch16_reg1_gap_256": Top1("sbb_e200_in12k_ft_in1k", 256, 87.318),
    "vit_so150m2_patch16_reg1_gap_384": Top1("sbb_e200_in12k_ft_in1k", 384, 87.932),
    "vit_so150m2_patch16_reg1_gap_448": Top1("sbb_e200_in12k_ft_in1k", 448, 88.074),
    "vit_so150m_patch16_reg4_gap_256": Top1("sbb_e250_in12k_ft_in1k", 256, 86.72),
    "vit_so150m_patch16_reg4_gap_384": Top1("sbb_e250_in12k_ft_in1k", 384, 87.37),
    "vit_so400m_patch14_siglip_378": Top1("webli_ft_in1k", 378, 89.41),
    "vit_so400m_patch14_siglip_gap_378": Top1("webli_ft_in1k", 378, 89.056),
    "vit_tiny_patch16_224": Top1("augreg_in21k_ft_in1k", 224, 75.452),
    "vit_tiny_patch16_384": Top1("augreg_in21k_ft_in1k", 384, 78.438),
    "vit_wee_patch16_reg1_gap_256": Top1("sbb_in1k", 256, 80.262),
}
