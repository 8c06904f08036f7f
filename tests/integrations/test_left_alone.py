"""Modules and calls that `accelerate` leaves to the library, and why: at once, or in a call that no op takes."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from dinov2_layout import NestedTensorBlock
from dinov3_layout import SelfAttentionBlock
from known_models import vjepa2
from library_imports import import_library
from library_models import (
    TEXT,
    attention_of_timm,
    block_of_timm,
    gated_mlp,
    grid_of_transformers,
    hugging_face,
    open_clip_tower,
    parallel_block,
    sam_of_timm,
    swin_of_timm,
    swin_of_transformers,
    vit,
)
from models import accelerate_as_it_was, randomised
from torch import Tensor, nn

import fastvit
from fastvit.integrations import forward

Make = Callable[[], nn.Module]


def changed(module: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def hooked(module: nn.Module, name: str) -> nn.Module:
    module.get_submodule(name).register_forward_hook(lambda *_: None)
    return module


def layer_of_text(family: str) -> Any:
    transformers = import_library("transformers")
    model = getattr(transformers, f"{family}TextModel")(getattr(transformers, f"{family}TextConfig")(**TEXT))
    return next(m for m in model.modules() if type(m).__name__ == f"{family}EncoderLayer")


def fast_norm() -> nn.Module:
    layers = import_library("timm").layers
    layers.set_fast_norm(True)
    try:
        return layers.RmsNorm(32)
    finally:
        layers.set_fast_norm(False)


def shared_keys_in_windows() -> nn.Module:
    layer = swin_of_transformers().swin.encoder.layers[0].blocks[0]
    changed(layer.attention, k_proj=nn.Linear(32, 16), v_proj=nn.Linear(32, 16))
    return layer


def calls_another() -> nn.Module:
    return changed(import_library("transformers").activations.GELUActivation(), act=torch.tanh)


norms = partial(attention_of_timm, "EvaAttention", qk_norm=True)
shared_keys = partial(attention_of_timm, "AttentionRope", qkv_fused=False, num_kv_heads=2, rotate_half=True)
LEFT: list[tuple[Make, str]] = [
    (partial(block_of_timm, num_heads=16), "head_dim 4 is not a multiple of 8 from 16 to 256"),
    (partial(block_of_timm, act_layer="mish"), "act is nn.Mish"),
    (partial(block_of_timm, act_layer=calls_another), "an activation that calls another function"),
    (lambda: block_of_timm(attn_drop_rate=1.0).train(), "a dropout of everything"),
    (lambda: block_of_timm(proj_drop_rate=1.0).train(), "a dropout of everything"),
    (partial(attention_of_timm, "EvaAttention", gated=True), "a gate in attention"),
    (lambda: changed(parallel_block(), in_proj=nn.Sequential(nn.Linear(64, 448))), "in_proj is nn.Sequential"),
    (lambda: changed(parallel_block(), in_proj=nn.Linear(64, 448)), "two biases, in_proj.bias and mlp_bias"),
    (lambda: parallel_block(proj_drop=0.1).train(), "its two dropouts differ: 0.1 and 0.0"),
    (lambda: changed(shared_keys(), num_kv_heads=3), "k and v have 32 outputs for 3 heads"),
    (
        lambda: changed(shared_keys(qk_norm=True), q_norm=nn.RMSNorm(64, eps=1e-6), k_norm=nn.RMSNorm(64, eps=1e-6)),
        "norms of q and k over [64] of 4 heads of 16",
    ),
    (shared_keys_in_windows, "heads that share keys, in windows"),
    (lambda: changed(norms(), q_norm=nn.RMSNorm(16, eps=1e-3)), "q_norm and k_norm are of two kinds"),
    (lambda: changed(norms(), q_norm=nn.Identity()), "q_norm is nn.Identity"),
    (partial(gated_mlp, "GluMlp"), "act is nn.Sigmoid"),
    (partial(gated_mlp, "GluMlp", act_layer=nn.ReLU), "a gate with relu"),
    (lambda: changed(gated_mlp("SwiGLU"), norm=nn.Softmax(-1)), "norm is nn.Softmax"),
    (fast_norm, "timm's fast norm is on, which rounds otherwise"),
    (partial(nn.RMSNorm, (4, 32)), "it normalises more than the last dimension"),
    (partial(nn.LayerNorm, (4, 32)), "it normalises more than the last dimension"),
    (
        lambda: sam_of_timm(window_size=3, use_rel_pos=True, attn_drop_rate=0.2).train().blocks[0],
        "dropout of attention with relative positions",
    ),
    (
        lambda: grid_of_transformers("vitdet.VitDetModel", residual_block_indices=[1]).encoder.layer[1],
        "convolutions after its MLP",
    ),
    (lambda: hooked(block_of_timm(), "attn.q_norm"), "q_norm has hooks or a forward of its own"),
    (lambda: hooked(block_of_timm(), "attn.norm"), "norm has hooks or a forward of its own"),
    (lambda: hooked(block_of_timm(), "mlp.norm"), "norm has hooks or a forward of its own"),
    (
        lambda: swin_of_transformers(attn_implementation="eager").swin.encoder.layers[0].blocks[0],
        "eager attention returns its weights as well",
    ),
    (lambda: vjepa2(attn_implementation="eager").encoder.layer[0], "eager attention returns its weights as well"),
    (partial(layer_of_text, "CLIP"), "the text tower's attention is causal"),
    (partial(layer_of_text, "Aimv2"), "the text tower's attention is causal"),
    (lambda: layer_of_text("Aimv2").attention, "the text tower's attention is causal"),
    (
        lambda: open_clip_tower("MultimodalTransformer", context_length=8).cross_attn[0],
        "keys and values of another tensor",
    ),
    (lambda: changed(hugging_face("ViTModel").layers[0].attention, is_causal=True), "its attention is causal"),
]


def test_what_is_left_alone_at_once() -> None:
    """Gates of convolutions are no MLPs, and not skipped."""
    convolution = gated_mlp("GluMlp", act_layer=nn.SiLU, use_conv=True)
    report = fastvit.accelerate(nn.ModuleList([*[make() for make, _ in LEFT], convolution]))
    details = {entry.name: entry.detail for entry in report.skipped}
    assert [details.get(str(i)) for i in range(len(LEFT) + 1)] == [*[reason for _, reason in LEFT], None]


def test_a_model_with_a_part_that_is_left_alone() -> None:
    """All else is accelerated, or nothing if strict."""
    model, image = vit(depth=1, num_heads=16), torch.randn(2, 3, 32, 32)
    report = accelerate_as_it_was(model, lambda: model(image))
    assert len(report.accelerated) >= 4  # norms, patch embedding, and the MLP
    with pytest.raises(ValueError, match=f"strict: {len(report.skipped)} modules cannot be accelerated"):
        fastvit.accelerate(model, strict=True)
    assert not any("forward" in m.__dict__ for m in model.modules())


def draw(*shape: int, **options: Any) -> Tensor:
    """Numbers that are the same in every call."""
    return torch.linspace(-2, 2, torch.Size(shape).numel(), **options).sin().view(shape)


def embedding_that_pads() -> Any:
    return vit(dynamic_img_pad=True, dynamic_img_size=True, depth=1).patch_embed


def dinov2() -> nn.Module:
    return randomised(NestedTensorBlock(64, 4)).eval()


FALLBACKS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an image of 40 x 33, which patches of 8 x 8 do not cover": (
        embedding_that_pads, lambda embed: embed.proj(draw(1, 3, 40, 33)),
    ),
    "its input has 3 dimensions, not 4": (embedding_that_pads, lambda embed: embed.proj(draw(3, 40, 32))),
    "a mask and is_causal": (
        lambda: changed(block_of_timm().attn, fused_attn=False),
        lambda attn: attn(draw(2, 5, 64), torch.eye(5, dtype=torch.bool), True),
    ),
    "an attention mask that is not floating": (
        lambda: open_clip_tower("TextTransformer").transformer.resblocks[0],
        lambda block: block(draw(2, 5, 64), attn_mask=torch.eye(5, dtype=torch.bool)),
    ),
    "a list of crops": (dinov2, lambda block: block([draw(4, 17, 64), draw(4, 5, 64)])),
    "leaves samples out of the batch": (
        lambda: changed(dinov2(), sample_drop_ratio=0.4).train(), lambda block: block(draw(4, 17, 64)),
    ),
    "leaves samples out": (
        lambda: changed(SelfAttentionBlock(64, 4), sample_drop_ratio=0.4), lambda block: block(draw(4, 17, 64)),
    ),
    "an attention bias": (lambda: dinov2().attn, lambda attn: attn(draw(4, 17, 64), draw(17, 17))),
    "an attention bias, by name": (
        lambda: dinov2().attn, lambda attn: attn(draw(4, 17, 64), attn_bias=draw(17, 17)),
    ),
    "rotary positions in torch.bfloat16": (
        lambda: randomised(SelfAttentionBlock(64, 4)).eval(),
        lambda block: block(draw(4, 17, 64), 2 * (draw(12, 16, dtype=torch.bfloat16),)),
    ),
}  # fmt: skip
FAILURES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {  # of the library's own forward, too
    "its input is torch.float64 and its parameters are torch.float32": (
        lambda: vit(depth=1).norm, lambda norm: norm(draw(2, 4, 64, dtype=torch.float64)),
    ),
    "rotary positions for 4 of 7 tokens": (  # broadcasting could take them for those of all
        partial(attention_of_timm, "EvaAttention"), lambda attn: attn(draw(2, 7, 64), rope=draw(4, 32)),
    ),
    "a grid of 9 x 9, which its mask is not for": (
        lambda: swin_of_timm().layers[0].blocks[1], lambda block: block(draw(1, 9, 9, 32)),
    ),
    "its input has 4 dimensions": (
        lambda: SelfAttentionBlock(64, 4).eval(), lambda block: block([draw(2, 5, 64), draw(1, 2, 5, 64)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", [*FALLBACKS, *FAILURES])
def test_what_runs_the_librarys_own_forward_in_a_call(reason: str, device: torch.device) -> None:
    make, call = {**FALLBACKS, **FAILURES}[reason]
    module = make().to(device)
    with device:
        if reason in FALLBACKS:
            accelerate_as_it_was(module, partial(call, module), reason.removesuffix(", by name"))
        else:
            fastvit.accelerate(module)
            with pytest.warns(UserWarning, match=reason), pytest.raises(RuntimeError):
                call(module)


def test_parameters_of_two_dtypes() -> None:
    """PyTorch's LayerNorm takes them, on a CPU."""
    block, x = block_of_timm().bfloat16(), torch.randn(2, 5, 64).bfloat16()
    block.norm2.float()
    accelerate_as_it_was(block, lambda: block(x), "its input is torch.bfloat16 and its parameters are torch.float32")


