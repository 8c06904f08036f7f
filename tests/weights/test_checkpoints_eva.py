"""Weights of DINOv3, EVA and the Perception Encoder as timm, transformers and Meta write them, in our models."""

from typing import Any

import pytest
import torch
from library_imports import import_library, import_timm
from models import close, randomised
from torch import Tensor

import fastvit
from fastvit import checkpoints

SMALL: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 2}
TIMM = ("vit_small_plus_patch16_dinov3_qkvb", "eva02_base_patch14_448", "vit_pe_core_small_patch16_384")
IMAGE = torch.linspace(-2, 2, 2 * 3 * 64 * 96).sin().view(2, 3, 64, 96)


def ours(name: str, weights: dict[str, Tensor], **more: Any) -> Any:
    return fastvit.create_model(name, weights=weights, **{**SMALL, **more}).eval()


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    theirs = randomised(import_timm().create_model(name, **SMALL, img_size=(56, 84) if "14" in name else 64)).eval()
    model = ours(name, theirs.state_dict(), img_size=theirs.patch_embed.img_size)
    image = torch.randn(1, 3, *theirs.patch_embed.img_size)
    assert close(model(image), theirs(image))


def test_learnt_positions_are_interpolated() -> None:
    theirs = randomised(import_timm().create_model("eva02_tiny_patch14_224", **SMALL)).eval()
    model = ours("eva02_tiny_patch14_224", theirs.state_dict(), img_size=(112, 168))
    theirs.set_input_size((112, 168))
    image = torch.randn(1, 3, 112, 168)
    assert close(model(image), theirs(image))


