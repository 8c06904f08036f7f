"""Wrong arguments of constructors, and of calls, raise before any tensor is made, and the message names them."""

import inspect
import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from models import Calls
from torch import nn

import fastvit
from fastvit import VisionTransformer, VisionTransformerDistilled, layers
from fastvit.eva import Eva
from fastvit.modules.pooling import AttentionPoolLatent
from fastvit.modules.rope import RotaryEmbeddingCat, RotaryEmbeddingDinoV3

TINY: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5, "mlp_ratio": 2.0,
}  # fmt: skip
HEADS: dict[str, Any] = {"dim": 32, "num_heads": 2}
MLP: dict[str, Any] = {"in_features": 16}
CONSTRUCTORS: dict[Callable[..., nn.Module], dict[str, Any]] = {
    VisionTransformer: TINY, Eva: {**TINY, "use_rot_pos_emb": True}, VisionTransformerDistilled: TINY,
    layers.Attention: HEADS, layers.CrossAttention: HEADS, layers.Block: HEADS, layers.PostNormBlock: HEADS,
    layers.Mlp: MLP, layers.GluMlp: MLP, layers.SwiGLU: MLP,
    layers.PatchEmbed: {"img_size": 8, "patch_size": 4, "embed_dim": 16},
    layers.LayerNorm: {"num_channels": 8}, layers.RMSNorm: {"channels": 8}, layers.LayerScale: {"dim": 8},
    layers.DropPath: {}, layers.EvaAttention: HEADS, layers.AttentionRope: HEADS, layers.EvaBlock: HEADS,
    AttentionPoolLatent: {"in_features": 32, "num_heads": 2},
    RotaryEmbeddingCat: {"dim": 8}, RotaryEmbeddingDinoV3: {"dim": 8},
}  # fmt: skip
WRONG: list[tuple[Any, str]] = [  # a value, and the arguments that must not have it in any constructor
    (0, "in_chans embed_dim num_heads dim in_features hidden_features out_features num_channels channels kv_dim"),
    (-1, "depth num_classes reg_tokens num_reg_tokens align_to swiglu_align_to num_prefix_tokens"),
    (True, "depth"),
    ("4", "img_size patch_size mlp_ratio init_values eps temperature grid_offset rope_temperature rope_grid_offset"),
    ("4", "ref_feat_shape drop_prob"),
    (math.nan, "drop attn_drop proj_drop drop_path drop_rate pos_drop_rate proj_drop_rate attn_drop_rate"),
    (1.5, "drop_path_rate drop_path drop_prob drop"),
    ("glue", "global_pool pos_embed patch_init act_layer norm_layer embed_norm_layer mlp_layer block_fn device"),
    ("glue", "attn_type rope_type rope_grid_indexing grid_indexing"),
    ((0.5, 0.5), "mean"),
    (torch.int8, "dtype"),
]
# checked by a part after other parts were made
LATE = ("norm_layer", "ref_feat_shape", "rope_temperature", "rope_grid_offset")


@pytest.mark.parametrize("make", CONSTRUCTORS)
def test_constructors_name_the_argument(make: Callable[..., nn.Module]) -> None:
    taken = inspect.signature(make).parameters
    flags = [name for name, parameter in taken.items() if str(parameter.annotation) in ("bool", "bool | None")]
    for value, names in [*WRONG, (2, " ".join(flags)), ("yes", " ".join(flags))]:
        for name in taken.keys() & set(names.split()):
            with (
                Calls() as calls,
                pytest.raises((TypeError, ValueError), match=f"^({name}|{name.removeprefix('rope_')}) "),
            ):
                make(**{**CONSTRUCTORS[make], name: value})
            assert not calls.names or name in LATE, name


