"""The classes of Hugging Face transformers (version 5) that are known by name, and the names of their parts.

transformers copies code from model to model. So a class stands here for all with the same code, which `copies.py` adds
to these tables: CLIPMLP is the MLP of some fifty models.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from fastvit.blocks import read
from fastvit.blocks.submodules import Classes


class Parts(NamedTuple):
    """The attributes of a layer. rotates: whether a call has rotary positions, cos and sin."""

    norm1: str
    attention: str
    norm2: str
    mlp: str = "mlp"
    rotates: bool = False


def qualified(name: str) -> str:
    """Return the full name of "vit.ViTLayer", or of "maskformer.maskformer_swin.MaskFormerSwinLayer"."""
    folder, *_, file, kind = name.split(".")[0], *name.split(".")
    return f"transformers.models.{folder}.modeling_{file}.{kind}"


def _all(names: str) -> Classes:
    return set(map(qualified, names.split()))


VIT = Parts("layernorm_before", "attention", "layernorm_after")
DINO = Parts("norm1", "attention", "norm2")
CLIP = Parts("layer_norm1", "self_attn", "layer_norm2")
SAM = Parts("layer_norm1", "attn", "layer_norm2")
SAM3 = SAM._replace(attention="attention")
LLAMA = Parts("input_layernorm", "self_attn", "post_attention_layernorm")
# Layers that are called with tokens and a mask or rotary positions, and return tokens
LAYERS = {
    qualified(name): parts
    for parts, names in {
        VIT: "vit.ViTLayer internvl.InternVLVisionLayer videomae.VideoMAELayer pixio.PixioLayer "
        "vitpose_backbone.VitPoseBackboneLayer",
        DINO: "dinov2.Dinov2Layer",
        DINO._replace(rotates=True): "dinov3_vit.DINOv3ViTLayer",
        CLIP: "clip.CLIPEncoderLayer siglip.SiglipEncoderLayer blip.BlipEncoderLayer",
        Parts("rms_norm1", "attention", "rms_norm2", "ffn"): "aimv2.Aimv2EncoderLayer",
        Parts("attention_norm", "attention", "ffn_norm", "feed_forward", True): "pixtral.PixtralAttentionLayer",
    }.items()
    for name in names.split()
}
ATTENTION = _all(
    "vit.ViTAttention dinov2.Dinov2Attention clip.CLIPAttention altclip.AltCLIPAttention siglip.SiglipAttention "
    "idefics2.Idefics2VisionAttention granite_docling.GraniteDoclingVisionAttention kosmos2.Kosmos2VisionAttention "
    "git.GitVisionAttention owlvit.OwlViTAttention internvl.InternVLVisionAttention janus.JanusVisionAttention "
    "videomae.VideoMAEAttention blip.BlipAttention blip_2.Blip2Attention radio.RadioAttention "
    "lw_detr.LwDetrViTAttention"
)
TUPLE_ATTENTION = _all("flava.FlavaAttention data2vec.data2vec_vision.Data2VecVisionAttention")
ROTARY_ATTENTION = _all("dinov3_vit.DINOv3ViTAttention sapiens2.Sapiens2Attention pixtral.PixtralAttention")
MLCD_ATTENTION = _all("mlcd.MLCDAttention step3p7.Step3p7VisionAttention")
LLAMA4_ATTENTION = _all("llama4.Llama4VisionAttention")
MLLAMA_ATTENTION = _all("mllama.MllamaVisionAttention")
VJEPA2_ATTENTION = _all("vjepa2.VJEPA2RopeAttention")
# Attention with a softmax of its own, whatever the implementation
PLAIN_ATTENTION = _all(
    "blip.BlipAttention flava.FlavaSelfAttention timesformer.TimesformerSelfAttention "
    "data2vec.data2vec_vision.Data2VecVisionSelfAttention data2vec.data2vec_vision.Data2VecVisionSdpaSelfAttention "
    "donut.donut_swin.DonutSwinSelfAttention"
)
# Attention over a grid
SAM_SDPA_ATTENTION = _all("sam.SamVisionSdpaAttention seggpt.SegGptAttention")
SAM_ATTENTION = SAM_SDPA_ATTENTION | _all("sam.SamVisionAttention")
VITDET_ATTENTION = _all("vitdet.VitDetAttention")
SAM3_ATTENTION = _all("sam3.Sam3ViTRoPEAttention")
SWIN_ATTENTION = _all("swin.SwinAttention donut.donut_swin.DonutSwinAttention")
# Attention within images or windows that cu_seqlens separates. The second kind returns weights, too, or None for them
VARLEN_ATTENTION = _all(
    "qwen2_vl.VisionAttention qwen2_5_omni.Qwen2_5OmniVisionAttention glm_ocr.GlmOcrVisionAttention "
    "exaone4_5.Exaone4_5_VisionAttention kimi_k25.Kimi_K25VisionAttention"
)
VARLEN_PAIR_ATTENTION = _all("paddleocr_vl.PaddleOCRVisionAttention")
# Attention in two modules: the first has q, k and v, the second the last linear layer and its dropout
SELF_ATTENTION = PLAIN_ATTENTION | _all(
    "vit.ViTSelfAttention dinov2.Dinov2SelfAttention videomae.VideoMAESelfAttention yolos.YolosSelfAttention"
)
SELF_OUTPUT = _all(
    "vit.ViTSelfOutput dinov2.Dinov2SelfOutput videomae.VideoMAESelfOutput timesformer.TimesformerSelfOutput "
    "data2vec.data2vec_vision.Data2VecVisionSelfOutput"
)
# An MLP in two modules: the first has fc1, the second fc2, dropout and perhaps the residual
INTERMEDIATE = _all("vit.ViTIntermediate videomae.VideoMAEIntermediate")
OUTPUT = _all("vit.ViTOutput videomae.VideoMAEOutput")
OUTPUT_ALONE = _all("data2vec.data2vec_vision.Data2VecVisionOutput")
MLP = _all(
    "clip.CLIPMLP janus.JanusVisionMLP dinov2.Dinov2MLP dinov2.Dinov2SwiGLUFFN dinov3_vit.DINOv3ViTMLP "
    "dinov3_vit.DINOv3ViTGatedMLP aimv2.Aimv2MLP vjepa2.VJEPA2MLP vitdet.VitDetMlp sam.SamMLPBlock sam3.Sam3MLP "
    "qwen2_vl.VisionMlp qwen2_5_vl.Qwen2_5_VLMLP qwen3_vl.Qwen3VLVisionMLP"
)
RMS_NORM = _all("aimv2.Aimv2RMSNorm")  # T5's code
NORM = read.NORM | RMS_NORM
SWIN_BIAS = _all("swin.SwinRelativePositionBias")
LAYER_SCALE = {nn.Identity, *_all("dinov2.Dinov2LayerScale")}
DROP_PATH = {nn.Identity, *_all("dinov2.Dinov2DropPath")}
