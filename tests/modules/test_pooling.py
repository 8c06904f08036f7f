"""global_pool="map": the module by itself. In models, against timm and the reference: test_vit.py, test_zoo.py,
test_eva.py; its weights: test_checkpoints*.py."""

from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import Calls, assert_module_as_accurate, assert_same_step, randomised, tokens, twins
from torch import nn

from fastvit import VisionTransformer, reference
from fastvit.modules.pooling import AttentionPoolLatent

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


def test_without_biases_of_qkv_it_is_timms() -> None:
    options = {"num_heads": H, "mlp_ratio": 2.0, "qkv_bias": False, "norm_layer": nn.LayerNorm}
    ours, theirs = twins(AttentionPoolLatent(D, **options), import_timm().layers.AttentionPoolLatent(D, **options))
    assert_same_step(ours, theirs, torch.randn(B, N, D))


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


def test_autocast_and_an_empty_batch() -> None:
    sizes: dict[str, Any] = {"embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
    model = randomised(VisionTransformer(16, 4, **sizes, class_token=False, global_pool="map")).eval()
    image = torch.randn(2, 3, 16, 16)
    want = model(image)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(image).float(), want, rtol=0.1, atol=0.1)
    assert model(image[:0]).shape == (0, 5)
