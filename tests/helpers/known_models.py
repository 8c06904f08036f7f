"""Every family of models that `accelerate` knows, one small model of random weights a row. What differs inside a family
(norms, gates, windows, positions, masks, shared keys, an attention implementation) has a row of its own."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import dinov2_layout
import dinov3_layout
import pytest
import torch
from library_imports import import_library
from library_models import (
    class_of_transformers,
    gated_vit,
    grid_of_transformers,
    hugging_face,
    open_clip_tower,
    sam_of_timm,
    step,
    swin_of_timm,
    swin_of_transformers,
    torchvision_vit,
    vit,
)
from models import randomised
from torch import Tensor, nn
from torch.utils._pytree import tree_map

BLOCK = "layer_norm_attention, layer_norm_mlp"
GRID = ("layer_norm_linear, attention_windows, linear, layer_norm_mlp",)
GRID_WITH_NORMS = ("layer_norm_linear, qk_norm, attention_windows, linear, layer_norm_mlp",)
WHOLE_GRID = "layer_norm_linear, attention_qkvpacked, linear, layer_norm_mlp"
# Heads that share keys, and norms of these or over all heads: no op for half a block has them
SHARED_KEYS = "layer_norm_linear, attention, linear, layer_norm_mlp"
WITH_NORMS = "layer_norm_linear, rms_norm, attention, linear, layer_norm_mlp"
Inputs = Callable[[nn.Module], dict[str, Tensor]]  # of a model


class Known(NamedTuple):
    """A small model, and what `accelerate` does with it.

    make: function that makes the model. image: the shape of one image, or of one video. blocks: the ops that run the
    blocks; empty if these are not fused as a whole. count: how many attention modules there are, all of them fused;
    alone: how many are if the block is of an unknown class, or None for all. mlps: how many MLPs are fused, or None for
    as many as attention modules. patches: whether a convolution embeds patches. left: ends of the names of classes that
    are skipped. inputs: function that makes the arguments of a call of a model, if these are not only images. std: of
    the noise in the parameters."""

    make: Callable[[], nn.Module]
    image: tuple[int, ...] = (3, 32, 32)
    blocks: tuple[str, ...] = (BLOCK,)
    count: int = 1
    alone: int | None = None
    mlps: int | None = None
    patches: bool = True
    left: tuple[str, ...] = ()
    inputs: Inputs | None = None
    std: float = 0.1


def eva(name: str, **options: Any) -> Callable[[], nn.Module]:
    return partial(vit, name, img_size=(32, 48), depth=1, **options)


def small(name: str, **options: Any) -> nn.Module:
    """Return a model of transformers, "vit.ViTModel", from its own default configuration, shrunk."""
    from benchmarks.coverage import small_transformers

    kind = class_of_transformers(*name.rsplit(".", 1))
    config = small_transformers.small_config(kind)
    for option, value in options.items():
        setattr(config, option, value)
    return kind(config).eval()


def small_inputs(model: nn.Module) -> dict[str, Tensor]:
    from benchmarks.coverage import small_transformers

    return small_transformers.inputs(model)


def images_in_a_row(model: nn.Module) -> dict[str, Tensor]:
    """Two images one after the other, the second of half the first one's size."""
    inputs = small_inputs(model)
    first = next(iter(inputs))
    return {**inputs, first: inputs[first][:24], "grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]])}


def tower(name: str, count: int = 2, left: tuple[str, ...] = (), patches: bool = True) -> Known:
    """A vision tower for images of several sizes."""
    return Known(partial(small, name), count=count, patches=patches, left=left, inputs=images_in_a_row, std=0.02)


def family(name: str, blocks: tuple[str, ...] = (BLOCK,), count: int = 2, **row: Any) -> tuple[str, Known]:
    """A row for a model of transformers with its own inputs. row: also options of the configuration."""
    options = {key: row.pop(key) for key in [*row] if key not in Known._fields}
    return name, Known(
        partial(small, name, **options), blocks=blocks, count=count, inputs=small_inputs, std=0.02, **row
    )


def model_of_dinov2(mlp: type[nn.Module] | None = None) -> nn.Module:
    block = dinov2_layout.NestedTensorBlock(64, 4)
    if mlp is not None:
        block.mlp = mlp(64, 168)  # type: ignore[assignment]
    return nn.Sequential(dinov2_layout.PatchEmbed(32, 8, 3, 64), block, nn.LayerNorm(64)).eval()


def model_of_dinov3(mlp: type[nn.Module]) -> nn.Module:
    block = dinov3_layout.SelfAttentionBlock(64, 4, mlp)
    return nn.Sequential(dinov3_layout.PatchEmbed(32, 8, 3, 64), block, nn.LayerNorm(64)).eval()


def parallel(**options: Any) -> Callable[[], nn.Module]:
    return partial(vit, "vit_base_patch16_xp_224", depth=1, **options)


def vjepa2(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "patch_size": 8, "crop_size": 16}
    predictor = {"pred_hidden_size": 64, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
    config = import_library("transformers").VJEPA2Config(**sizes, frames_per_clip=4, **predictor, **options)
    return import_library("transformers").VJEPA2Model(config).eval()


def videomae() -> nn.Module:
    return hugging_face("VideoMAEModel", num_hidden_layers=1, image_size=16, num_frames=4)


def naflex_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Images of other sizes, padded to one number of patches."""
    coordinates = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).view(1, 12, 2)
    seen = torch.ones(2, 12, dtype=torch.bool)
    seen[1, 8:] = False
    return {"x": torch.randn(2, 12, 768), "patch_coord": coordinates.repeat(2, 1, 1), "patch_valid": seen}


def siglip2_inputs(model: nn.Module) -> dict[str, Tensor]:
    visible = torch.ones(2, 16, dtype=torch.int32)
    visible[1, 9:] = 0
    shapes = torch.tensor([[4, 4], [3, 3]])
    return {"pixel_values": torch.randn(2, 16, 192), "pixel_attention_mask": visible, "spatial_shapes": shapes}


def pixtral_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Two images of other sizes in one sequence, which a mask keeps apart."""
    return {"pixel_values": torch.randn(2, 3, 32, 32), "image_sizes": torch.tensor([[32, 32], [16, 24]])}


def texts(model: nn.Module) -> dict[str, Tensor]:
    """Two texts, one padded with zeros."""
    text = torch.randint(1, 50, (2, 12))
    text[1, 7:] = 0
    return {"text": text}


def text_tower(**options: Any) -> Known:
    make = partial(open_clip_tower, "TextTransformer", context_length=12, vocab_size=50, **options)
    return Known(make, alone=0, mlps=0, patches=False, inputs=texts)


def naflex() -> nn.Module:
    model = import_library("timm").create_model("naflexvit_base_patch16_gap", embed_dim=64, depth=1, num_heads=2)
    return model.eval()


def hf(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Return the maker of a model of transformers with one layer."""
    return partial(hugging_face, name, **{"num_hidden_layers": 1, **options})


SHARED = {"num_hidden_layers": 2, "num_key_value_heads_per_layer": [4, 2], "num_register_tokens": 2}
INTERNVL = {"use_qk_norm": True, "norm_type": "rms_norm"}
WIDE, SQUARE, VIDEO = (3, 32, 48), (3, 64, 64), (4, 3, 16, 16)

TIMM = {
    "ViT": Known(partial(vit, depth=1, init_values=0.3)),
    "ViT, norms everywhere": Known(
        partial(vit, depth=1, qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True, norm_layer="rmsnorm")
    ),
    "ViT, norms without weight": Known(
        partial(vit, depth=1, norm_layer=partial(nn.LayerNorm, eps=1e-6, elementwise_affine=False))
    ),
    "CLIP": Known(partial(vit, "vit_base_patch16_clip_quickgelu_224", depth=1)),
    "SigLIP": Known(
        partial(vit, "vit_base_patch16_siglip_224", depth=1), mlps=2, left=("AttentionPoolLatent",)
    ),
    "SwiGLU": Known(partial(gated_vit, "SwiGLU", depth=1)),
    "SwiGLU of gelu, with a norm": Known(partial(gated_vit, "SwiGLU", depth=1, act_layer=nn.GELU, norm=True)),
    "SwiGLUPacked": Known(partial(vit, "vit_giant_patch14_reg4_dinov2", depth=1, mlp_ratio=4)),
    "GluMlp, value first": Known(partial(gated_vit, "GluMlp", depth=1, act_layer=nn.GELU, norm=True)),
    "GluMlp without biases": Known(partial(gated_vit, "GluMlp", depth=1, act_layer=nn.SiLU, bias=False)),
    "parallel": Known(parallel(), count=0),
    "NaFlex, masked": Known(naflex, patches=False, inputs=naflex_inputs),
}  # fmt: skip
EVA = {
    "rotary, interleaved": Known(eva("vit_base_patch16_rope_224"), WIDE),
    "rotary, learnt": Known(eva("vit_small_patch16_rope_mixed_ape_224"), WIDE),
    "rotary, learnt, norms": Known(
        eva("vit_small_patch16_rope_mixed_ape_224", qk_norm=True, norm_layer="RmsNorm"), WIDE
    ),
    "rotary, halves": Known(eva("vit_small_patch16_dinov3"), WIDE),
    "rotary, biases": Known(eva("vit_small_patch16_dinov3_qkvb"), WIDE),
    "SwiGLU of one": Known(eva("eva02_tiny_patch14_224"), WIDE),
    "rotary, halves, norms": Known(eva("vit_small_patch16_dinov3", qk_norm=True, norm_layer="LayerNorm"), WIDE),
    "Perception Encoder": Known(eva("vit_pe_core_tiny_patch16_384"), WIDE, mlps=2, left=("AttentionPoolLatent",)),
    "no positions": Known(eva("eva_giant_patch14_224"), WIDE),
    "three layers, a norm in SwiGLU": Known(eva("eva02_base_patch14_224"), WIDE),
    "three layers, norms": Known(eva("eva02_base_patch14_224", qk_norm=True, norm_layer="LayerNorm"), WIDE),
    "RMSNorms": Known(eva("deepseek_vit_412m"), WIDE),
    "post-norm": Known(eva("eva02_enormous_patch14_clip_224"), WIDE, blocks=(), left=("EvaBlockPostNorm",)),
    "shared keys": Known(
        eva("vit_large_patch16_sapiens2", num_heads=4, num_kv_heads=2), WIDE, blocks=(WITH_NORMS,)
    ),
}  # fmt: skip
GRIDS = {
    "SAM, windows with padding": Known(
        partial(sam_of_timm, window_size=3, use_rel_pos=True, init_values=0.3), SQUARE, GRID, 2
    ),
    "SAM, another size": Known(partial(sam_of_timm, window_size=3, use_rel_pos=True), (3, 48, 80), GRID, 2),
    "SAM, norms": Known(
        partial(sam_of_timm, window_size=2, use_rel_pos=True, qk_norm=True), SQUARE, GRID_WITH_NORMS, 2
    ),
    "SAM, rotary": Known(partial(sam_of_timm, window_size=2, use_rope=True), SQUARE, (*GRID, WHOLE_GRID), 2),
    "SAM, no positions": Known(partial(sam_of_timm, window_size=2), SQUARE, (*GRID, WHOLE_GRID), 2),
    "Swin": Known(swin_of_timm, blocks=GRID, count=3, alone=0),
    "Swin, padded": Known(partial(swin_of_timm, 36), (3, 36, 36), GRID, 3, 0),
    "Swin, larger windows": Known(partial(swin_of_timm, 16, 7), (3, 16, 16), GRID, 3, 0),
    "Swin, always cut": Known(partial(swin_of_timm, 24, always_partition=True), (3, 24, 24), GRID, 3, 0),
    "Swin, another size": Known(partial(swin_of_timm, strict_img_size=False), (3, 48, 48), GRID, 3, 0),
    "Swin, windows with sides": Known(partial(swin_of_timm, 48, ((4, 6), (3, 6))), (3, 48, 48), GRID, 3, 0),
    "Swin, head dimension": Known(partial(swin_of_timm, head_dim=24), blocks=GRID, count=3, alone=0),
}  # fmt: skip
TRANSFORMERS = {
    "ViT of transformers": Known(hf("ViTModel")),
    "DeiT": Known(hf("DeiTModel")),
    "I-JEPA": Known(hf("IJepaModel")),
    "Dinov2": Known(hf("Dinov2Model")),
    "Dinov2, SwiGLU": Known(hf("Dinov2Model", use_swiglu_ffn=True)),
    "Dinov2WithRegisters": Known(hf("Dinov2WithRegistersModel")),
    "DINOv3": Known(hf("DINOv3ViTModel", num_register_tokens=3, pos_embed_rescale=None), (3, 32, 40)),
    "DINOv3, gated": Known(hf("DINOv3ViTModel", use_gated_mlp=True, hidden_act="silu"), (3, 32, 40)),
    "DINOv3, biases": Known(hf("DINOv3ViTModel", key_bias=True, query_bias=False), (3, 32, 40)),
    "Sapiens2": Known(
        hf("Sapiens2Model", **SHARED, use_qk_norm=False, use_gated_mlp=False), blocks=(BLOCK, SHARED_KEYS), count=2
    ),
    "Sapiens2, norms": Known(hf("Sapiens2Model", **SHARED, layerscale_value=0.5), blocks=(BLOCK, WITH_NORMS), count=2),
    "CLIP of transformers": Known(hf("CLIPVisionModel"), std=0.05),
    "SigLIP of transformers": Known(
        hf("SiglipVisionModel"), mlps=2, left=("MultiheadAttention",), std=0.05
    ),
    "SigLIP 2, masked": Known(
        hf("Siglip2VisionModel", num_patches=16, vision_use_head=False), patches=False, inputs=siglip2_inputs
    ),
    "AIMv2": Known(hf("Aimv2VisionModel", use_head=False)),
    "Ovis2": Known(partial(small, "ovis2.Ovis2VisionModel"), (3, 56, 56), count=2, std=0.05),
    "InternVL": Known(hf("InternVLVisionModel")),
    "InternVL, norms": Known(hf("InternVLVisionModel", **INTERNVL), blocks=(WITH_NORMS,)),
    "Pixtral, masked": Known(hf("PixtralVisionModel", head_dim=16), inputs=pixtral_inputs),
    "Pixtral, eager": Known(
        hf("PixtralVisionModel", head_dim=16, attn_implementation="eager"), alone=0, inputs=pixtral_inputs
    ),
    "VideoMAE": Known(videomae, VIDEO, mlps=0),
    "V-JEPA 2": Known(vjepa2, VIDEO, count=2),
    "SAM of transformers": Known(partial(grid_of_transformers, "sam.SamVisionModel", "sdpa"), SQUARE, GRID, 2),
    "SAM, eager": Known(partial(grid_of_transformers, "sam.SamVisionModel"), SQUARE, GRID, 2, 0),
    "SAM-HQ": Known(partial(grid_of_transformers, "sam_hq.SamHQVisionModel", "sdpa"), SQUARE, GRID, 2),
    "VitDet": Known(partial(grid_of_transformers, "vitdet.VitDetModel"), SQUARE, GRID, 2),
    "VitDet, convolutions after an MLP": Known(
        partial(grid_of_transformers, "vitdet.VitDetModel", residual_block_indices=[1]), SQUARE, GRID, 2,
        left=("Layer", "Norm"),
    ),
    "Swin of transformers": Known(swin_of_transformers, blocks=GRID, count=3, alone=0),
    "Swin of transformers, padded": Known(partial(swin_of_transformers, 36), (3, 36, 36), GRID, 3, 0),
}  # fmt: skip
ROTARY_GRID = ("layer_norm_linear, attention, linear, layer_norm_mlp",)
FAMILIES = dict([
    family("vit_mae.ViTMAEModel"),
    family("pixio.PixioModel"),
    family("yolos.YolosModel", mlps=0),
    family("vitpose_backbone.VitPoseBackbone", patches=False, left=("Conv2d",)),
    family("beit.BeitModel"),
    family("beit.BeitForImageClassification", use_relative_position_bias=True, layer_scale_init_value=0.3),
    family(
        "data2vec.data2vec_vision.Data2VecVisionModel", count=4, alone=0, mlps=0, use_shared_relative_position_bias=True
    ),
    family("flava.FlavaImageModel", alone=0, mlps=0),
    family("altclip.AltCLIPVisionModel"),
    family("owlvit.OwlViTVisionModel"),
    family("kosmos2.Kosmos2VisionModel"),
    family("git.GitVisionModel", alone=0),
    family("idefics2.Idefics2VisionTransformer"),
    family("granite_docling.GraniteDoclingVisionModel", count=3),
    family("janus.JanusVisionModel"),
    family("blip.BlipVisionModel", alone=0),
    family("blip_2.Blip2VisionModel"),
    family("radio.RadioModel", patches=False),
    family("lw_detr.LwDetrViTBackbone", blocks=()),
    family("mlcd.MLCDVisionModel"),
    family("step3p7.Step3p7VisionModel", blocks=()),
    family("llama4.Llama4VisionModel", left=("MLP2",), patches=False, alone=0),
    family("mllama.MllamaVisionModel", count=10, alone=0),
    family("paddleocr_vl.PaddleOCRVisionTransformer"),
    family("timesformer.TimesformerModel", blocks=(), count=4, mlps=0),
    family("seggpt.SegGptModel", blocks=(), count=5),
    family("sam3.Sam3ViTModel", blocks=ROTARY_GRID, count=4, alone=0),
    family("donut.donut_swin.DonutSwinModel", blocks=GRID, count=4, mlps=0, alone=0),
    family("maskformer.maskformer_swin.MaskFormerSwinModel", blocks=GRID, count=5, mlps=0, alone=0),
])  # fmt: skip
TOWERS = {
    "Qwen2-VL": tower("qwen2_vl.Qwen2VisionTransformerPretrainedModel"),
    "Qwen2.5-VL": tower("qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel", 4),
    "Qwen2.5-Omni": tower("qwen2_5_omni.Qwen2_5OmniVisionEncoder", 4),
    "Qwen3-VL": tower("qwen3_vl.Qwen3VLVisionModel", 3),
    "Ernie 4.5": tower("ernie4_5_vl_moe.Ernie4_5_VLMoeVisionTransformerPretrainedModel", patches=False),
    "GLM-4V": tower("glm4v.Glm4vVisionModel"),
    "GLM-OCR": tower("glm_ocr.GlmOcrVisionModel"),
    "EXAONE 4.5": tower("exaone4_5.Exaone4_5_VisionModel", 4),
    "Kimi K2.5": tower("kimi_k25.Kimi_K25VisionModel", left=("PatchEmbed",)),
}
OTHERS = {
    "torchvision": Known(partial(torchvision_vit, depth=1), alone=0),
    "open_clip": Known(
        partial(open_clip_tower, "VisionTransformer", image_size=32, patch_size=8, mlp_ratio=2.0, ls_init_value=0.3),
        alone=0, mlps=0,
    ),
    "open_clip, text": text_tower(),
    "open_clip, padded text": text_tower(embed_cls=True),
    "DINOv2's repository": Known(model_of_dinov2),
    "DINOv2's repository, SwiGLU": Known(partial(model_of_dinov2, dinov2_layout.SwiGLUFFN)),
    "DINOv2's repository, SwiGLUFused": Known(partial(model_of_dinov2, dinov2_layout.SwiGLUFFNFused)),
    "DINOv3's repository": Known(partial(model_of_dinov3, dinov3_layout.Mlp)),
    "DINOv3's repository, SwiGLU": Known(partial(model_of_dinov3, dinov3_layout.SwiGLUFFN)),
}  # fmt: skip
MODELS: dict[str, Known] = {**TIMM, **EVA, **GRIDS, **TRANSFORMERS, **FAMILIES, **TOWERS, **OTHERS}


class Built:
    """A model that tests share: they restore it, and copy it before they change it.

    known: its row. model, inputs: the model and what it is called with. own: a step of the library's own modules."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.known = known = MODELS[name]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = randomised(known.make(), known.std).to(device)
            inputs = known.inputs(self.model) if known.inputs is not None else {"": torch.randn(2, *known.image)}
        self.inputs: dict[str, Tensor] = tree_map(lambda t: t.to(device), inputs)
        self.own = step(self.model, self.call)

    def call(self, model: nn.Module, inputs: dict[str, Tensor] | None = None) -> Any:
        inputs = self.inputs if inputs is None else inputs
        return model(inputs[""]) if "" in inputs else model(**inputs)


# the first version of transformers whose modules are as a row says. ViT, DeiT and I-JEPA have MLPs in two modules
# before, which are fused in their layer only: tests/integrations/test_transformers_versions.py
SINCE = dict.fromkeys(("ViT of transformers", "DeiT", "I-JEPA", "Sapiens2", "Sapiens2, norms"), (5, 12))
SINCE |= dict.fromkeys(("Swin of transformers", "Swin of transformers, padded"), (5, 12))
SINCE |= dict.fromkeys((*FAMILIES, "Qwen2.5-Omni", "GLM-OCR", "EXAONE 4.5", "Kimi K2.5"), (5, 23))
SINCE |= {"mllama.MllamaVisionModel": (5, 0), "VideoMAE": (5, 8), "Ernie 4.5": (5, 8), "Qwen2.5-VL": (5, 8)}


def version_of_transformers() -> tuple[int, ...]:
    return tuple(map(int, import_library("transformers").__version__.split(".")[:2]))


def built(name: str, device: torch.device) -> Built:
    if name in SINCE and version_of_transformers() < SINCE[name]:
        pytest.skip("in this version of transformers it has other modules")
    return _built(name, device)


@functools.cache
def _built(name: str, device: torch.device) -> Built:
    return Built(name, device)
