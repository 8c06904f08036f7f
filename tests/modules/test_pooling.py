"""global_pool="map": the module by itself. In models, against timm and the reference: test_vit.py, test_zoo.py,
test_eva.py; its weights: test_checkpoints*.py."""

import functools
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


@pytest.mark.parametrize("heads", [3, 4], ids=["16 channels a head", "12, which no op takes"])
def test_without_biases_of_qkv_it_is_timms(heads: int) -> None:
    """With a mask and without."""
    options = {"num_heads": heads, "mlp_ratio": 2.0, "qkv_bias": False, "norm_layer": nn.LayerNorm}
    ours, theirs = twins(AttentionPoolLatent(D, **options), import_timm().layers.AttentionPoolLatent(D, **options))
    x = torch.randn(B, N, D)
    assert_same_step(ours, theirs, x)
    mask = (torch.arange(N) < torch.tensor([[N], [N - 4]]))[:, None, None, :]
    assert not torch.equal(ours(x, mask), ours(x))
    for pool in (ours, theirs):
        pool.forward = functools.partial(pool.forward, attn_mask=mask)
    assert_same_step(ours, theirs, x)


def test_it_is_fused_and_its_query_is_computed_once() -> None:
    pool, _ = pools()
    with torch.no_grad(), Calls() as calls:
        pool(torch.randn(B, N, D))
    assert {"fastvit::attention_fwd", "fastvit::layer_norm_fwd"} <= {*calls.names}
    assert "aten::gelu" not in calls.names
    seen = []
    pool.q.register_forward_hook(lambda _, __, y: seen.append(tuple(y.shape)))
    pool(torch.randn(B, N, D))
    assert seen == [(1, 1, D)]


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
