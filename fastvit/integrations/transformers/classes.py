"""The families of Hugging Face transformers (version 5) that are known, and the names of their parts."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from fastvit.blocks.submodules import Classes


class Names(NamedTuple):
    """The names in one family. file: its module; norm1, attention, norm2, mlp: attributes of a layer; projection: an
    attribute of attention. Class names are without the family's prefix: layer, attentions, mlps; patches: that of the
    patch embedding, and the attribute of its convolution, or None if it has none. rotates: whether a call has rotary
    positions. own_norm: whether there is an RMSNorm, with T5's code. on_grid: whether layers run over a grid."""

    file: str
    norm1: str
    attention: str
    norm2: str
    projection: str
    mlp: str = "mlp"
    layer: str = "Layer"
    attentions: tuple[str, ...] = ("Attention",)
    mlps: tuple[str, ...] = ("MLP",)
    patches: tuple[str, str] | None = ("PatchEmbeddings", "projection")
    rotates: bool = False
    own_norm: bool = False
    on_grid: bool = False


_VIT = "layernorm_before", "attention", "layernorm_after"
_DINO = "norm1", "attention", "norm2", "o_proj"
_CLIP = "layer_norm1", "self_attn", "layer_norm2", "out_proj", "mlp", "EncoderLayer", ("Attention",), ("MLP",)
_AIMV2 = "rms_norm1", "attention", "rms_norm2", "out_proj", "ffn"
_SAM = "layer_norm1", "attn", "layer_norm2", "proj", "mlp", "VisionLayer", ("VisionAttention", "VisionSdpaAttention")
_CONVOLUTION = "VisionEmbeddings", "patch_embedding"
_EMBEDDINGS = "Embeddings", "patch_embeddings"
_SWIGLU, _GATED = ("MLP", "SwiGLUFFN"), ("MLP", "GatedMLP")
SAM = {  # SAM's encoder, and those with the same code
    prefix: Names(file, *_SAM, ("MLPBlock",), on_grid=True)
    for prefix, file in {
        "Sam": "sam", "SamHQ": "sam_hq", "DeepseekOcr2Sam": "deepseek_ocr2", "UnlimitedOcrSam": "unlimited_ocr",
        "GotOcr2": "got_ocr2", "PPFormulaNet": "pp_formulanet", "SLANeXt": "slanext",
    }.items()
}  # fmt: skip
FAMILIES = {  # by the prefix of its classes
    "ViT": Names("vit", *_VIT, "o_proj"),
    "DeiT": Names("deit", *_VIT, "o_proj"),
    "IJepa": Names("ijepa", *_VIT, "o_proj"),
    "Dinov2": Names("dinov2", *_DINO, mlps=_SWIGLU),
    "Dinov2WithRegisters": Names("dinov2_with_registers", *_DINO, mlps=_SWIGLU),
    "DINOv3ViT": Names("dinov3_vit", *_DINO, mlps=_GATED, patches=_EMBEDDINGS, rotates=True),
    "Sapiens2": Names("sapiens2", *_DINO, mlps=_GATED, patches=_EMBEDDINGS, rotates=True, own_norm=True),
    "CLIP": Names("clip", *_CLIP, _CONVOLUTION),
    "Siglip": Names("siglip", *_CLIP, _CONVOLUTION),
    "Siglip2": Names("siglip2", *_CLIP, None),
    "Aimv2": Names("aimv2", *_AIMV2, "EncoderLayer", patches=("VisionEmbeddings", "patch_embed"), own_norm=True),
    "Ovis2": Names("ovis2", *_AIMV2, "VisionEncoderLayer", ("VisionAttention",), patches=_CONVOLUTION, own_norm=True),
    "InternVLVision": Names("internvl", *_VIT, "projection_layer", own_norm=True),
    "Pixtral": Names(
        "pixtral", "attention_norm", "attention", "ffn_norm", "o_proj", "feed_forward", "AttentionLayer",
        patches=("VisionModel", "patch_conv"), rotates=True, own_norm=True,
    ),
    "VideoMAE": Names("videomae", *_VIT, "output", mlps=()),
    "VJEPA2": Names(
        "vjepa2", "norm1", "attention", "norm2", "proj", attentions=("RopeAttention",),
        patches=("PatchEmbeddings3D", "proj"),
    ),
    "Swin": Names("swin", *_VIT, "o_proj", on_grid=True),
    "VitDet": Names(
        "vitdet", "norm1", "attention", "norm2", "proj", mlps=("Mlp",), patches=("Embeddings", "projection"),
        on_grid=True,
    ),
    **SAM,
}  # fmt: skip
# Towers with attention within images or windows that cu_seqlens separates, all with the same code
_TOWERS = {
    "": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl", "Qwen3VLMoe": "qwen3_vl_moe",
    "Qwen3OmniMoe": "qwen3_omni_moe", "Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe", "Qwen4Exp": "qwen4_exp",
    "Ernie4_5_VLMoe": "ernie4_5_vl_moe", "CohereCompass": "cohere_compass", "Glm4v": "glm4v", "Glm4vMoe": "glm4v_moe",
}  # fmt: skip


def qualified(file: str, name: str) -> str:
    return f"transformers.models.{file}.modeling_{file}.{name}"


def class_of(prefix: str, suffix: str) -> str:
    name = prefix + suffix
    return qualified(FAMILIES[prefix].file, name.replace("DINO", "Dino") if suffix == "DropPath" else name)


ATTENTIONS: dict[str, Classes] = {
    prefix: {class_of(prefix, suffix) for suffix in names.attentions} for prefix, names in FAMILIES.items()
}
VARLEN_ATTENTION = {qualified(file, f"{prefix}VisionAttention") for prefix, file in _TOWERS.items()}
LAYER_SCALE: Classes = {nn.Identity, *(class_of(prefix, "LayerScale") for prefix in FAMILIES)}
DROP_PATH: Classes = {nn.Identity, *(class_of(prefix, "DropPath") for prefix in FAMILIES)}
MLPS: Classes = {
    *(class_of(prefix, suffix) for prefix, names in FAMILIES.items() for suffix in names.mlps),
    qualified("qwen2_5_vl", "Qwen2_5_VLMLP"),
    qualified("glm4v", "Glm4VisionMlp"),
}
RMS_NORM: Classes = {  # with T5's code
    *(class_of(prefix, "RMSNorm") for prefix, names in FAMILIES.items() if names.own_norm),
    qualified("qwen2_5_vl", "Qwen2_5_VLRMSNorm"),
    qualified("glm4v", "Glm4vRMSNorm"),
}
EMBEDDINGS = {
    class_of(prefix, names.patches[0]): names.patches[1] for prefix, names in FAMILIES.items() if names.patches
}
