"""The names in other libraries' checkpoints of Vision Transformers, and how those libraries interpolate positions.

Each source maps its names to ours, which are timm's. Some of the names are intermediate, and loading.py converts them:
q, k and v as separate layers (`attn.q`, `attn.k`, `attn.v`) or, in attention pooling, as one (`attn_pool.qkv`);
DINOv3's `mlp.up`, which is fc1_x of a gated MLP and otherwise fc1; CLIP's projection (`head.projection`, or
`head.projection_t` for its transpose); and DINOv2's `register_tokens`.

Sources: timm 1.0.31, transformers (names_hf.py), facebookresearch/dinov2, dinov3, mae and perception_models,
openai/CLIP and open_clip 3.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import Tensor

from fastvit.checkpoints.files import CheckpointError, first
from fastvit.checkpoints.names_hf import HUGGING_FACE
from fastvit.checkpoints.source import Source, bilinear, ignored, plain, with_offset

_TIMM = (
    "cls_token", "reg_token", "dist_token", "pos_embed", "patch_embed", "norm_pre", "rope", "norm", "fc_norm", "head",
    "head_dist", "attn_pool",
)  # fmt: skip
_TIMM_IN_MODEL = {name: name for name in _TIMM}
_TIMM_IN_BLOCK = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}  # DeiT-III's own files
_HEADS_OF_TRAINING = ignored("dino_head", "ibot_head")
_MAE_DECODER = ignored("decoder_embed", "decoder_pos_embed", "decoder_blocks", "decoder_norm", "decoder_pred")
_CLIP_TEXT = ignored(
    "transformer", "token_embedding", "positional_embedding", "ln_final", "text_projection", "text", "attn_mask",
    "logit_scale", "logit_bias", "input_resolution", "context_length", "vocab_size",
)  # fmt: skip

_CLIP = Source(
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
)
# Core has attention pooling; lang and spatial have LayerScale and no last norm, which CLIP always has
_PERCEPTION_ENCODER = [
    replace(
        _CLIP,
        name="Meta's Perception Encoder",
        marker=marker,
        lacks=lacks,
        in_model={
            **_CLIP.in_model,
            "attn_pool.probe": "attn_pool.latent",
            "attn_pool.attn.in_proj_weight": "attn_pool.qkv.weight",
            "attn_pool.attn.in_proj_bias": "attn_pool.qkv.bias",
            "attn_pool.attn.out_proj": "attn_pool.proj",
            "attn_pool.layernorm": "attn_pool.norm",
            "attn_pool.mlp.c_fc": "attn_pool.mlp.fc1",
            "attn_pool.mlp.c_proj": "attn_pool.mlp.fc2",
        },
        resize=bilinear,
    )
    for marker, lacks in (("attn_pool.probe", ""), ("transformer.resblocks.0.ls_1.gamma", "ln_post.weight"))
]

SOURCES = (
    *HUGGING_FACE,
    *_PERCEPTION_ENCODER,
    _CLIP,
    Source(
        name="Meta's MAE with its decoder",
        marker="decoder_embed.weight",
        prefixes=("",),
        block=r"blocks\.([0-9]+)\.(.+)",
        in_model={**_TIMM_IN_MODEL, "mask_token": "", **_MAE_DECODER},
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
            **ignored("mask_token", "rope_embed", "cls_norm", "local_cls_norm"),
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

# modules that torch.compile, activation checkpointing and FSDP put around others; they may be anywhere in a name
_WRAPPING = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_fpw_module)\.")


def without_wrapping(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors under their names without the modules of torch.compile, FSDP and activation checkpointing."""
    plain = {_WRAPPING.sub("", name): value for name, value in tensors.items()}
    if len(plain) < len(tensors):
        twice = [name for name in tensors if _WRAPPING.search(name) and _WRAPPING.sub("", name) in tensors]
        raise CheckpointError(f"{where} has the same weight twice, with and without a wrapper's name: {first(twice)}")
    return plain


def fronts(names: Collection[str]) -> list[str]:
    """Return the first prefixes that all names have and that end in a dot, after "": "module.", "module.model."."""
    low, high = min(names), max(names)
    prefixes = (low[: dot.end()] for dot in itertools.islice(re.finditer(r"\.", low), 8))
    return ["", *(prefix for prefix in prefixes if high.startswith(prefix))]


def recognised(state_dict: Mapping[str, Tensor], where: str) -> tuple[Source, str, dict[str, Tensor]] | None:
    """Return the library whose names these keys are, the prefix of the vision model's keys, and the tensors without
    wrappers' names and without a prefix that all keys have. Returns None if no library has such names."""
    tensors = without_wrapping(state_dict, where)
    for front in fronts(tensors):
        for source in SOURCES:
            for prefix in source.prefixes:
                if source.wrote(tensors, front + prefix):
                    return source, prefix, {key.removeprefix(front): value for key, value in tensors.items()}
    return None
