"""How other libraries spell a Vision Transformer's state_dict, and how they interpolate its positions.

Each source is a table from its names to ours, which are timm's. Two of our names are intermediate: q, k and v apart
(`attn.q`, `attn.k`, `attn.v`), and CLIP's projection (`head.projection`, or `head.projection_t` for its transpose).

Sources: timm 1.0.31, torchvision 0.28, transformers 4 (its files) and 5 (in memory), facebookresearch/dinov2,
openai/CLIP and open_clip 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

Resize = Callable[[Tensor, tuple[int, int]], Tensor]


def antialiased(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """(1, D, h, w) -> (1, D, *grid), as timm, open_clip, and both DINOv2 with registers."""
    return F.interpolate(image, size=grid, mode="bicubic", antialias=True)


def plain(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As transformers."""
    return F.interpolate(image, size=grid, mode="bicubic")


def corners(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As torchvision."""
    return F.interpolate(image, size=grid, mode="bicubic", align_corners=True)


def offset(image: Tensor, grid: tuple[int, int]) -> Tensor:
    """As Meta's DINOv2 without registers: the scale of a grid that is 0.1 larger."""
    h, w = image.shape[-2:]
    return F.interpolate(image, scale_factor=((grid[0] + 0.1) / h, (grid[1] + 0.1) / w), mode="bicubic")


@dataclass(frozen=True)
class Source:
    """The spelling of one library. A key is `prefix + name + tail` or `prefix + block + name + tail`; `rename` looks
    the longest name up that is in the table, and keeps the tail (".weight")."""

    name: str
    marker: str  # a key that tells this source, behind the prefix
    prefixes: tuple[str, ...]
    block: str  # regular expression: the block's number, and the rest
    inside: Mapping[str, str]  # names in a block
    outside: Mapping[str, str]  # the vision model's other names
    beside: Mapping[str, str] = field(default_factory=dict)  # names without the prefix
    resize: Resize = antialiased
    square: bool = True  # whether positions always are of a square grid

    def rename(self, key: str, prefix: str) -> str:
        """Our name; "" for what is no part of a vision model; the key itself where the tables do not have it."""
        if not key.startswith(prefix):
            return _looked_up(key, self.beside, key)
        name = key.removeprefix(prefix)
        block = re.fullmatch(self.block, name)
        if block is None:
            return _looked_up(name, self.outside, key)
        return f"blocks.{block[1]}.{_looked_up(block[2], self.inside, block[2])}"


def _looked_up(name: str, table: Mapping[str, str], otherwise: str) -> str:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        head, tail = ".".join(parts[:cut]), parts[cut:]
        if head in table:
            return ".".join([table[head], *tail]) if table[head] else ""
    return otherwise


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _ignored(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "")


_TIMM_OUTSIDE = _same(
    "cls_token", "reg_token", "pos_embed", "patch_embed", "norm_pre", "norm", "fc_norm", "head", "attn_pool"
)
_TIMM_INSIDE = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}  # DeiT-III's own files
_HEADS_OF_TRAINING = _ignored("dino_head", "ibot_head")
_CLIP_TEXT = _ignored(
    "transformer", "token_embedding", "positional_embedding", "ln_final", "text_projection", "text", "attn_mask",
    "logit_scale", "logit_bias", "input_resolution", "context_length", "vocab_size",
)  # fmt: skip
_HF_TEXT = _ignored("text_model", "text_projection", "logit_scale", "logit_bias")
_HF_CLIP_INSIDE = {
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.out_proj": "attn.proj",
}
_HF_CLIP_OUTSIDE = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding.weight": "pos_embed",
    "embeddings.position_ids": "",
    "embeddings.patch_embedding": "patch_embed.proj",
    "pre_layrnorm": "norm_pre",
    "post_layernorm": "norm",
}

SOURCES = (
    Source(
        name="torchvision",
        marker="conv_proj.weight",
        prefixes=("",),
        block=r"encoder\.layers\.encoder_layer_([0-9]+)\.(.+)",
        outside={
            "class_token": "cls_token",
            "encoder.pos_embedding": "pos_embed",
            "conv_proj": "patch_embed.proj",
            "encoder.ln": "norm",
            "heads.head": "head",
        },
        inside={
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
        resize=corners,
    ),
    Source(
        name="Hugging Face ViT, DeiT or DINOv2",
        marker="embeddings.patch_embeddings.projection.weight",
        prefixes=("", "vit.", "deit.", "dinov2.", "dinov2_with_registers."),
        block=r"(?:encoder\.layer|layers)\.([0-9]+)\.(.+)",
        outside={
            "embeddings.cls_token": "cls_token",
            "embeddings.register_tokens": "register_tokens",
            "embeddings.mask_token": "",
            "embeddings.position_embeddings": "pos_embed",
            "embeddings.patch_embeddings.projection": "patch_embed.proj",
            "layernorm": "norm",
            "pooler": "pooler",
        },
        inside={
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
        beside={"classifier": "head"},
        resize=plain,
    ),
    Source(
        name="Hugging Face CLIP",
        marker="embeddings.class_embedding",
        prefixes=("", "vision_model."),
        block=r"encoder\.layers\.([0-9]+)\.(.+)",
        outside=_HF_CLIP_OUTSIDE,
        inside=_HF_CLIP_INSIDE,
        beside={"visual_projection.weight": "head.projection", **_HF_TEXT},
        resize=plain,
    ),
    Source(
        name="Hugging Face SigLIP",
        marker="embeddings.patch_embedding.weight",
        prefixes=("", "vision_model."),
        block=r"encoder\.layers\.([0-9]+)\.(.+)",
        outside={**_HF_CLIP_OUTSIDE, "head": "attn_pool"},
        inside=_HF_CLIP_INSIDE,
        beside={"classifier": "head", **_HF_TEXT},
        resize=plain,
    ),
    Source(
        name="OpenAI CLIP or open_clip",
        marker="class_embedding",
        prefixes=("visual.", ""),
        block=r"transformer\.resblocks\.([0-9]+)\.(.+)",
        outside={
            "class_embedding": "cls_token",
            "positional_embedding": "pos_embed",
            "conv1": "patch_embed.proj",
            "ln_pre": "norm_pre",
            "ln_post": "norm",
            "proj": "head.projection_t",
        },
        inside={
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
        beside=_CLIP_TEXT,
    ),
    Source(
        name="Meta's DINOv2",
        marker="mask_token",
        prefixes=("", "backbone."),
        block=r"blocks\.(?:[0-9]+\.)?([0-9]+)\.(.+)",  # with block_chunks > 0 the chunk's number comes first
        outside={**_TIMM_OUTSIDE, "mask_token": "", "register_tokens": "register_tokens"},
        inside={},
        beside=_HEADS_OF_TRAINING,
        resize=offset,
    ),
    Source(
        name="timm",
        marker="patch_embed.proj.weight",
        prefixes=("", "backbone.", "visual.trunk."),
        block=r"blocks\.([0-9]+)\.(.+)",
        outside=_TIMM_OUTSIDE,
        inside=_TIMM_INSIDE,
        beside={"visual.head.proj.weight": "head.projection", **_HEADS_OF_TRAINING, **_CLIP_TEXT},
        square=False,
    ),
)
