"""The classes of Hugging Face transformers (version 5) that are known, and the names of their parts."""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    """The names in one model. file: its module; norm1, attention, norm2, mlp: attributes of a layer; projection: an
    attribute of attention; layer_class, attention_class, mlp_classes: class names without the model's prefix."""

    file: str
    norm1: str
    attention: str
    norm2: str
    projection: str
    mlp: str = "mlp"
    layer_class: str = "Layer"
    attention_class: str = "Attention"
    mlp_classes: tuple[str, ...] = ("MLP",)


_SWIGLU = ("MLP", "SwiGLUFFN")
_CLIP = "layer_norm1", "self_attn", "layer_norm2", "out_proj", "mlp", "EncoderLayer"
_AIMV2 = "rms_norm1", "attention", "rms_norm2", "out_proj", "ffn"
MODELS = {  # by the prefix of its classes
    "ViT": Names("vit", "layernorm_before", "attention", "layernorm_after", "o_proj"),
    "DeiT": Names("deit", "layernorm_before", "attention", "layernorm_after", "o_proj"),
    "Dinov2": Names("dinov2", "norm1", "attention", "norm2", "o_proj", mlp_classes=_SWIGLU),
    "Dinov2WithRegisters": Names("dinov2_with_registers", "norm1", "attention", "norm2", "o_proj", mlp_classes=_SWIGLU),
    "DINOv3ViT": Names("dinov3_vit", "norm1", "attention", "norm2", "o_proj", mlp_classes=("MLP", "GatedMLP")),
    "Sapiens2": Names("sapiens2", "norm1", "attention", "norm2", "o_proj", mlp_classes=("MLP", "GatedMLP")),
    "CLIP": Names("clip", *_CLIP),
    "Siglip": Names("siglip", *_CLIP),
    "Siglip2": Names("siglip2", *_CLIP),
    "Aimv2": Names("aimv2", *_AIMV2, "EncoderLayer"),
    "Ovis2": Names("ovis2", *_AIMV2, "VisionEncoderLayer", "VisionAttention"),
    "InternVLVision": Names("internvl", "layernorm_before", "attention", "layernorm_after", "projection_layer"),
    "Pixtral": Names("pixtral", "attention_norm", "attention", "ffn_norm", "o_proj", "feed_forward", "AttentionLayer"),
    "VideoMAE": Names("videomae", "layernorm_before", "attention", "layernorm_after", "output", mlp_classes=()),
    "VJEPA2": Names("vjepa2", "norm1", "attention", "norm2", "proj", attention_class="RopeAttention"),
}
_CONVOLUTIONS = {  # of patch embeddings: class name without the prefix, and the convolution's attribute
    **dict.fromkeys(
        ("ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "InternVLVision", "VideoMAE"),
        ("PatchEmbeddings", "projection"),
    ),
    **dict.fromkeys(("CLIP", "Siglip", "Ovis2"), ("VisionEmbeddings", "patch_embedding")),
    "Aimv2": ("VisionEmbeddings", "patch_embed"),
    "Pixtral": ("VisionModel", "patch_conv"),
    "VJEPA2": ("PatchEmbeddings3D", "proj"),
    **dict.fromkeys(("DINOv3ViT", "Sapiens2"), ("Embeddings", "patch_embeddings")),
}
ROTATES = ("DINOv3ViT", "Sapiens2", "Pixtral")  # layers with rotary positions


def qualified(file: str, name: str) -> str:
    return f"transformers.models.{file}.modeling_{file}.{name}"


def class_of(prefix: str, suffix: str) -> str:
    name = prefix + suffix
    return qualified(MODELS[prefix].file, name.replace("DINO", "Dino") if suffix == "DropPath" else name)


EMBEDDINGS = {class_of(prefix, suffix): attribute for prefix, (suffix, attribute) in _CONVOLUTIONS.items()}
# RMSNorms with T5's code, and the MLPs of layers that are not known as a whole
RMS_NORM: set[type | str] = {
    *(class_of(prefix, "RMSNorm") for prefix in ("Aimv2", "Ovis2", "InternVLVision", "Sapiens2", "Pixtral")),
    qualified("qwen2_5_vl", "Qwen2_5_VLRMSNorm"),
    qualified("glm4v", "Glm4vRMSNorm"),
}
OTHER_MLPS = {
    qualified("qwen2_5_vl", "Qwen2_5_VLMLP"),
    qualified("glm4v", "Glm4VisionMlp"),
}
# Attention within images or windows that cu_seqlens separates, all with the same code
VARLEN_ATTENTION = {
    qualified("qwen2_vl", "VisionAttention"),
    *(
        qualified(file, f"{prefix}VisionAttention")
        for file, prefix in {
            "qwen2_5_vl": "Qwen2_5_VL",
            "qwen3_vl": "Qwen3VL",
            "qwen3_vl_moe": "Qwen3VLMoe",
            "qwen3_omni_moe": "Qwen3OmniMoe",
            "qwen3_5": "Qwen3_5",
            "qwen3_5_moe": "Qwen3_5Moe",
            "qwen4_exp": "Qwen4Exp",
            "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
            "cohere_compass": "CohereCompass",
            "glm4v": "Glm4v",
            "glm4v_moe": "Glm4vMoe",
        }.items()
    ),
}
