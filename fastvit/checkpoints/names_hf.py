"""The names in checkpoints of Hugging Face transformers: 4 (its files) and 5 (in memory)."""

from __future__ import annotations

from dataclasses import replace

from fastvit.checkpoints.source import Source, ignored, plain

_HF_TEXT = ignored("text_model", "text_projection", "logit_scale", "logit_bias")
_HF_CLIP = Source(
    name="Hugging Face CLIP",
    marker="embeddings.class_embedding",
    prefixes=("", "vision_model."),
    block=r"encoder\.layers\.([0-9]+)\.(.+)",
    in_model={
        "embeddings.class_embedding": "cls_token",
        "embeddings.position_embedding.weight": "pos_embed",
        "embeddings.position_ids": "",
        "embeddings.patch_embedding": "patch_embed.proj",
        "pre_layrnorm": "norm_pre",
        "post_layernorm": "norm",
    },
    in_block={
        "layer_norm1": "norm1",
        "layer_norm2": "norm2",
        "self_attn.q_proj": "attn.q",
        "self_attn.k_proj": "attn.k",
        "self_attn.v_proj": "attn.v",
        "self_attn.out_proj": "attn.proj",
    },
    elsewhere={"visual_projection.weight": "head.projection", **_HF_TEXT},
    resize=plain,
)
_HF_SIGLIP = replace(
    _HF_CLIP,
    name="Hugging Face SigLIP",
    marker="embeddings.patch_embedding.weight",
    in_model={
        **_HF_CLIP.in_model,
        "head": "attn_pool",
        "head.probe": "attn_pool.latent",
        "head.attention.in_proj_weight": "attn_pool.qkv.weight",
        "head.attention.in_proj_bias": "attn_pool.qkv.bias",
        "head.attention.out_proj": "attn_pool.proj",
        "head.layernorm": "attn_pool.norm",
    },
    elsewhere={"classifier": "head", **_HF_TEXT},
)
_HF_VIT = Source(
    name="Hugging Face ViT, DeiT or DINOv2",
    marker="embeddings.patch_embeddings.projection.weight",
    prefixes=("", "vit.", "deit.", "dinov2.", "dinov2_with_registers."),
    block=r"(?:encoder\.layer|layers)\.([0-9]+)\.(.+)",
    in_model={
        "embeddings.cls_token": "cls_token",
        "embeddings.distillation_token": "dist_token",
        "embeddings.register_tokens": "register_tokens",
        "embeddings.mask_token": "",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        "layernorm": "norm",
        "pooler": "pooler",
    },
    in_block={
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "attention.q_proj": "attn.q",
        "attention.k_proj": "attn.k",
        "attention.v_proj": "attn.v",
        "attention.o_proj": "attn.proj",
        "attention.attention.query": "attn.q",
        "attention.attention.key": "attn.k",
        "attention.attention.value": "attn.v",
        "attention.output.dense": "attn.proj",
        "layer_scale1.lambda1": "ls1.gamma",
        "layer_scale2.lambda1": "ls2.gamma",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    },
    elsewhere={
        "classifier": "head",
        "cls_classifier": "head",
        "distillation_classifier": "head_dist",
        **ignored("decoder"),  # MAE's
    },
    resize=plain,
)
_HF_DINOV3 = Source(
    name="Hugging Face DINOv3",
    marker="embeddings.patch_embeddings.weight",
    prefixes=("", "dinov3_vit."),
    block=r"(?:model\.)?layer\.([0-9]+)\.(.+)",
    in_model={
        "embeddings.cls_token": "cls_token",
        "embeddings.register_tokens": "reg_token",
        "embeddings.mask_token": "",
        "embeddings.patch_embeddings": "patch_embed.proj",
        "norm": "norm",
    },
    in_block={
        "attention.q_proj": "attn.q",
        "attention.k_proj": "attn.k",
        "attention.v_proj": "attn.v",
        "attention.o_proj": "attn.proj",
        "layer_scale1.lambda1": "ls1.gamma",
        "layer_scale2.lambda1": "ls2.gamma",
        "mlp.gate_proj": "mlp.fc1_g",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.fc2",
    },
    elsewhere={"classifier": "head"},
)
_HF_AIMV2 = Source(
    name="Hugging Face AIMv2",
    marker="embeddings.patch_embed.weight",
    prefixes=("", "vision_model."),
    block=r"encoder\.layers\.([0-9]+)\.(.+)",
    in_model={
        "embeddings.patch_embed": "patch_embed.proj",
        "embeddings.rms_norm": "patch_embed.norm",
        "embeddings.position_embedding.weight": "pos_embed",
        "rms_norm": "norm",
        "head": "pooler",
    },
    in_block={
        "rms_norm1": "norm1",
        "rms_norm2": "norm2",
        "attention.q_proj": "attn.q",
        "attention.k_proj": "attn.k",
        "attention.v_proj": "attn.v",
        "attention.out_proj": "attn.proj",
        "ffn.gate_proj": "mlp.fc1_g",
        "ffn.up_proj": "mlp.fc1_x",
        "ffn.down_proj": "mlp.fc2",
    },
    elsewhere={"visual_projection.weight": "head.projection", **_HF_TEXT},
)

HUGGING_FACE = (_HF_VIT, _HF_DINOV3, _HF_CLIP, _HF_SIGLIP, _HF_AIMV2)
