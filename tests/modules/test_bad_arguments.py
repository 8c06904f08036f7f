"""Wrong arguments of constructors, and of calls, raise before any tensor is made, and the message names them."""

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
from fastvit import VisionTransformer, VisionTransformerDistilled, eva_layers, layers, ops
from fastvit.checkpoints import CheckpointError
from fastvit.eva import Eva
from fastvit.modules.pooling import AttentionPoolLatent
from fastvit.rope import RotaryEmbeddingCat

TINY: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5, "mlp_ratio": 2.0,
}  # fmt: skip
STATISTICS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
INTEGER, RATIO = "must be an integer of at least", "must be a finite number with"


def head_dim(dim: str, embed_dim: int, num_heads: int) -> str:
    what = f"head_dim = {dim} / num_heads = {embed_dim} / {num_heads}"
    return f"{what} must be a multiple of 8 from 16 to 256, got {embed_dim // num_heads}"


Mistake = tuple[type[Exception], str, dict[str, Any]]
CONSTRUCTORS: dict[Callable[..., nn.Module], list[Mistake]] = {
    partial(VisionTransformer, **TINY): [
        (ValueError, "mean must be one number in [0, 1] for each of the 3 channels, got (123.0, 116.0, 103.0)",
         {**STATISTICS, "mean": (123.0, 116.0, 103.0)}),
        (ValueError, "std must be one number in (0, 1] for each of the 3", {**STATISTICS, "std": (0.0, 0.0, 0.0)}),
        (ValueError, "mean and std must both be given", {"mean": (0.5, 0.4, 0.3)}),
        (TypeError, "img_size must be a positive integer or (height, width), got '224'", {"img_size": "224"}),
        (ValueError, "img_size must be a positive integer or (height, width)", {"img_size": (3, 224, 224)}),
        (ValueError, "patch_size must be a positive integer", {"patch_size": (4, -4)}),
        (ValueError, "patch_size (4, 4) must divide the image size, got (18, 18)", {"img_size": 18}),
        (ValueError, "depth must be at least 0, got -1", {"depth": -1}),
        (TypeError, f"depth {INTEGER} 0, got True", {"depth": True}),
        (ValueError, "num_heads must be at least 1, got 0", {"num_heads": 0}),
        (ValueError, "in_chans must be at least 1, got 0", {"in_chans": 0}),
        (ValueError, "num_classes must be at least 0, got -1", {"num_classes": -1}),
        (ValueError, "reg_tokens must be at least 0, got -1", {"reg_tokens": -1}),
        (ValueError, f"mlp_ratio {RATIO} embed_dim * mlp_ratio >= 1, where embed_dim = 32, got 0", {"mlp_ratio": 0}),
        (TypeError, f"mlp_ratio {RATIO}", {"mlp_ratio": "4"}),
        (ValueError, "num_heads must be a divisor of embed_dim = 32, got 5", {"num_heads": 5}),
        (ValueError, head_dim("embed_dim", 32, 4), {"num_heads": 4}),
        (ValueError, "global_pool must be one of", {"global_pool": "mean"}),
        (ValueError, "global_pool 'token' needs class_token=True", {"class_token": False}),
        (ValueError, "attn_pool_num_heads must be a divisor of embed_dim = 32, got 3",
         {"global_pool": "map", "attn_pool_num_heads": 3}),
        (ValueError, f"attn_pool_mlp_ratio {RATIO}", {"global_pool": "map", "attn_pool_mlp_ratio": 0.0}),
        (ValueError, "pos_embed must be one of ('learn', 'sincos', 'sincos2d', '', 'none'), got 'sin2d'",
         {"pos_embed": "sin2d"}),
        (ValueError, "patch_init must be one of ('', 'kaiming')", {"patch_init": "kaiming_normal"}),
        *((ValueError, f"{name} must be in [0, 1), got 1.0", {name: 1.0})
          for name in ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")),
        (ValueError, "attn_drop_rate must be in [0, 1), got nan", {"attn_drop_rate": math.nan}),
        (TypeError, "drop_rate must be in [0, 1), got '0.1'", {"drop_rate": "0.1"}),
        (TypeError, "init_values must be a finite number, or None", {"init_values": "1e-5"}),
        *((TypeError, f"{name} must be True or False, got 2", {name: 2})
          for name in ("qkv_bias", "proj_bias", "class_token", "no_embed_class", "pre_norm", "final_norm", "fc_norm",
                       "dynamic_img_size", "qk_norm")),
        (ValueError, "act_layer must be a class or one of ['gelu', 'gelu_tanh', 'quick_gelu', 'relu', 'silu'], got 'gl",
         {"act_layer": "gleu"}),
        (TypeError, "norm_layer must be a class or one of ['layernorm', 'rmsnorm'], got 5", {"norm_layer": 5}),
        (ValueError, "embed_norm_layer must be a class or one of", {"embed_norm_layer": "bn"}),
        (ValueError, "mlp_layer must be a class or one of ['glumlp', 'mlp', 'swiglu', 'swiglu", {"mlp_layer": "glu"}),
        (ValueError, "block_fn must be a class or one of ['block', 'postnorm'], got 'post'; did you mean postnorm?",
         {"block_fn": "post"}),
        (TypeError, "dtype must be None, float32, float16, bfloat16 or float64, got torch.int", {"dtype": torch.int64}),
        (ValueError, "device must be None, a torch.device or the name of one, got 'gpu'", {"device": "gpu"}),
    ],
    partial(layers.Attention, dim=32, num_heads=2): [
        (ValueError, head_dim("dim", 32, 4), {"num_heads": 4}),
        (TypeError, "dim must be an integer", {"dim": 32.0}),
        (ValueError, "attn_drop must be in [0, 1), got 1.0", {"attn_drop": 1.0}),
        (ValueError, "qk_norm=True needs norm_layer, got None", {"qk_norm": True}),
    ],
    partial(layers.CrossAttention, dim=48, num_heads=3): [
        (ValueError, head_dim("dim", 48, 6), {"num_heads": 6}),
        (ValueError, "kv_dim must be at least 1, got 0", {"kv_dim": 0}),
        (ValueError, "attn_drop must be in [0, 1), got 1.0", {"attn_drop": 1.0}),
    ],
    partial(layers.Block, dim=32, num_heads=2): [
        (TypeError, "qkv_bais is not an argument of Block: use qkv_bias", {"qkv_bais": True}),
        (TypeError, "hidden_size is not an argument of Block: its arguments are dim, num_heads", {"hidden_size": 32}),
        (ValueError, "num_heads must be at least 1, got 0", {"num_heads": 0}),
        (ValueError, f"mlp_ratio {RATIO} dim * mlp_ratio >= 1", {"mlp_ratio": 0.01}),
        (ValueError, "init_values must be a finite number", {"init_values": math.nan}),
        (ValueError, "drop_path must be in [0, 1], got 1.5", {"drop_path": 1.5}),
        (ValueError, "proj_drop must be in [0, 1), got -1", {"proj_drop": -1}),
        (TypeError, "dtype must be None, float32", {"dtype": torch.int8}),
    ],
    partial(layers.Mlp, in_features=16): [
        (ValueError, "in_features must be at least 1, got 0", {"in_features": 0}),
        (ValueError, "hidden_features must be at least 1, got 0", {"hidden_features": 0}),
        (TypeError, "out_features must be an integer", {"out_features": 1.5}),
        (ValueError, "drop must be in [0, 1), got 2", {"drop": 2}),
        (ValueError, "act_layer must be a class or one of", {"act_layer": "gelu_tan"}),
    ],
    partial(layers.GluMlp, 24): [
        (ValueError, "hidden_features must be even", {"hidden_features": 41}),
        (TypeError, "gate_last must be True or False", {"gate_last": "yes"}),
        (ValueError, "act_layer must be a class or one of", {"act_layer": "relu"}),
        (ValueError, "norm_layer must be a class or one of", {"norm_layer": "batchnorm"}),
    ],
    partial(layers.SwiGLU, 24): [
        (TypeError, "align_to must be an integer of at least 0", {"align_to": 1.5}),
        (ValueError, "drop must be in [0, 1)", {"drop": 1.0}),
    ],
    partial(layers.PatchEmbed, img_size=8, patch_size=4, embed_dim=16): [
        (ValueError, "patch_size (4, 4) must divide the image size, got (9, 9)", {"img_size": 9}),
        (ValueError, "embed_dim must be at least 1", {"embed_dim": -16}),
    ],
    layers.LayerNorm: [
        (ValueError, "num_channels must be at least 1, got 0", {"num_channels": 0}),
        (ValueError, "eps must be finite and not negative, got -1e-06", {"num_channels": 8, "eps": -1e-6}),
    ],
    layers.RmsNorm: [(TypeError, "dtype must be None, float32", {"channels": 8, "dtype": torch.int8})],
    layers.LayerScale: [(TypeError, "init_values must be a finite number", {"dim": 8, "init_values": "a"})],
    layers.DropPath: [
        (TypeError, "prob is not an argument of DropPath: use drop_prob", {"prob": 0.1}),
        (ValueError, "drop_prob must be in [0, 1], got 1.5", {"drop_prob": 1.5}),
    ],
    partial(fastvit.create_model, "vit_base_patch16_224"): [
        (TypeError, "weights must be a path, a repository of the Hugging Face Hub or a state_dict", {"weights": 5}),
        (TypeError, "pretrained is not an argument of VisionTransformer: use weights=", {"pretrained": True}),
        (TypeError, "num_register_tokens is not an argument of VisionTransformer: use reg", {"num_register_tokens": 4}),
        (TypeError, "zzz is not an argument of VisionTransformer: its arguments are img_size, patch", {"zzz": 1}),
        (FileNotFoundError, "absent.pth: no such file", {"weights": "absent.pth"}),
        (CheckpointError, "model.npz: weights must be a file of safetensors ", {"weights": "model.npz"}),
        (ValueError, "drop_head=True needs weights", {"drop_head": True}),
    ],
    fastvit.create_model: [(TypeError, "name must be the name of a model, got 16", {"name": 16})],
    Eva: [
        (ValueError, "rope_type must be one of ('cat', 'dinov3'), got 'base'", {"rope_type": "base"}),
        (ValueError, "attn_type must be one of", {"attn_type": "rel"}),
        (TypeError, "Eva takes no qk_norm: EVA's blocks fix it", {"qk_norm": True}),
        (TypeError, "class_token must be True or False, got 'no'", {"class_token": "no"}),
        (ValueError, "rope_grid_indexing must be one of", {"rope_grid_indexing": "yx"}),
        (ValueError, "num_reg_tokens must be at least 0", {"num_reg_tokens": -1}),
    ],
    eva_layers.EvaAttention: [(ValueError, head_dim("dim", 36, 3), {"dim": 36, "num_heads": 3})],
    VisionTransformerDistilled: [
        (TypeError, "VisionTransformerDistilled takes no fc_norm: its two heads fix it", {"fc_norm": None}),
        (ValueError, "global_pool must be one of ('token',), got 'avg'", {"global_pool": "avg"}),
    ],
    partial(RotaryEmbeddingCat, dim=8): [
        (ValueError, "dim must be a multiple of 4, got 6", {"dim": 6}),
        (ValueError, "temperature must be finite and positive", {"temperature": 0.0}),
    ],
    partial(AttentionPoolLatent, in_features=32): [
        (ValueError, "num_heads must be a divisor of in_features = 32, got 5", {"num_heads": 5}),
        (ValueError, f"mlp_ratio {RATIO} in_features * mlp_ratio >= 1", {"mlp_ratio": 0.0}),
        (ValueError, "act_layer must be a class or one of", {"act_layer": "gleu"}),
        (TypeError, "dtype must be None, float32", {"dtype": "float32"}),
    ],
}  # fmt: skip


def refused(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with Calls() as calls, pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
    assert not calls.names


@pytest.mark.parametrize(
    ("make", "error", "message", "wrong"), [(make, *row) for make, rows in CONSTRUCTORS.items() for row in rows]
)
def test_constructors(make: Callable[..., nn.Module], error: type[Exception], message: str, wrong: Any) -> None:
    refused(error, message, partial(make, **wrong))


# ---- calls ----


@cache
def model(**options: Any) -> Any:
    return VisionTransformer(**TINY, **options)


@cache
def distilled() -> Any:
    return VisionTransformerDistilled(**TINY)


@cache
def module(name: str) -> Any:
    blocks = {"cross": layers.CrossAttention, "attention": layers.Attention, "block": layers.Block}
    return {**blocks, "post": layers.PostNormBlock, "eva": eva_layers.EvaBlock}[name](48, 3)


def without_cls(**options: Any) -> Any:
    return model(class_token=False, global_pool="avg", **options)


IMAGE, TOKENS, X = torch.ones(2, 3, 16, 16), torch.ones(2, 16, 32), torch.ones(31, 48)
ENDS, PATCHES = torch.tensor([0, 5, 6, 31]), "image must have shape (B, C, H, W) with C = 3, got"
BLOCKS, SIZE = (
    "a number of last blocks from 1 to 1, or blocks from -1 to 0",
    "image must have the size (H, W) = (16, 16)",
)
CALLS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    # images
    (TypeError, "image must be uint8, float32, float16, bfloat16 or float64, got", lambda: model()(IMAGE.long())),
    (TypeError, "image must be a tensor, got ndarray", lambda: model()(IMAGE.numpy())),
    (ValueError, f"{PATCHES} (2, 1, 16, 16)", lambda: model()(IMAGE[:, :1])),
    (ValueError, f"{PATCHES} (3, 16, 16)", lambda: model().forward_intermediates(IMAGE[0])),
    (TypeError, "image must be a dense tensor", lambda: model().patch_embed(torch.nested.nested_tensor([*IMAGE]))),
    (ValueError, f"{SIZE}, got (16, 12)", lambda: model()(IMAGE[..., :12])),
    (ValueError, "patch_size (4, 4) must divide the image size, got (16, 0)",
     lambda: model(dynamic_img_size=True)(IMAGE[..., :0])),
    # heads, pooling, sizes
    (ValueError, "global_pool 'token' needs class_token=True", lambda: without_cls().reset_classifier(3, "token")),
    (ValueError, "global_pool 'map' needs a model made with it", lambda: without_cls().reset_classifier(3, "map")),
    (ValueError, "num_classes must be at least 0, got -1", lambda: without_cls().reset_classifier(-1)),
    (ValueError, "global_pool must be one of ('token', '')", lambda: distilled().reset_classifier(3, "avg")),
    (TypeError, "enable must be True or False", lambda: distilled().set_distilled_training("yes")),
    (ValueError, "pool_type 'token' needs class_token=True", lambda: without_cls().pool(TOKENS, "token")),
    (ValueError, "pool_type 'map' needs a model made with it, got 'avg'", lambda: without_cls().pool(TOKENS, "map")),
    (TypeError, "img_size must be a positive integer", lambda: model().set_input_size("16")),
    (ValueError, "patch_size (5, 5) must divide the image size", lambda: model().set_input_size(patch_size=5)),
    (ValueError, "fixed_table needs a model with pos_embed='sincos' or", lambda: model().fixed_table((2, 2))),
    (ValueError, "mode must be one of ('', 'skip', 'reset'), got 'jax'", lambda: model().init_weights("jax")),
    # features
    (ValueError, f"indices must be {BLOCKS}, got 5", lambda: model().forward_intermediates(IMAGE, 5)),
    (ValueError, f"indices must be {BLOCKS}, got []", lambda: model().forward_intermediates(IMAGE, [])),
    (TypeError, f"indices must be {BLOCKS}, got [1.0]", lambda: model().forward_intermediates(IMAGE, [1.0])),
    (ValueError, "output_fmt must be one of", lambda: model().forward_intermediates(IMAGE, output_fmt="NHWC")),
    (TypeError, "norm must be True or False, got 'yes'", lambda: model().forward_intermediates(IMAGE, norm="yes")),
    (ValueError, f"n must be {BLOCKS}, got (-5,)", lambda: model().get_intermediate_layers(IMAGE, (-5,))),
    (ValueError, f"indices must be {BLOCKS}, got 9", lambda: model().prune_intermediate_layers(9)),
    (ValueError, "return_class_token and return_prefix_tokens must not both be True",
     lambda: model().get_intermediate_layers(IMAGE, return_class_token=True, return_prefix_tokens=True)),
    (ValueError, "return_class_token must be False for a model with class_token=False",
     lambda: without_cls().get_intermediate_layers(IMAGE, return_class_token=True)),
    (TypeError, "Backbone.get_intermediate_layers() takes from 2 to 4 positional arguments",
     lambda: model().get_intermediate_layers(IMAGE, 1, False, True)),
    # lists
    (ValueError, "images must not be an empty list", lambda: model()([])),
    (TypeError, "images[1] must be a tensor, got float", lambda: model()([IMAGE[0], 3.0])),
    (ValueError, "images[0] must have shape (C, H, W) or (B, C, H, W), B > 0", lambda: model()([IMAGE[:0]])),
    (ValueError, "images[1]: patch_size (4, 4) must divide", lambda: model()([IMAGE, IMAGE[..., :6]])),
    (ValueError, "images[0]: image must have shape", lambda: model()([IMAGE[:, :2]])),
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
    (ValueError, "cu_seqlens must ascend from 0 to the number of tokens 31",
     lambda: module("block")(X, cu_seqlens=ENDS[:-1])),
    (ValueError, "max_seqlen must be at least the longest", lambda: module("post")(X, cu_seqlens=ENDS, max_seqlen=3)),
    (ValueError, "max_seqlen must be None without cu_seqlens, got 3", lambda: module("eva")(X[None], max_seqlen=3)),
    (TypeError, "cu_seqlens must be a tensor of int32 or int64", lambda: module("block")(X, cu_seqlens=[0, 31])),
    (TypeError, "attn_mask must be float", lambda: module("attention")(X[None], torch.ones(31, 31, dtype=torch.int64))),
    (ValueError, "attn_mask must be broadcastable to", lambda: module("attention")(X[None], torch.ones(2, 31))),
    (ValueError, "rotary.sin must broadcast", lambda: module("eva")(X[None], torch.randn(5, 32))),
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


def test_a_patch_embedding_that_cannot_be_resampled() -> None:
    replaced = VisionTransformer(**TINY)
    replaced.patch_embed.proj = nn.Sequential(replaced.patch_embed.proj)
    with pytest.raises(ValueError, match=r"^patch_size needs a plain convolution of patches as `proj`, got Sequential"):
        replaced.set_input_size(patch_size=8)


@pytest.mark.parametrize("dim", [8, 20, 256, 264])
def test_a_constructor_refuses_the_head_dimensions_that_attention_refuses(dim: int) -> None:
    """A model that could be made does not fail at its first forward."""

    def accepted(call: Callable[[], Any]) -> bool:
        try:
            call()
        except ValueError:
            return False
        return True

    by_op = accepted(lambda: ops.attention_qkvpacked(torch.ones(1, 2, 3, 1, dim)))
    assert by_op == (dim % 8 == 0 and 16 <= dim <= 256)
    assert accepted(partial(layers.Attention, 2 * dim, 2)) == by_op


@pytest.mark.parametrize(
    "make", [partial(VisionTransformer, **TINY), partial(Eva, **TINY), partial(layers.Block, 32, 2)]
)
def test_torch_fx_is_refused_in_one_sentence(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"got Proxy: torch.fx cannot trace .* forward_intermediates .* torch.export"):
        torch.fx.symbolic_trace(make())
