"""Models of videos: the reference, their sizes, V-JEPA 2's positions. Weights and transformers' own models:
tests/weights/test_checkpoints_video.py; the op: tests/ops/test_patch_embed.py; wrong arguments: test_bad_models.py."""

import copy
import pickle
from typing import Any

import pytest
import torch
from library_imports import import_library
from models import assert_steps_as_accurate, close, randomised, step
from torch import Tensor, nn

import fastvit
from fastvit import layers, ops
from fastvit.rope import RotaryEmbeddingVJepa2, vjepa2_tables
from fastvit.study.sources.from_zoo import reference_model

NAMES = ["videomae_base_patch16_224", "vjepa2_large_patch16_256"]
every_name = pytest.mark.parametrize("name", NAMES)
SMALL: dict[str, Any] = {
    "embed_dim": 64, "depth": 1, "num_heads": 2, "num_frames": 4, "img_size": (8, 12), "patch_size": 4,
    "num_classes": 3,
}  # fmt: skip


def video(model: Any, count: int = 2, **where: Any) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, 3, model.patch_embed.num_frames, *model.patch_embed.img_size, **where)


@every_name
def test_as_accurate_as_the_reference(name: str, device: torch.device) -> None:
    assert_accurate(name, torch.float32, device)
    assert_accurate(name, torch.bfloat16, device)


def test_as_accurate_with_kernels(triton_backend: None, device: torch.device) -> None:
    assert_accurate(NAMES[1], torch.float32, device)


def assert_accurate(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Logits and every gradient, the video's included, against the reference in the same dtype and in float64."""
    ours = randomised(fastvit.create_model(name, **SMALL, device=device)).to(dtype)
    eager = reference_model(name, **SMALL, device=device).to(dtype)
    eager.load_state_dict(ours.state_dict())
    x = video(ours, device=device).to(dtype)
    exact = step(copy.deepcopy(eager).double(), x.double())
    assert_steps_as_accurate(step(ours, x), step(eager, x), exact)


@every_name
def test_uint8_compile_copy_pickle_and_a_hook(name: str, device: torch.device) -> None:
    statistics = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    model = randomised(fastvit.create_model(name, **SMALL, **statistics, device=device)).eval()
    bytes_ = torch.randint(0, 256, video(model).shape, dtype=torch.uint8, device=device)
    mean, std = (torch.tensor(t, device=device).view(3, 1, 1, 1) for t in statistics.values())
    want = model((bytes_ / 255 - mean) / std)
    assert close(model(bytes_), want)
    assert close(reference_model_like(model, name, statistics)(bytes_), want)
    torch._dynamo.reset()
    assert close(torch.compile(model, backend="aot_eager", fullgraph=True)(bytes_), want)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert close(other(bytes_), want)
    seen: list[bool] = []
    model.patch_embed.proj.register_forward_hook(lambda *_: seen.append(True))
    assert close(model(bytes_), want)
    assert seen


def reference_model_like(model: nn.Module, name: str, statistics: dict[str, Any]) -> nn.Module:
    eager = reference_model(name, **SMALL, **statistics).to(next(model.parameters()).device)
    eager.load_state_dict(model.state_dict())
    return eager.eval()


def test_set_input_size(device: torch.device) -> None:
    """Fixed positions are computed for the new grid, and a kernel keeps its frames."""
    model = fastvit.create_model(NAMES[0], **SMALL, device=device)
    model.set_input_size(img_size=16, patch_size=8, num_frames=6)
    assert model.patch_embed.proj.weight.shape == (64, 3, 2, 8, 8)
    assert model.patch_embed.grid_size == (3, 2, 2)
    made = fastvit.create_model(NAMES[0], **{**SMALL, "img_size": 16, "patch_size": 8, "num_frames": 6}, device=device)
    assert torch.equal(model.pos_embed, made.pos_embed)
    made.load_state_dict(model.state_dict())
    assert torch.equal(model(video(made, device=device)), made(video(made, device=device)))
    _, (features,) = model.forward_intermediates(video(made, device=device), indices=1)
    assert features.shape == (2, 64, 3, 2, 2)


def test_learnt_positions_belong_to_one_size(device: torch.device) -> None:
    model = fastvit.VisionTransformer(**SMALL, tubelet_size=2, dynamic_img_size=True, device=device)
    assert model(video(model, device=device)).shape == (2, 3)
    for call in (lambda: model.set_input_size(num_frames=8), lambda: model(torch.randn(1, 3, 8, 8, 12, device=device))):
        with pytest.raises(ValueError, match=r"videos .*not interpolated"):
            call()
    assert model.patch_embed.num_frames == 4


def test_a_list_is_of_images(device: torch.device) -> None:
    model = fastvit.create_model(NAMES[1], **SMALL, device=device)
    with pytest.raises(ValueError, match="a list of images needs a model of images, got one of videos"):
        model([video(model, device=device)[0]])


def test_fit(device: torch.device) -> None:
    """The plan is that of a step on videos, and recomputing changes no gradient."""
    model = randomised(fastvit.create_model(NAMES[1], **{**SMALL, "depth": 2, "img_size": 32}, device=device))
    x = video(model, device=device)
    want = step(model, x)
    free = fastvit.fit(model, budget="1GiB", batch=2)
    report = fastvit.fit(model, budget=free.peak - 1, batch=2)
    assert report.peak < free.peak
    for key, got in step(model, x).items():
        assert close(got, want[key]), key


# ---- V-JEPA 2's positions ----


@pytest.mark.parametrize("d", [64, 80, 88])
def test_rotation_is_transformers(d: int, device: torch.device) -> None:
    """All tubelets of a video, and some at any places; gradients too, because partners have different angles."""
    transformers = import_library("transformers")
    config = transformers.VJEPA2Config(crop_size=48, hidden_size=2 * d, num_attention_heads=2)
    theirs = transformers.models.vjepa2.modeling_vjepa2.VJEPA2RopeAttention(config, 2 * d, 2).to(device)
    sin, cos = RotaryEmbeddingVJepa2(d).get_embed((4, 3, 3), device).chunk(2, -1)
    places = torch.stack([torch.randperm(36, device=device)[:7] for _ in range(2)])
    some = [table[:, None] for table in vjepa2_tables(places, (3, 3), d)]
    for tables, masks in (((sin, cos), None), (some, places)):
        x = torch.randn(2, tables[0].shape[-2], 2, d, device=device, requires_grad=True)
        same = x.detach().transpose(1, 2).requires_grad_()
        want = theirs.apply_rotary_embeddings(same, theirs.get_position_ids(same[:, 0], masks=masks))
        got = ops.rotary(x, ops.Rotary(*tables, interleaved=True))
        torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-6, atol=1e-6)
        dout = torch.randn_like(got)
        (dx,), (dsame,) = torch.autograd.grad(got, [x], dout), torch.autograd.grad(want, [same], dout.transpose(1, 2))
        torch.testing.assert_close(dx, dsame.transpose(1, 2), rtol=1e-6, atol=1e-6)


def test_patch_embed_alone(device: torch.device) -> None:
    """Frames before channels are read in place, and a frame that is repeated is one in memory."""
    layer = layers.PatchEmbed(8, 4, embed_dim=24, num_frames=2, tubelet_size=2, device=device)
    assert layer.num_patches == 4
    frame = torch.randn(2, 1, 3, 8, 8, device=device)
    x = frame.expand(-1, 2, -1, -1, -1).transpose(1, 2)
    want = layer.proj(x).flatten(2).transpose(1, 2)
    assert close(layer(x), want)