def test_a_mask_of_swin_that_was_edited() -> None:
    """Before, and after: the op makes a mask of its own."""
    block, x = swin_of_timm().layers[0].blocks[1], draw(1, 8, 8, 32)
    edited, want = copy.deepcopy(block), block(x)
    edited.attn_mask.mul_(0.01)
    expected = edited(x)
    assert not torch.allclose(want, expected, atol=1e-3)
    (entry, *_) = fastvit.accelerate(edited).entries
    assert (entry.status, entry.detail) == ("skipped", "an attn_mask with other values than its class makes")
    assert fastvit.accelerate(block).accelerated
    for _ in range(2):
        torch.testing.assert_close(block(x), want)
        before = block.attn_mask.clone()
        block.attn_mask.mul_(0.01)
        with pytest.warns(UserWarning, match="an attn_mask with other values"):
            torch.testing.assert_close(block(x), expected)
        block.attn_mask.copy_(before)
        forward._warned.clear()
    block.shift_size = (1, 1)
    with pytest.warns(UserWarning, match="an attn_mask with other values"):
        torch.testing.assert_close(block(x), type(block).forward(block, x))
    mask, block.attn_mask = block.attn_mask, None
    with pytest.warns(UserWarning, match="no attn_mask, although it shifts"):
        torch.testing.assert_close(block(x), type(block).forward(block, x))
    block.attn_mask, block.shift_size, block.attn.softmax.dim = mask, (2, 2), -2
    (entry, *_) = fastvit.accelerate(block).entries
    assert (entry.status, entry.detail) == ("skipped", "softmax along another dimension")


@pytest.mark.filterwarnings("ignore:.*(a trace for grids of any size|deprecated)", "ignore::torch.jit.TracerWarning")
def test_a_traced_swin_takes_other_sizes() -> None:
    model = swin_of_timm(strict_img_size=False)
    fastvit.accelerate(model)
    with torch.no_grad():
        traced = torch.jit.trace(model, draw(1, 3, 32, 32), check_trace=False)
        x = draw(1, 3, 32, 48)
        torch.testing.assert_close(traced(x), model(x))
