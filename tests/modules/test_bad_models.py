"""A wrong argument of a module, a model or a call of one raises before any tensor is made, and the message names it."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from models import Calls
from torch import nn

import fastvit
from fastvit import layers, ops
from fastvit.checkpoints import CheckpointError
from fastvit.eva import Eva
from fastvit.eva_layers import EvaAttention
from fastvit.modules.pooling import AttentionPoolLatent
from fastvit.rope import RotaryEmbeddingCat

TINY: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5, "mlp_ratio": 2.0,
}  # fmt: skip
STATISTICS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
FRAMES = {"num_frames": 4, "tubelet_size": 2}
WITHOUT_CLS = {"class_token": False, "global_pool": "avg"}


def head_dim(dim: str, embed_dim: int, num_heads: int) -> str:
    what = f"head_dim = {dim} / num_heads = {embed_dim} / {num_heads}"
    return f"{what} must be a multiple of 8 from 16 to 256, got {embed_dim // num_heads}"


Mistake = tuple[type[Exception], str, dict[str, Any]]
MODEL: list[Mistake] = [
    # uint8 statistics
    (ValueError, "mean must be one number in [0, 1] for each of the 3 channels, got (123.0, 116.0, 103.0)",
     {**STATISTICS, "mean": (123.0, 116.0, 103.0)}),
    (ValueError, "std must be one number in (0, 1] for each of the 3 channels", {**STATISTICS, "std": (0.0, 0.0, 0.0)}),
    (ValueError, "mean and std must both be given", {"mean": (0.5, 0.4, 0.3)}),
    (ValueError, "mean and std must both be given", {"std": (0.5, 0.4, 0.3)}),
    # sizes
    (TypeError, "img_size must be a positive integer or (height, width), got '224'", {"img_size": "224"}),
    (ValueError, "img_size must be a positive integer or (height, width), got (3, 224, 224)",
     {"img_size": (3, 224, 224)}),
    (ValueError, "img_size must be a positive integer", {"img_size": 0}),
    (ValueError, "patch_size must be a positive integer or (height, width), got 0", {"patch_size": 0}),
    (ValueError, "patch_size must be a positive integer", {"patch_size": (4, -4)}),
    (ValueError, "patch_size (4, 4) must divide the image size, got (18, 18)", {"img_size": 18}),
    (ValueError, "num_frames and tubelet_size must both be given or both be None, got num_frames=4 and tubelet_size=N",
     {"num_frames": 4}),
    (ValueError, "num_frames and tubelet_size must both be given", {"tubelet_size": 2}),
    (ValueError, "tubelet_size 2 must divide the number of frames, got 5", {"num_frames": 5, "tubelet_size": 2}),
    (TypeError, "num_frames must be an integer of at least 1, got 4.0", {"num_frames": 4.0, "tubelet_size": 2}),
    (ValueError, "tubelet_size must be at least 1, got 0", {"num_frames": 4, "tubelet_size": 0}),
    (ValueError, "pos_embed must not be 'sincos2d' for videos",
     {"pos_embed": "sincos2d", **FRAMES}),
    # counts
    (ValueError, "depth must be at least 0, got -1", {"depth": -1}),
    (TypeError, "depth must be an integer of at least 0, got 2.5", {"depth": 2.5}),
    (TypeError, "depth must be an integer of at least 0, got True", {"depth": True}),
    (ValueError, "embed_dim must be at least 1, got 0", {"embed_dim": 0}),
    (ValueError, "num_heads must be at least 1, got 0", {"num_heads": 0}),
    (ValueError, "in_chans must be at least 1, got 0", {"in_chans": 0}),
    (ValueError, "num_classes must be at least 0, got -1", {"num_classes": -1}),
    (ValueError, "reg_tokens must be at least 0, got -1", {"reg_tokens": -1}),
    (ValueError, "mlp_ratio must be a finite number with embed_dim * mlp_ratio >= 1, where embed_dim = 32, got 0",
     {"mlp_ratio": 0}),
    (ValueError, "mlp_ratio must be a finite number", {"mlp_ratio": math.inf}),
    (TypeError, "mlp_ratio must be a finite number", {"mlp_ratio": "4"}),
    # heads
    (ValueError, "num_heads must be a divisor of embed_dim = 32, got 5", {"num_heads": 5}),
    (ValueError, head_dim("embed_dim", 32, 4), {"num_heads": 4}),
    # choices, rates, flags, numbers
    (ValueError, "global_pool must be one of", {"global_pool": "mean"}),
    (ValueError, "global_pool 'token' needs class_token=True", {"class_token": False}),
    (ValueError, "attn_pool_num_heads must be a divisor of embed_dim = 32, got 3",
     {"global_pool": "map", "attn_pool_num_heads": 3}),
    (ValueError, "attn_pool_mlp_ratio must be a finite number with embed_dim * attn_pool_mlp_ratio >= 1",
     {"global_pool": "map", "attn_pool_mlp_ratio": 0.0}),
    (ValueError, "pos_embed must be one of ('learn', 'sincos', 'sincos2d', '', 'none'), got 'sin2d'",
     {"pos_embed": "sin2d"}),
    (ValueError, "patch_init must be one of ('', 'kaiming'), got 'kaiming_normal'", {"patch_init": "kaiming_normal"}),
    (ValueError, "proj_drop_rate must be in [0, 1), got 1.0", {"proj_drop_rate": 1.0}),
    (ValueError, "drop_path_rate must be in [0, 1), got -0.1", {"drop_path_rate": -0.1}),
    (ValueError, "attn_drop_rate must be in [0, 1), got nan", {"attn_drop_rate": math.nan}),
    (TypeError, "drop_rate must be in [0, 1), got '0.1'", {"drop_rate": "0.1"}),
    (TypeError, "init_values must be a finite number, or None", {"init_values": "1e-5"}),
    (TypeError, "class_token must be True or False, got 'no'", {"class_token": "no"}),
    (TypeError, "fc_norm must be True or False, got 2", {"fc_norm": 2}),
    (ValueError, "act_layer must be a class or one of ['gelu', 'gelu_tanh', 'quick_gelu', 'relu', 'silu'], got 'gleu'",
     {"act_layer": "gleu"}),
    (ValueError, "norm_layer must be a class or one of ['layernorm', 'rmsnorm']", {"norm_layer": "batchnorm"}),
    (TypeError, "norm_layer must be a class or one of ['layernorm', 'rmsnorm'], got 5", {"norm_layer": 5}),
    (ValueError, "embed_norm_layer must be a class or one of ['layernorm', 'rmsnorm']", {"embed_norm_layer": "bn"}),
    (ValueError, "mlp_layer must be a class or one of ['glumlp', 'mlp', 'swiglu', 'swiglupacked'], got 'glu'",
     {"mlp_layer": "glu"}),
    (ValueError, "block_fn must be a class or one of ['block', 'postnorm'], got 'post'; did you mean postnorm?",
     {"block_fn": "post"}),
    (TypeError, "dtype must be None, float32, float16, bfloat16 or float64, got torch.int64", {"dtype": torch.int64}),
    (TypeError, "dtype must be None, float32", {"dtype": "float16"}),
    (ValueError, "device must be None, a torch.device or the name of one, got 'gpu'", {"device": "gpu"}),
]  # fmt: skip
BLOCK: list[Mistake] = [
    (ValueError, "num_heads must be a divisor of dim = 48, got 5", {"dim": 48, "num_heads": 5}),
    (ValueError, "num_heads must be at least 1, got 0", {"num_heads": 0}),
    (ValueError, "dim must be at least 1, got 0", {"dim": 0}),
    (TypeError, "dim must be an integer", {"dim": 32.0}),
    (ValueError, head_dim("dim", 32, 4), {"num_heads": 4}),
    (ValueError, "attn_drop must be in [0, 1), got 1.0", {"attn_drop": 1.0}),
    (ValueError, "proj_drop must be in [0, 1), got -1", {"proj_drop": -1}),
    (TypeError, "dtype must be None, float32", {"dtype": torch.int8}),
]
MODULES: dict[Callable[..., nn.Module], list[Mistake]] = {
    partial(fastvit.VisionTransformer, **TINY): MODEL,
    partial(layers.Attention, dim=32, num_heads=2): [
        *BLOCK,
        (ValueError, "qk_norm=True needs norm_layer, got None", {"qk_norm": True}),
    ],
    partial(layers.Block, dim=32, num_heads=2): [
        (TypeError, "qkv_bais is not an argument of Block: use qkv_bias", {"qkv_bais": True}),
        (TypeError, "hidden_size is not an argument of Block: its arguments are dim, num_heads", {"hidden_size": 32}),
        *BLOCK,
        (ValueError, "mlp_ratio must be a finite number with dim * mlp_ratio >= 1", {"mlp_ratio": 0.01}),
        (ValueError, "init_values must be a finite number", {"init_values": math.nan}),
        (ValueError, "drop_path must be in [0, 1], got 1.5", {"drop_path": 1.5}),
        (ValueError, "act_layer must be a class or one of", {"act_layer": "gelu_erf"}),
    ],
    partial(layers.Mlp, in_features=16): [
        (ValueError, "in_features must be at least 1, got 0", {"in_features": 0}),
        (ValueError, "hidden_features must be at least 1, got 0", {"hidden_features": 0}),
        (TypeError, "out_features must be an integer", {"out_features": 1.5}),
        (ValueError, "drop must be in [0, 1), got 2", {"drop": 2}),
        (ValueError, "act_layer must be a class or one of", {"act_layer": "gelu_tan"}),
    ],
    partial(layers.PatchEmbed, img_size=8, patch_size=4, embed_dim=16): [
        (TypeError, "img_size must be a positive integer", {"img_size": "8"}),
        (ValueError, "patch_size (4, 4) must divide the image size, got (9, 9)", {"img_size": 9}),
        (ValueError, "embed_dim must be at least 1", {"embed_dim": -16}),
        (ValueError, "in_chans must be at least 1", {"in_chans": 0}),
        (ValueError, "std must be one number in (0, 1] for each of the 1 channels, got (0.1, 0.2)",
         {"in_chans": 1, "mean": (0.5,), "std": (0.1, 0.2)}),
    ],
    layers.LayerNorm: [
        (ValueError, "num_channels must be at least 1, got 0", {"num_channels": 0}),
        (ValueError, "eps must be finite and not negative, got -1e-06", {"num_channels": 8, "eps": -1e-6}),
    ],
    layers.RmsNorm: [
        (ValueError, "channels must be at least 1, got 0", {"channels": 0}),
        (TypeError, "eps must be finite and not negative, got None", {"channels": 8, "eps": None}),
        (TypeError, "dtype must be None, float32", {"channels": 8, "dtype": torch.int8}),
    ],
    layers.LayerScale: [
        (ValueError, "dim must be at least 1, got 0", {"dim": 0}),
        (TypeError, "init_values must be a finite number", {"dim": 8, "init_values": "a"}),
    ],
    layers.DropPath: [
        (TypeError, "prob is not an argument of DropPath: use drop_prob", {"prob": 0.1}),
        (ValueError, "drop_prob must be in [0, 1], got 1.5", {"drop_prob": 1.5}),
    ],
    partial(fastvit.create_model, "vit_base_patch16_224"): [
        (TypeError, "weights must be a path, a repository of the Hugging Face Hub or a state_dict, got 5",
         {"weights": 5}),
        (TypeError, "pretrained is not an argument of VisionTransformer: use weights=", {"pretrained": True}),
        (TypeError, "image_size is not an argument of VisionTransformer: use img_size", {"image_size": 32}),
        (TypeError, "num_register_tokens is not an argument of VisionTransformer: use reg_tokens",
         {"num_register_tokens": 4}),
        (TypeError, "zzz is not an argument of VisionTransformer: its arguments are img_size, patch", {"zzz": 1}),
        (FileNotFoundError, "absent.pth: no such file", {"weights": "absent.pth"}),
        (CheckpointError, "model.npz: weights must be a file of safetensors ", {"weights": "model.npz"}),
        (ValueError, "drop_head=True needs weights", {"drop_head": True}),
        (ValueError, head_dim("embed_dim", 768, 1), {"num_heads": 1}),
    ],
    Eva: [
        (ValueError, "rope_type must be one of ('cat', 'dinov3', 'vjepa2'), got 'base'", {"rope_type": "base"}),
        (ValueError, "rope_type must be 'vjepa2' for videos, and for them only, got 'cat'",
         {"use_rot_pos_emb": True, **FRAMES}),
        (ValueError, "rope_type must be 'vjepa2' for videos", {"use_rot_pos_emb": True, "rope_type": "vjepa2"}),
        (ValueError, "rope_rotate_half must be False for rope_type='vjepa2'",
         {"use_rot_pos_emb": True, "rope_type": "vjepa2", "rope_rotate_half": True, **FRAMES}),
        (ValueError, "attn_type must be one of", {"attn_type": "rel"}),
        (TypeError, "Eva takes no qk_norm: EVA's blocks fix it", {"qk_norm": True}),
        (TypeError, "Eva takes no block_fn: EVA's blocks fix it", {"block_fn": "postnorm"}),
        (TypeError, "class_token must be True or False, got 'no'", {"class_token": "no"}),
        (ValueError, "rope_grid_indexing must be one of", {"rope_grid_indexing": "yx"}),
        (ValueError, "num_heads must be a divisor of embed_dim = 768, got 5", {"num_heads": 5}),
        (ValueError, "num_reg_tokens must be at least 0", {"num_reg_tokens": -1}),
    ],
    EvaAttention: [(ValueError, head_dim("dim", 36, 3), {"dim": 36, "num_heads": 3})],
    partial(RotaryEmbeddingCat, dim=8): [
        (ValueError, "dim must be a multiple of 4, got 6", {"dim": 6}),
        (ValueError, "temperature must be finite and positive", {"temperature": 0.0}),
    ],
    partial(AttentionPoolLatent, in_features=32): [
        (ValueError, "num_heads must be a divisor of in_features = 32, got 5", {"num_heads": 5}),
        (ValueError, "in_features must be at least 1, got 0", {"in_features": 0}),
        (ValueError, "mlp_ratio must be a finite number with in_features * mlp_ratio >= 1", {"mlp_ratio": 0.0}),
        (ValueError, "act_layer must be a class or one of", {"act_layer": "gleu"}),
        (TypeError, "dtype must be None, float32", {"dtype": "float32"}),
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
        (ValueError, "hidden_features must be at least 1", {"hidden_features": 0}),
    ],
    fastvit.create_model: [(TypeError, "name must be the name of a model, got 16", {"name": 16})],
}  # fmt: skip


def refused(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with Calls() as calls, pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
    assert not calls.names


@pytest.mark.parametrize(
    ("make", "error", "message", "wrong"), [(make, *mistake) for make, rows in MODULES.items() for mistake in rows]
)
def test_wrong_arguments(
    make: Callable[..., nn.Module], error: type[Exception], message: str, wrong: dict[str, Any]
) -> None:
    refused(error, message, partial(make, **wrong))


ONES = torch.ones(2, 3, 16, 16)


@pytest.mark.parametrize(
    ("error", "message", "image"),
    [
        (TypeError, "image must be uint8, float32, float16, bfloat16 or float64, got torch.int64", ONES.long()),
        (TypeError, "image must be a tensor, got ndarray", ONES.numpy()),
        (ValueError, "image must have shape (B, C, H, W) with C = 3, got (2, 1, 16, 16)", ONES[:, :1]),
        (ValueError, "image must have shape (B, C, H, W) with C = 3, got ()", ONES.sum()),
        (TypeError, "image must be a dense tensor, got a nested one", torch.nested.nested_tensor([*ONES])),
    ],
)
def test_wrong_images(error: type[Exception], message: str, image: Any) -> None:
    model = fastvit.VisionTransformer(**TINY, dynamic_img_size=True)
    refused(error, message, lambda: model(image))
    refused(error, message, lambda: model.patch_embed(image))


def test_images_of_another_size() -> None:
    image = torch.ones(2, 3, 16, 18)
    message = "image must have the size (H, W) = (16, 16), got (16, 18)"
    fixed = fastvit.VisionTransformer(**TINY)
    refused(ValueError, message, lambda: fixed(image))
    dynamic = fastvit.VisionTransformer(**TINY, dynamic_img_size=True)
    for wrong in (image, image[..., :0]):
        message = f"patch_size (4, 4) must divide the image size, got {tuple(wrong.shape[2:])}"
        refused(ValueError, message, lambda x=wrong: dynamic(x))


def test_wrong_calls_of_a_model() -> None:
    model = fastvit.VisionTransformer(**{**TINY, **WITHOUT_CLS})
    refused(ValueError, "global_pool 'token' needs class_token=True", lambda: model.reset_classifier(3, "token"))
    refused(ValueError, "global_pool 'map' needs a model made with it", lambda: model.reset_classifier(3, "map"))
    refused(ValueError, "num_classes must be at least 0, got -1", lambda: model.reset_classifier(-1))
    refused(TypeError, "img_size must be a positive integer", lambda: model.set_input_size("16"))
    refused(ValueError, "patch_size (4, 4) must divide the image size", lambda: model.set_input_size(18))
    refused(ValueError, "patch_size (5, 5) must divide the image size", lambda: model.set_input_size(patch_size=5))
    refused(TypeError, "patch_size must be a positive integer", lambda: model.set_input_size(patch_size=2.0))
    refused(ValueError, "num_classes must be at least 0, got -1", lambda: model.reset_classifier(-1, "max"))
    tokens = torch.ones(2, 16, 32)
    refused(ValueError, "pool_type 'token' needs class_token=True", lambda: model.pool(tokens, "token"))
    refused(ValueError, "pool_type 'map' needs a model made with it, got 'avg'", lambda: model.pool(tokens, "map"))
    refused(ValueError, "pool_type must be one of", lambda: model.pool(tokens, "mean"))
    assert (model.global_pool, model.num_classes) == ("avg", 5)
    assert (model.patch_embed.img_size, model.patch_embed.patch_size) == ((16, 16), (4, 4))
    assert model.patch_embed.proj.kernel_size == (4, 4)
    model.patch_embed.proj = nn.Sequential(model.patch_embed.proj)
    message = "patch_size needs a plain convolution of patches as `proj`, got Sequential"
    refused(ValueError, message, lambda: model.set_input_size(patch_size=8))


@pytest.mark.parametrize("dim", [8, 16, 20, 256, 264])
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
    model = {**TINY, "embed_dim": 2 * dim, "device": "meta"}
    for make in (partial(layers.Attention, 2 * dim, 2), partial(layers.Block, 2 * dim, 2)):
        assert accepted(make) == by_op
    assert accepted(partial(fastvit.VisionTransformer, **model)) == by_op


def test_what_is_right_is_taken() -> None:
    """NumPy's numbers, lists, tensors of statistics."""
    sizes = {"img_size": [16, 16], "patch_size": np.int64(4), "embed_dim": np.int32(32), "mlp_ratio": np.float32(2)}
    statistics = {"mean": np.array([0.5, 0.4, 0.3]), "std": torch.tensor([0.2, 0.3, 0.4])}
    ours = fastvit.VisionTransformer(**{**TINY, **sizes, **statistics}, init_values=0, fc_norm=None)
    same = fastvit.VisionTransformer(**TINY, **STATISTICS)
    ours.load_state_dict(same.state_dict())
    image = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(ours(image), same(image))


@pytest.mark.parametrize(
    "module",
    [
        fastvit.VisionTransformer(**TINY), Eva(**TINY), layers.PatchEmbed(16, 4, embed_dim=32), layers.Block(32, 2),
        layers.Attention(32, 2), layers.Mlp(32), layers.LayerNorm(32), layers.RmsNorm(32),
        layers.SwiGLU(32),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_torch_fx_is_refused_in_one_sentence(module: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"got Proxy: torch.fx cannot trace .* forward_intermediates .* torch.export"):
        torch.fx.symbolic_trace(module)
