"""Weights of a model of timm under the names of other libraries: every tensor that loads is timm's, and positions of
another size are interpolated as the library that wrote them does. transformers' names have a file of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from checkpoint_models import SMALL, SQUARE_SIZES, renamed, with_prefix
from library_imports import import_timm
from models import randomised
from torch import Tensor

import fastvit
from fastvit.checkpoints import CheckpointError

State = dict[str, Tensor]

# ---- OpenAI's CLIP, and Meta's Perception Encoder, which has its names ----

CLIP = {
    "patch_embed.proj": "conv1", "cls_token": "class_embedding", "pos_embed": "positional_embedding",
    "attn.qkv.": "attn.in_proj_", "attn.proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    "norm_pre": "ln_pre", "norm1": "ln_1", "norm2": "ln_2", "norm.": "ln_post.", "ls1.": "ls_1.", "ls2.": "ls_2.",
    "gamma_1": "ls_1.gamma", "gamma_2": "ls_2.gamma", "blocks.": "transformer.resblocks.",
}  # fmt: skip
CLIP_TEXT = {
    "token_embedding.weight": (9, 8), "transformer.resblocks.0.ln_1.weight": (8,), "positional_embedding": (7, 8),
    "ln_final.bias": (8,), "logit_scale": (), "text_projection": (8, 6), "input_resolution": (),
}  # fmt: skip


def openai(state: State) -> list[State]:
    """The vision tower alone, and next to a text tower."""
    pool = {key: state.pop(key) for key in list(state) if key.startswith("attn_pool.")}
    vision = renamed(state, CLIP)
    if "class_embedding" in vision:
        vision["class_embedding"] = vision["class_embedding"].flatten()
    vision["positional_embedding"] = vision["positional_embedding"][0]
    if "head.weight" in vision:
        vision["proj"] = vision.pop("head.weight").T.contiguous()
        assert not vision.pop("head.bias").any()
    for kind in ("weight", "bias") if pool else ():
        vision[f"attn_pool.attn.in_proj_{kind}"] = torch.cat([pool.pop(f"attn_pool.{p}.{kind}") for p in ("q", "kv")])
    names = {
        "l.latent": "l.probe",
        "l.proj": "l.attn.out_proj",
        "l.norm": "l.layernorm",
        "fc1": "c_fc",
        "fc2": "c_proj",
    }
    vision |= renamed(pool, names)
    text = {key: torch.randn(shape) for key, shape in CLIP_TEXT.items()}
    return [vision, {**with_prefix(vision, "visual."), **text}]


# ---- Meta's DINOv2 and DINOv3 ----


def dinov2(state: State) -> list[State]:
    """Positions of CLS apart from it if there are registers; with blocks in chunks in a training checkpoint."""
    state["mask_token"] = torch.randn(1, 32)
    if "reg_token" in state:
        position = torch.randn(1, 1, 32)
        state["register_tokens"] = state.pop("reg_token")
        state["cls_token"] = state["cls_token"] - position
        state["pos_embed"] = torch.cat([position, state["pos_embed"]], dim=1)
    chunked = renamed(state, {"blocks.0.": "blocks.0.0.", "blocks.1.": "blocks.1.1."})
    teacher: Any = {"teacher": {**with_prefix(chunked, "backbone."), "dino_head.mlp.0.weight": torch.ones(3, 3)}}
    return [state, teacher]


def dinov3(state: State) -> list[State]:
    """The bias of k, which timm lacks, is masked."""
    names = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma", "reg_token": "storage_tokens"}
    if any("fc1_g" in key for key in state):
        names |= {"mlp.fc1_g": "mlp.w1", "mlp.fc1_x": "mlp.w2", "mlp.fc2": "mlp.w3"}
    for key in [key for key in state if key.endswith("q_bias")]:
        q, v = state.pop(key), state.pop(key.replace("q_bias", "v_bias"))
        bias = key.replace("q_bias", "qkv.bias")
        state[bias] = torch.cat([q, torch.full_like(q, 7.0), v])
        state[f"{bias}_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(32)
    return [{"mask_token": torch.zeros(1, 32), "rope_embed.periods": torch.ones(8), **renamed(state, names)}]


# ---- DeiT-III ----


def deit3(state: State) -> list[Any]:
    return [{"model": renamed(state, {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"})}]


# ---- the table ----


def with_offset(table: Tensor, size: tuple[int, int]) -> Tensor:
    """Interpolate as in Meta's models/vision_transformer.py: scale factors of a grid 0.1 larger."""
    if size == (4, 4):
        return table
    return F.interpolate(table, scale_factor=tuple((new + 0.1) / 4 for new in size), mode="bicubic")


