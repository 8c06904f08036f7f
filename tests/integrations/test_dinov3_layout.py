"""`accelerate` on models in the layout of Meta's DINOv3 repository."""

import warnings
from typing import Any

import pytest
import torch
from dinov3_layout import Mlp, PatchEmbed, SelfAttentionBlock, SwiGLUFFN
from library_models import outcome
from models import accelerate_as_it_was, close, randomised
from torch import Tensor, nn

import fastvit
from fastvit.rope import RotaryEmbeddingDinoV3


def rope(grid: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    sin, cos = RotaryEmbeddingDinoV3(16).get_embed(grid, device).to(dtype).chunk(2, dim=-1)
    return sin, cos


def block(device: torch.device, **options: Any) -> SelfAttentionBlock:
    found = randomised(SelfAttentionBlock(64, 4, **options)).to(device).eval()
    assert isinstance(found, SelfAttentionBlock)
    return found


def gradients(module: nn.Module, outputs: list[Tensor]) -> list[Tensor]:
    loss = sum((out.square().sum() for out in outputs), torch.zeros((), device=outputs[0].device))
    return list(torch.autograd.grad(loss, list(module.parameters())))


@pytest.mark.parametrize("mlp", [Mlp, SwiGLUFFN])
def test_a_list_of_crops_is_fused_and_agrees(mlp: type[nn.Module], device: torch.device) -> None:
    """Each with positions of its own; so are one batch, and tokens without positions."""
    module = block(device, mlp=mlp)
    crops = [torch.randn(2, 5 + 12, 64, device=device), torch.randn(4, 5 + 4, 64, device=device)]
    ropes = [rope((3, 4), device), rope((2, 2), device)]
    calls = ((crops, ropes), (crops,), (crops[0], ropes[0]), (crops[0],))

    def run() -> list[list[Tensor]]:
        found = [module(*call) for call in calls]
        return [out if isinstance(out, list) else [out] for out in found]

    want = run()
    wanted = gradients(module, want[0])
    report = fastvit.accelerate(module, strict=True)
    assert outcome(report, "") == ("accelerated", "layer_norm_attention, layer_norm_mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run()
    for several, others in zip(got, want, strict=True):
        assert all(close(a, b) for a, b in zip(several, others, strict=True))
    largest = max(float(g.abs().max()) for g in wanted)
    for a, b in zip(gradients(module, got[0]), wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * max(float(b.abs().max()), 1e-2 * largest)
    assert not close(got[0][0], got[1][0])


def test_parts_alone(device: torch.device) -> None:
    module, x, positions = block(device), torch.randn(2, 17, 64, device=device), rope((3, 4), device)
    want = module.attn(x, rope=positions), module.mlp(x), PatchEmbed(32, 8, 3, 64).to(device)
    report = fastvit.accelerate(nn.ModuleList([module.attn, module.mlp, want[2]]), strict=True)
    assert [entry.detail for entry in report.accelerated] == ["attention_qkvpacked, linear", "mlp", "patch_embed"]
    assert close(module.attn(x, rope=positions), want[0])
    assert close(module.mlp(x), want[1])


def test_the_bias_of_k_is_masked(device: torch.device) -> None:
    """Whatever stands there, and however it trains."""
    module, x = block(device), torch.randn(2, 17, 64, device=device)
    fastvit.accelerate(module)
    want = module(x)
    with torch.no_grad():
        module.attn.qkv.bias[64:128] = 7.0
    assert torch.equal(module(x), want)
    (gradient,) = torch.autograd.grad(module(x).sum(), module.attn.qkv.bias)
    assert not gradient[64:128].any()
    assert gradient[:64].any()


def test_tables_to_which_the_library_rounds_fall_back(device: torch.device) -> None:
    module, x = block(device), torch.randn(2, 17, 64, device=device)
    positions = rope((3, 4), device, torch.bfloat16)
    accelerate_as_it_was(module, lambda: module(x, positions), "rotary positions in torch.bfloat16")


def test_stochastic_depth_in_training_falls_back(device: torch.device) -> None:
    module, x = block(device, drop_path=0.4).train(), torch.randn(4, 17, 64, device=device)
    accelerate_as_it_was(module, lambda: module(x), "leaves samples out")


def test_lists_of_anything_else_fall_back(device: torch.device) -> None:
    module, x = block(device), torch.randn(2, 17, 64, device=device)
    fastvit.accelerate(module)
    with pytest.warns(UserWarning, match="its input has 4 dimensions"), pytest.raises(RuntimeError, match="dimensions"):
        module([x, x[None]])