def hugging_face(**options: Any) -> Any:
    transformers = import_library("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    config = transformers.DINOv3ViTConfig(**sizes, num_register_tokens=4, **options)
    return randomised(transformers.DINOv3ViTModel(config)).eval()


@pytest.mark.parametrize("gated", [False, True])
def test_transformers(gated: bool) -> None:
    """Names in memory, and those in files."""
    theirs = hugging_face(use_gated_mlp=gated, hidden_act="silu" if gated else "gelu")
    in_memory = theirs.state_dict()
    for weights in (in_memory, {key.removeprefix("model."): value for key, value in in_memory.items()}):
        model = ours(f"vit_small_{'plus_' if gated else ''}patch16_dinov3_qkvb", weights)
        assert close(model.forward_features(IMAGE), theirs(IMAGE).last_hidden_state)


def meta(model: Any, gated: bool) -> dict[str, Tensor]:
    """The state_dict of ours as Meta's repository spells it."""
    names = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma", "reg_token": "storage_tokens"}
    if gated:
        names |= {"mlp.fc1_g": "mlp.w1", "mlp.fc1_x": "mlp.w2", "mlp.fc2": "mlp.w3"}
    made: dict[str, Tensor] = {"mask_token": torch.zeros(1, 64), "rope_embed.periods": torch.ones(8)}
    for key, value in model.state_dict().items():
        if key.endswith("v_bias"):
            continue
        if key.endswith("q_bias"):
            block = key.removesuffix("q_bias")
            parts = value, torch.full_like(value, 7.0), model.state_dict()[block + "v_bias"]  # k's is masked
            made[block + "qkv.bias"] = torch.cat(parts)
            made[block + "qkv.bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(64)
            continue
        for old, new in names.items():
            key = key.replace(old, new)
        made[key] = value
    return made


@pytest.mark.parametrize("gated", [False, True])
def test_meta(gated: bool) -> None:
    name = f"vit_small_{'plus_' if gated else ''}patch16_dinov3_qkvb"
    original = randomised(fastvit.create_model(name, **SMALL)).eval()
    model = ours(name, meta(original, gated))
    for key, value in original.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


# ---- Meta's Perception Encoder ----


def as_meta(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's state_dict as facebookresearch/perception_models spells it, next to a text tower."""
    names = {
        "patch_embed.proj": "conv1", "norm_pre": "ln_pre", "blocks.": "transformer.resblocks.", ".norm1": ".ln_1",
        ".norm2": ".ln_2", "gamma_1": "ls_1.gamma", "gamma_2": "ls_2.gamma", "attn.qkv.": "attn.in_proj_",
        "attn.proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    }  # fmt: skip
    pool = {"latent": "probe", "proj": "attn.out_proj", "norm": "layernorm"}
    made = {"text_projection": torch.zeros(2), "transformer.resblocks.0.ln_1.weight": torch.zeros(2)}
    for key, value in state.items():
        if key.startswith(("attn_pool.q.", "attn_pool.kv.", "head.bias")):
            continue
        for old, new in names.items():
            key = key.replace(old, new)
        if key.startswith("attn_pool."):
            part, _, rest = key.removeprefix("attn_pool.").partition(".")
            key = ".".join(filter(None, ("attn_pool", pool.get(part, part), rest)))
        elif key in ("cls_token", "pos_embed"):
            key, value = {"cls_token": "class_embedding", "pos_embed": "positional_embedding"}[key], value.squeeze()
        elif key == "head.weight":
            key, value = "proj", value.T
        made[f"visual.{key.replace('norm.', 'ln_post.') if key.startswith('norm.') else key}"] = value
    for kind in ("weight", "bias") if "attn_pool.q.weight" in state else ():
        packed = torch.cat([state[f"attn_pool.{part}.{kind}"] for part in ("q", "kv")])
        made[f"visual.attn_pool.attn.in_proj_{kind}"] = packed
    return made


PE = ["vit_pe_core_small_patch16_384", "vit_pe_core_gigantic_patch14_448", "vit_pe_spatial_small_patch16_512"]


@pytest.mark.parametrize("name", PE)
def test_perception_encoder(name: str) -> None:
    """timm's own reader of such files agrees on what they are. With a text tower, and vision alone."""
    size = (56, 56) if "14" in name else (64, 64)
    theirs = randomised(import_timm().create_model(name, **SMALL, img_size=size)).eval()
    with torch.no_grad():
        for key, value in theirs.named_parameters():
            if key == "head.bias":  # Meta's projection has none
                value.zero_()
    weights = as_meta(theirs.state_dict())
    from timm.models.eva import checkpoint_filter_fn

    read = checkpoint_filter_fn(weights, theirs)
    assert read.keys() == theirs.state_dict().keys()
    assert all(torch.equal(read[key], value) for key, value in theirs.state_dict().items())
    vision = {key.removeprefix("visual."): value for key, value in weights.items() if key.startswith("visual.")}
    image = torch.randn(1, 3, *size)
    for written in (weights, vision):
        assert close(ours(name, written, img_size=size)(image), theirs(image))


def test_positions_of_the_perception_encoder_are_interpolated_as_meta_does() -> None:
    theirs = randomised(import_timm().create_model(PE[0], **SMALL)).eval()
    weights = as_meta(theirs.state_dict())
    model = ours(PE[0], weights, img_size=(64, 96))
    positions = theirs.pos_embed[:, 1:].unflatten(1, (24, 24)).permute(0, 3, 1, 2)
    want = torch.nn.functional.interpolate(positions, size=(4, 6), mode="bilinear").flatten(2).transpose(1, 2)
    torch.testing.assert_close(model.pos_embed, torch.cat((theirs.pos_embed[:, :1], want), 1))


def test_biases_of_zeros_may_be_left_out_and_no_others() -> None:
    theirs = hugging_face()
    with pytest.raises(checkpoints.CheckpointError, match=r"attention\.q_proj\.bias"):
        ours("vit_small_patch16_dinov3", theirs.state_dict())
    for key, value in theirs.state_dict().items():
        if key.endswith(("q_proj.bias", "v_proj.bias")):
            value.zero_()
    model = ours("vit_small_patch16_dinov3", theirs.state_dict())
    assert close(model.forward_features(IMAGE), theirs(IMAGE).last_hidden_state)


def test_a_bias_of_k_is_not_dropped() -> None:
    """Meta's files mask it; one without a mask is another model's."""
    original = fastvit.create_model("vit_small_patch16_dinov3_qkvb", **SMALL)
    weights = {key: value for key, value in meta(original, False).items() if "bias_mask" not in key}
    with pytest.raises(checkpoints.CheckpointError, match=r"attn\.qkv\.bias"):
        ours("vit_small_patch16_dinov3_qkvb", weights)
