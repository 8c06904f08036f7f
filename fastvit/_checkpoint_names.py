"""The names in other libraries' checkpoints of Vision Transformers, and how those libraries interpolate positions.

Each source is a table from its names to ours, which are timm's. Four of our names are intermediate: q, k and v apart
(`attn.q`, `attn.k`, `attn.v`) or, of SigLIP's pooling, together (`attn_pool.qkv`), DINOv3's `mlp.up`, which is a gated
MLP's fc1_x or else fc1, and CLIP's projection (`head.projection`, or `head.projection_t` for its transpose).

Sources: timm 1.0.31, torchvision 0.28, transformers 4 (its files) and 5 (in memory), facebookresearch/dinov2, dinov3
and mae,
openai/CLIP and open_clip 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch.nn.functional as F
from torch import Tensor

from fastvit._positions import Resize, antialiased


def plain(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As transformers and MAE."""
    return F.interpolate(image, size=grid, mode="bicubic")


def align_corners(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As torchvision."""
    return F.interpolate(image, size=grid, mode="bicubic", align_corners=True)


def with_offset(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As Meta's DINOv2 without registers: the scale of a grid that is 0.1 larger."""
    h, w = image.shape[-2:]
    return F.interpolate(image, scale_factor=((grid[0] + 0.1) / h, (grid[1] + 0.1) / w), mode="bicubic")


@dataclass(frozen=True)
class Source:
    """The names of one library. A key is `prefix + name + tail` or `prefix + block + name + tail`; `rename` looks
    the longest name up that is in the table, and keeps the tail (".weight")."""

    name: str
    marker: str  # behind the prefix, a key that only this source has
    prefixes: tuple[str, ...]
    block: str  # regular expression: the block's number, and the rest
    in_block: Mapping[str, str]
    in_model: Mapping[str, str]  # the vision model's other names
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # names without the prefix
    resize: Resize = antialiased
    square: bool = True  # whether positions always are of a square grid

    def rename(self, key: str, prefix: str) -> str:
        """Our name; "" for what is no part of a vision model; the key itself where the tables do not have it."""
        if not key.startswith(prefix):
            return _looked_up(key, self.elsewhere, key)
        name = key.removeprefix(prefix)
        block = re.fullmatch(self.block, name)
        if block is None:
            return _looked_up(name, self.in_model, key)
        return f"blocks.{block[1]}.{_looked_up(block[2], self.in_block, block[2])}"


def _looked_up(name: str, table: Mapping[str, str], otherwise: str) -> str:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        head, tail = ".".join(parts[:cut]), parts[cut:]
        if head in table:
            return ".".join([table[head], *tail]) if table[head] else ""
    return otherwise


def _ignored(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")


_TIMM = ("cls_token", "reg_token", "pos_embed", "patch_embed", "norm_pre", "norm", "fc_norm", "head", "attn_pool")
_TIMM_IN_MODEL = {name: name for name in _TIMM}
_TIMM_IN_BLOCK = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}  # DeiT-III's own files
_HEADS_OF_TRAINING = _ignored("dino_head", "ibot_head")
_MAE_DECODER = _ignored("decoder_embed", "decoder_pos_embed", "decoder_blocks", "decoder_norm", "decoder_pred")
_CLIP_TEXT = _ignored(
    "transformer", "token_embedding", "positional_embedding", "ln_final", "text_projection", "text", "attn_mask",
    "logit_scale", "logit_bias", "input_resolution", "context_length", "vocab_size",
)  # fmt: skip
_HF_TEXT = _ignored("text_model", "text_projection", "logit_scale", "logit_bias")
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

SOURCES = (
    Source(
        name="torchvision",
        marker="conv_proj.weight",
        prefixes=("",),
        block=r"encoder\.layers\.encoder_layer_([0-9]+)\.(.+)",
        in_model={
            "class_token": "cls_token",
            "encoder.pos_embedding": "pos_embed",
            "conv_proj": "patch_embed.proj",
            "encoder.ln": "norm",
            "heads.head": "head",
        },
        in_block={
            "ln_1": "norm1",
            "ln_2": "norm2",
            "self_attention.in_proj_weight": "attn.qkv.weight",
            "self_attention.in_proj_bias": "attn.qkv.bias",
            "self_attention.out_proj": "attn.proj",
            "mlp.0": "mlp.fc1",
            "mlp.3": "mlp.fc2",
            "mlp.linear_1": "mlp.fc1",
            "mlp.linear_2": "mlp.fc2",
        },
        resize=align_corners,
    ),
    Source(
        name="Hugging Face ViT, DeiT or DINOv2",
        marker="embeddings.patch_embeddings.projection.weight",
        prefixes=("", "vit.", "deit.", "dinov2.", "dinov2_with_registers."),
        block=r"(?:encoder\.layer|layers)\.([0-9]+)\.(.+)",
        in_model={
            "embeddings.cls_token": "cls_token",
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
        elsewhere={"classifier": "head"},
        resize=plain,
    ),
    Source(
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
    ),
    _HF_CLIP,
    _HF_SIGLIP,
    Source(
        name="OpenAI CLIP or open_clip",
        marker="class_embedding",
        prefixes=("visual.", ""),
        block=r"transformer\.resblocks\.([0-9]+)\.(.+)",
        in_model={
            "class_embedding": "cls_token",
            "positional_embedding": "pos_embed",
            "conv1": "patch_embed.proj",
            "ln_pre": "norm_pre",
            "ln_post": "norm",
            "proj": "head.projection_t",
        },
        in_block={
            "ln_1": "norm1",
            "ln_2": "norm2",
            "attn.in_proj_weight": "attn.qkv.weight",
            "attn.in_proj_bias": "attn.qkv.bias",
            "attn.out_proj": "attn.proj",
            "ls_1": "ls1",
            "ls_2": "ls2",
            "mlp.c_fc": "mlp.fc1",
            "mlp.c_proj": "mlp.fc2",
        },
        elsewhere=_CLIP_TEXT,
    ),
    Source(
        name="Meta's MAE with its decoder",
        marker="decoder_embed.weight",
        prefixes=("",),
        block=r"blocks\.([0-9]+)\.(.+)",
        in_model={**_TIMM_IN_MODEL, "mask_token": "", **_MAE_DECODER},
        in_block={},
        resize=plain,
    ),
    Source(
        name="Meta's DINOv3",
        marker="storage_tokens",
        prefixes=("", "backbone."),
        block=r"blocks\.([0-9]+)\.(.+)",
        in_model={
            **_TIMM_IN_MODEL,
            "storage_tokens": "reg_token",
            **_ignored("mask_token", "rope_embed", "cls_norm", "local_cls_norm"),
        },
        in_block={
            "mlp.w1": "mlp.fc1_g",
            "mlp.w2": "mlp.fc1_x",
            "mlp.w3": "mlp.fc2",
        },
        elsewhere=_HEADS_OF_TRAINING,
    ),
    Source(
        name="Meta's DINOv2",
        marker="mask_token",
        prefixes=("", "backbone."),
        block=r"blocks\.(?:[0-9]+\.)?([0-9]+)\.(.+)",  # with block_chunks > 0 the chunk's number comes first
        in_model={**_TIMM_IN_MODEL, "mask_token": "", "register_tokens": "register_tokens"},
        in_block={},
        elsewhere=_HEADS_OF_TRAINING,
        resize=with_offset,
    ),
    Source(
        name="timm",
        marker="patch_embed.proj.weight",
        prefixes=("", "backbone.", "visual.trunk."),
        block=r"blocks\.([0-9]+)\.(.+)",
        in_model=_TIMM_IN_MODEL,
        in_block=_TIMM_IN_BLOCK,
        elsewhere={"visual.head.proj.weight": "head.projection", **_HEADS_OF_TRAINING, **_CLIP_TEXT},
        square=False,
    ),
)
