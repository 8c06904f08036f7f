"""global_pool="map": the module by itself and in models. Against timm and the reference as a whole: test_vit.py,
test_zoo.py, test_eva.py; its weights: test_checkpoints*.py."""

import re
from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import Calls, assert_module_as_accurate, assert_same_step, close, randomised, tokens, twins
from torch import Tensor, nn

import fastvit
from fastvit import VisionTransformer, reference
from fastvit.modules.pooling import AttentionPoolLatent

TINY: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5, "mlp_ratio": 2.0,
    "class_token": False, "global_pool": "map",
}  # fmt: skip
B, N, D, H = 2, 17, 48, 3


def pools(**arguments: Any) -> tuple[nn.Module, nn.Module]:
    """Ours and the reference's."""
    norm, act = reference.NORMS["layernorm"], reference.ACTIVATIONS[arguments.get("act_layer", "gelu")]
    theirs = reference.AttentionPoolLatent(D, H, 2.0, norm, act)
    return twins(AttentionPoolLatent(D, H, 2.0, **arguments), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_as_accurate_as_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    ours, theirs = (module.to(device) for module in pools(act_layer="gelu_tanh"))
    x, _ = tokens(B, N, D, device=device)
    dy = torch.linspace(-1, 1, B * D, dtype=torch.float64, device=device).view(B, D)
    assert_module_as_accurate(ours, theirs, x, dy, dtype)


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_is_timms(qkv_bias: bool) -> None:
    theirs = import_timm().layers.AttentionPoolLatent(
        D, num_heads=H, mlp_ratio=2.0, qkv_bias=qkv_bias, norm_layer=nn.LayerNorm
    )
    ours = AttentionPoolLatent(D, H, 2.0, qkv_bias, norm_layer=nn.LayerNorm)
    twins(ours, theirs)
    x = torch.randn(B, N, D)
    assert_same_step(ours, theirs, x)


def test_initialised_as_timms() -> None:
    for name in ("vit_base_patch16_siglip_224", "vit_pe_core_tiny_patch16_384"):
        arguments = {"embed_dim": 512, "depth": 0, "num_heads": 8}
        ours, theirs = (lib.create_model(name, **arguments).attn_pool.state_dict() for lib in (fastvit, import_timm()))
        assert ours.keys() == theirs.keys()
        for key, want in theirs.items():
            assert ours[key].std().item() == pytest.approx(want.std().item(), rel=0.2, abs=1e-9), key
            assert ours[key].mean().item() == pytest.approx(want.mean().item(), abs=0.3 * want.std().item() + 1e-9), key
    latent = AttentionPoolLatent(4096).latent
    assert latent.std().item() == pytest.approx(0.88 / 64, rel=0.1)  # of a normal distribution cut off at twice its std
    assert latent.abs().max() <= 2 / 64


def test_its_mlp_is_fused_and_its_scores_are_one_row() -> None:
    pool, _ = pools()
    with torch.no_grad(), Calls() as calls:
        pool(torch.randn(B, N, D))
    assert "fastvit::layer_norm_fwd" in calls.names
    assert "aten::gelu" not in calls.names
    seen = []
    pool.q.register_forward_hook(lambda _, __, y: seen.append(tuple(y.shape)))
    pool(torch.randn(B, N, D))
    assert seen == [(1, 1, D)]  # of one latent, whatever the batch


def test_hooks_and_other_layers_inside_are_honoured() -> None:
    x = torch.randn(B, N, D)
    for path in ("q", "kv", "proj", "norm", "mlp", "mlp.fc1", "mlp.act", "mlp.fc2"):
        ours, theirs = pools()
        for pool in (ours, theirs):
            pool.get_submodule(path).register_forward_hook(lambda _, __, y: y * 2)
        assert_same_step(ours, theirs, x)
    ours, theirs = pools()
    for pool in (ours, theirs):
        pool.norm = nn.RMSNorm(D)
    assert_same_step(ours, theirs, x)


# ---- models ----


def model_and_image(**arguments: Any) -> tuple[Any, Tensor]:
    return randomised(VisionTransformer(**{**TINY, **arguments})).eval(), torch.randn(2, 3, 16, 16)


def test_prefix_tokens_are_left_out() -> None:
    model, image = model_and_image(reg_tokens=3)
    tokens = model.forward_features(image)
    want = model.attn_pool(tokens[:, 3:])
    assert torch.equal(model.forward_head(tokens, pre_logits=True), want)
    assert close(model(image), model.head(want))


def test_eva_attends_to_all_tokens() -> None:
    sizes: dict[str, Any] = {"embed_dim": 64, "depth": 1, "num_heads": 2, "img_size": 32, "num_classes": 0}
    model = randomised(fastvit.create_model("vit_pe_core_tiny_patch16_384", **sizes)).eval()
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(image), model.attn_pool(model.forward_features(image)))
    model.reset_classifier(0, "max")
    assert torch.equal(model(image), model.forward_features(image)[:, 1:].amax(dim=1))


def test_heads_and_width_of_its_own() -> None:
    model, _ = model_and_image(attn_pool_num_heads=4, attn_pool_mlp_ratio=0.5)
    assert (model.attn_pool.num_heads, model.attn_pool.mlp.fc1.out_features) == (4, 16)
    model, _ = model_and_image()
    assert (model.attn_pool.num_heads, model.attn_pool.mlp.fc1.out_features) == (2, 64)


def test_autocast_and_an_empty_batch() -> None:
    model, image = model_and_image()
    want = model(image)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(image).float(), want, rtol=0.1, atol=0.1)
    assert model(image[:0]).shape == (0, 5)


def test_classifier() -> None:
    model, image = model_and_image()
    pool = model.attn_pool
    model.reset_classifier(7)
    assert model(image).shape == (2, 7)
    model.reset_classifier(3, "map")
    assert model.attn_pool is pool
    model.reset_classifier(3, "avg")
    assert model.attn_pool is None
    assert not [key for key in model.state_dict() if "attn_pool" in key]
    assert model(image).shape == (2, 3)
    with pytest.raises(ValueError, match=r"^global_pool 'map' needs a model made with it, got 'avg'"):
        model.reset_classifier(3, "map")
    assert model.global_pool == "avg"


@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (ValueError, "num_heads must be a divisor of in_features = 32, got 5", {"num_heads": 5}),
        (TypeError, "num_heads must be an integer of at least 1, got 2.0", {"num_heads": 2.0}),
        (ValueError, "in_features must be at least 1, got 0", {"in_features": 0}),
        (ValueError, "mlp_ratio must be a finite number with in_features * mlp_ratio >= 1", {"mlp_ratio": 0.0}),
        (ValueError, "act_layer must be a class or one of", {"act_layer": "gleu"}),
        (TypeError, "dtype must be None, float32", {"dtype": "float32"}),
    ],
)
def test_errors(error: type[Exception], message: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        AttentionPoolLatent(**{"in_features": 32, **wrong})