antialiased = partial(F.interpolate, mode="bicubic", antialias=True)
bilinear = partial(F.interpolate, mode="bilinear")


class Spelling(NamedTuple):
    """name, options: timm's model, whose weights `spell` writes under other names. resize: how positions are
    interpolated; None as timm does it."""

    name: str
    options: dict[str, Any]
    spell: Callable[[State], list[Any]]
    resize: Callable[..., Tensor] | None = antialiased


CLIP_NAME = "vit_base_patch16_clip_quickgelu_224"
SPELLINGS = {
    "OpenAI": Spelling(CLIP_NAME, {"num_classes": 6}, openai),
    "open_clip, LayerScale": Spelling(CLIP_NAME, {"num_classes": 6, "init_values": 0.5}, openai),
    "PE core": Spelling("vit_pe_core_small_patch16_384", {"num_classes": 5}, openai, bilinear),
    "PE core, no CLS": Spelling("vit_pe_core_gigantic_patch14_448", {"num_classes": 5}, openai, bilinear),
    "PE spatial": Spelling("vit_pe_spatial_small_patch16_512", {"init_values": 0.5}, openai, bilinear),
    "DINOv2": Spelling("vit_base_patch14_dinov2", {}, dinov2, with_offset),
    "DINOv2, registers": Spelling("vit_base_patch14_reg4_dinov2", {}, dinov2),
    "DINOv3": Spelling("vit_small_patch16_dinov3_qkvb", {}, dinov3),
    "DINOv3, gated": Spelling("vit_small_plus_patch16_dinov3_qkvb", {}, dinov3),
    "DeiT-III": Spelling("deit3_base_patch16_224", {}, deit3, None),
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_every_tensor_is_timms(kind: str) -> None:
    name, options, spell, resize = SPELLINGS[kind]
    options = {**SMALL, **options}
    written = randomised(import_timm().create_model(name, **options))
    want = dict(written.state_dict())
    if "head.bias" in want:
        want["head.bias"].zero_()  # the projections of other libraries have none
    table = want.get("pos_embed") if resize is not None else None
    for weights in spell(dict(want)):
        for size in SQUARE_SIZES.values() if table is not None else [(16, 16)]:
            got = fastvit.create_model(name, weights, **{**options, "img_size": size}).state_dict()
            if resize is not None and table is not None:
                patches = table[:, -16:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
                resized = resize(patches, size=(size[0] // 4, size[1] // 4)).flatten(2).mT
                want["pos_embed"] = torch.cat([table[:, :-16], resized], dim=1)
            torch.testing.assert_close(dict(got), want)


def test_a_bias_of_k_is_not_dropped() -> None:
    """Meta's files mask it; one without a mask is another model's."""
    name = "vit_small_patch16_dinov3_qkvb"
    (weights,) = dinov3(dict(fastvit.create_model(name, **SMALL).state_dict()))
    unmasked = {key: value for key, value in weights.items() if "bias_mask" not in key}
    with pytest.raises(CheckpointError, match=r"attn\.qkv\.bias"):
        fastvit.create_model(name, unmasked, **SMALL)