STATISTICS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
ViT, Attention, Block = (
    partial(make, **CONSTRUCTORS[make]) for make in (VisionTransformer, layers.Attention, layers.Block)
)
create = partial(fastvit.create_model, "vit_base_patch16_224")
MESSAGES: list[tuple[Callable[..., nn.Module], type[Exception], str, dict[str, Any]]] = [
    (ViT, ValueError, "std must be one number in (0, 1] for each of the 3", {**STATISTICS, "std": (0.0, 0.0, 0.0)}),
    (ViT, ValueError, "mean and std must both be given", {"mean": (0.5, 0.4, 0.3)}),
    (ViT, ValueError, "img_size must be a positive integer or (height, width)", {"img_size": (3, 224, 224)}),
    (ViT, ValueError, "patch_size (4, 4) must divide the image size, got (18, 18)", {"img_size": 18}),
    (ViT, ValueError, "mlp_ratio must be a finite number with embed_dim * mlp_ratio >= 1", {"mlp_ratio": 0}),
    (ViT, ValueError, "num_heads must be a divisor of embed_dim = 32, got 5", {"num_heads": 5}),
    (ViT, ValueError, "global_pool 'token' needs class_token=True", {"class_token": False}),
    (ViT, ValueError, "attn_pool_num_heads must be a divisor of embed_dim = 32, got 3",
     {"global_pool": "map", "attn_pool_num_heads": 3}),
    (ViT, ValueError, "block_fn must be a class or one of ['block', 'postnorm'], got 'post'; did you mean postnorm?",
     {"block_fn": "post"}),
    (Attention, ValueError, "qk_norm=True needs norm_layer, got None", {"qk_norm": True}),
    *((Attention, ValueError, f"head_dim = dim / num_heads = {dim} / 2 must be a multiple of 8", {"dim": dim})
      for dim in (16, 40, 528)),
    (Block, TypeError, "qkv_bais is not an argument of Block: did you mean qkv_bias?", {"qkv_bais": True}),
    (partial(layers.GluMlp, 24), ValueError, "hidden_features must be even", {"hidden_features": 41}),
    (Eva, TypeError, "Eva takes no block_fn: its blocks are EvaBlocks", {"block_fn": "postnorm"}),
    (RotaryEmbeddingCat, ValueError, "dim must be a multiple of 4, got 6", {"dim": 6}),
    (create, TypeError, "weights must be a path, a repository of the Hugging Face Hub or a state_dict", {"weights": 5}),
    (create, TypeError, "pretrained is not an argument of create_model('vit_base_patch16_224'): use create_model(name, "
     "weights=True)", {"pretrained": True}),
    (fastvit.RMSNorm, TypeError, "offset is not an argument of RMSNorm: it takes ", {"channels": 8, "offset": 1}),
    (Block, TypeError, "dropout is not an argument of Block: did you mean proj_drop?", {"dropout": 0.1}),
    (create, ValueError, "drop_head=True needs weights", {"drop_head": True}),
    (fastvit.create_model, TypeError, "name must be the name of a model, got 16", {"name": 16}),
    (fastvit.create_model, ValueError, "name is not a known model, got 'dinov2'; nearest: vit_small_patch14_dinov2, ",
     {"name": "dinov2"}),
    (fastvit.compile, TypeError, "model must be an nn.Module or a function, got str",
     {"model": "vit_base_patch16_224"}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message", "wrong"), MESSAGES)
def test_constructors(make: Callable[..., nn.Module], error: type[Exception], message: str, wrong: Any) -> None:
    with Calls() as calls, pytest.raises(error, match=f"^{re.escape(message)}"):
        make(**wrong)
    assert not calls.names


# ---- calls ----


@cache
def model(**options: Any) -> Any:
    return VisionTransformer(**TINY, **options)


@cache
def distilled() -> Any:
    return VisionTransformerDistilled(**TINY)


@cache
def module(name: str) -> Any:
    kinds = layers.CrossAttention, layers.Block, layers.PostNormBlock, layers.EvaBlock
    return dict(zip(("cross", "block", "post", "eva"), kinds, strict=True))[name](48, 3)


def with_another_embedding() -> Any:
    replaced = VisionTransformer(**TINY)
    replaced.patch_embed.proj = nn.Sequential(replaced.patch_embed.proj)
    return replaced


def without_cls() -> Any:
    return model(class_token=False, global_pool="avg")


IMAGE, TOKENS, X = torch.ones(2, 3, 16, 16), torch.ones(2, 16, 32), torch.ones(31, 48)
ENDS, PATCHES = torch.tensor([0, 5, 6, 31]), "image must have shape (B, C, H, W) with C = 3, got"
BLOCKS = "a number of last blocks from 1 to 1, or blocks from -1 to 0"
CALLS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    # images
    (TypeError, "image must be uint8, float32, float16, bfloat16 or float64, got", lambda: model()(IMAGE.long())),
    (ValueError, f"{PATCHES} (2, 1, 16, 16)", lambda: model()(IMAGE[:, :1])),
    (TypeError, "image must be a dense tensor", lambda: model().patch_embed(torch.nested.nested_tensor([*IMAGE]))),
    (ValueError, "image must have the size (H, W) = (16, 16), got (16, 12): resize it, or make the model with img_size",
     lambda: model()(IMAGE[..., :12])),
    (ValueError, "image must have the size (H, W) = (16, 16), got (16, 11): resize", lambda: model()(IMAGE[..., :11])),
    (ValueError, f"{PATCHES} (3, 16, 16); image[None] is", lambda: model()(IMAGE[0])),
    (ValueError, f"{PATCHES} (2, 16, 16, 3); image.movedim(-1, -3)", lambda: model()(IMAGE.movedim(1, -1))),
    (TypeError, "images[0] must be a tensor, got ndarray; one of 8 bits (H, W, C) becomes a batch by "
     "torch.from_numpy(images[0]).permute(2, 0, 1)[None] / 255", lambda: model()([IMAGE[0].numpy()])),
    (ValueError, "patch_size (4, 4) must divide the image size, got (16, 0)",
     lambda: model(dynamic_img_size=True)(IMAGE[..., :0])),
    # heads, pooling, sizes
    (ValueError, "global_pool 'token' needs class_token=True", lambda: without_cls().reset_classifier(3, "token")),
    (ValueError, "global_pool 'map' needs a model made with it", lambda: without_cls().reset_classifier(3, "map")),
    (ValueError, "global_pool must be one of ('token', '')", lambda: distilled().reset_classifier(3, "avg")),
    (TypeError, "enable must be True or False", lambda: distilled().set_distilled_training("yes")),
    (ValueError, "pool_type 'token' needs class_token=True", lambda: without_cls().pool(TOKENS, "token")),
    (ValueError, "pool_type 'map' needs a model made with it, got 'avg'", lambda: without_cls().pool(TOKENS, "map")),
    (ValueError, "patch_size (5, 5) must divide the image size", lambda: model().set_input_size(patch_size=5)),
    (ValueError, "patch_size needs a plain convolution of patches as `proj`, got Sequential",
     lambda: with_another_embedding().set_input_size(patch_size=8)),
    (ValueError, "fixed_table needs a model with pos_embed='sincos' or", lambda: model().fixed_table((2, 2))),
    (ValueError, "mode must be one of ('', 'skip', 'reset'), got 'jax'", lambda: model().init_weights("jax")),
    (ValueError, "device cuda:9 is not there: torch sees ", lambda: create(device="cuda:9", **TINY)),
    (ValueError, "device must not be 'meta'", lambda: create(weights=model().state_dict(), device="meta", **TINY)),
    # features
    (ValueError, f"indices must be {BLOCKS}, got 5", lambda: model().forward_intermediates(IMAGE, 5)),
    (ValueError, f"indices must be {BLOCKS}, got []", lambda: model().forward_intermediates(IMAGE, [])),
    (ValueError, "output_fmt must be one of", lambda: model().forward_intermediates(IMAGE, output_fmt="NHWC")),
    (ValueError, f"indices must be {BLOCKS}, got 9", lambda: model().prune_intermediate_layers(9)),
    (TypeError, "reshape must be True or False", lambda: model().get_intermediate_layers(IMAGE, reshape=2)),
    (ValueError, "return_class_token and return_prefix_tokens must not both be True",
     lambda: model().get_intermediate_layers(IMAGE, return_class_token=True, return_prefix_tokens=True)),
    (ValueError, "return_class_token must be False for a model with class_token=False",
     lambda: without_cls().get_intermediate_layers(IMAGE, return_class_token=True)),
    # lists
    (ValueError, "images must not be an empty list", lambda: model()([])),
    (TypeError, "images[1] must be a tensor, got float", lambda: model()([IMAGE[0], 3.0])),
    (ValueError, "images[0] must have shape (C, H, W) or (B, C, H, W), B > 0", lambda: model()([IMAGE[:0]])),
    (ValueError, "images[1]: patch_size (4, 4) must divide", lambda: model()([IMAGE, IMAGE[..., :6]])),
    (TypeError, "images[1] must be like images[0], torch.float32 on cpu", lambda: model()([IMAGE, IMAGE.half()])),
    (TypeError, "images[1] must be like images[0], torch.float32 on cpu", lambda: model()([IMAGE, IMAGE.to("meta")])),
    *((ValueError, "attn_mask must be None and is_causal False with a list of images",
       lambda name=name: getattr(model(), name)([IMAGE], is_causal=True))
      for name in ("forward", "forward_features", "forward_intermediates")),
    # masks and sequences of blocks
    *((TypeError, "is_causal must be a bool, got 'yes'", lambda name=name: module(name)(X[None], is_causal="yes"))
      for name in ("block", "post", "eva")),
    *((ValueError, "attn_mask must be None and is_causal False with cu_seqlens",
       lambda name=name: module(name)(X, is_causal=True, cu_seqlens=ENDS)) for name in ("block", "post", "eva")),
    *((ValueError, "x must have shape (T, D) with cu_seqlens", lambda name=name: module(name)(X[None], cu_seqlens=ENDS))
      for name in ("block", "post", "eva")),
    (ValueError, "max_seqlen must be None without cu_seqlens, got 3", lambda: module("eva")(X[None], max_seqlen=3)),
    # cross-attention
    (ValueError, "x must have shape (B, M, D) or (1, M, D) with context's B = 3",
     lambda: module("cross")(X.expand(2, 31, 48), X.expand(3, 31, 48))),
    (ValueError, "context must have shape (B, N, kv_dim) with kv_dim = 48, got", lambda: module("cross")(X[None], X)),
    (ValueError, "x must have shape (B, M, D) with D = 48", lambda: module("cross")(X[None, :, :32], X[None])),
    (TypeError, "context must be a tensor, got NoneType", lambda: module("cross")(X[None], None)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), CALLS)
def test_calls(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
    for tiny in (model(), without_cls(), distilled()):  # nothing has changed
        assert (tiny.num_classes, len(tiny.blocks), tiny.patch_embed.img_size) == (5, 1, (16, 16))
        assert tiny.patch_embed.proj.kernel_size == tiny.patch_embed.patch_size == (4, 4)


def test_torch_fx_is_refused_in_one_sentence() -> None:
    for module in (model(), Eva(**TINY), layers.Block(32, 2)):
        with pytest.raises(TypeError, match=r"got Proxy: torch.fx cannot trace .* forward_intermediates .* torch\.exp"):
            torch.fx.symbolic_trace(module)
