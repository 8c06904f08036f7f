"""Attention distances against their definition, from softmax written out, and CLS after each block against hooks."""

import itertools
import math
from typing import Any

import pytest
import torch
from studied_attention import LIBRARIES, VISIBLE, Odd, image, materialised, pair, sdpa
from torch import Tensor, nn

import fastvit
from benchmarks.harness.libraries import randomize
from fastvit import study
from fastvit.study.attention import weights as attention_weights

CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}


def defined(weights: Tensor, grid: tuple[int, int], patch_size: tuple[int, int]) -> Tensor:
    """Compute the distances (layers, H) of all weights (layers, H, N, N), pair by pair."""
    places = list(itertools.product(range(grid[0]), range(grid[1])))
    pixels = [[math.hypot((a - c) * patch_size[0], (b - d) * patch_size[1]) for c, d in places] for a, b in places]
    prefix = weights.shape[-1] - len(places)
    patches = weights[..., prefix:, prefix:].double()
    patches = patches / patches.sum(-1, keepdim=True)
    return (patches * torch.tensor(pixels, dtype=torch.float64)).sum(-1).mean(-1)


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 48, generator=torch.Generator().manual_seed(5))


# ---- distances ----


@pytest.mark.parametrize(("patch", "grid", "chunk"), [(8, (4, 6), 1 << 22), ((16, 8), (2, 6), 700)], ids=str)
def test_distance_is_its_definition(patch, grid, chunk, monkeypatch):
    """The mean over several images, with weights computed at once, or a few rows at a time; and some layers of it."""
    monkeypatch.setattr(attention_weights, "CHUNK", chunk)
    ours, theirs = pair("vit", patch_size=patch)
    far = study.attention_distance(ours, images(3))
    size = (patch, patch) if isinstance(patch, int) else patch
    each = [defined(materialised(theirs, x), grid, size) for x in images(3)]
    assert min((a - b).abs().max() for a, b in itertools.combinations(each, 2)) > 0.1  # images differ
    torch.testing.assert_close(far.distance, torch.stack(each).mean(0), **CLOSE)
    assert (far.grid, far.patch_size, far.layers, far.heads, far.depth) == (grid, size, (0, 1, 2), (0, 1, 2), 3)
    uniform = defined(torch.ones(1, 1, math.prod(grid), math.prod(grid)), grid, size)
    assert far.uniform == pytest.approx(uniform.item(), rel=1e-12)
    torch.testing.assert_close(far.share * far.uniform, far.distance)
    some = study.attention_distance(ours, list(images(3).split(1)), layers=[-1, 0])
    assert (some.layers, some.depth) == ((2, 0), 3)
    assert torch.equal(some.distance, far.distance[[2, 0]])


@pytest.mark.parametrize("bias", [-3.0, -200.0, -torch.inf])
def test_weights_of_patches_add_up_to_1_without_prefix_tokens(bias):
    """Even if they are 0 in float32 next to that of the prefix token. If they are exactly 0, there is no distance."""
    mask = torch.full((25, 25), bias)
    mask[:, 0] = 0.0
    model = Odd(lambda q: sdpa(torch.cat([q[:, :, 7:8], q], 2), attn_mask=mask))
    if bias == -torch.inf:
        with pytest.raises(ValueError, match="layer 0 has no finite distance"):
            study.attention_distance(model, image())
        return
    distance = study.attention_distance(model, image()).distance
    model.attend = sdpa
    torch.testing.assert_close(distance, study.attention_distance(model, image()).distance, **CLOSE)


# ---- CLS ----


def after_blocks(model: nn.Module, blocks: Any, x: Tensor) -> Tensor:
    """Return the tokens after each block, (blocks, N, D). x: (3, H, W)"""
    seen: list[Tensor] = []

    def after(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    hooks = [block.register_forward_hook(after) for block in blocks]
    with torch.no_grad():
        model(x[None])
    for hook in hooks:
        hook.remove()
    return torch.cat(seen)


def cosines(states: Tensor) -> Tensor:
    states = states.double()
    return states @ states[-1] / states.norm(dim=1) / states[-1].norm()


@pytest.mark.parametrize("class_token", [True, False])
def test_evolution_is_the_cosine_to_the_last_state(class_token):
    """Without CLS, of the mean of the patches, which registers are no part of."""
    ours, theirs = pair("vit", class_token=class_token, global_pool="token" if class_token else "avg")
    evolution = study.cls_evolution(ours.train(), images(2))
    tokens = [after_blocks(theirs, theirs.blocks, x) for x in images(2)]
    expected = torch.stack([cosines(t[:, 0] if class_token else t[:, 2:].mean(1)) for t in tokens])
    assert expected[:, 0].max() < 0.9
    torch.testing.assert_close(evolution.cosine, expected, **CLOSE)
    torch.testing.assert_close(evolution.mean, expected.mean(0), **CLOSE)
    assert evolution.pooled is not class_token
    assert ours.training
    assert not any(m._forward_hooks for m in ours.modules())


@pytest.mark.parametrize("name", LIBRARIES)
def test_models_of_libraries_accelerated_and_not(name, monkeypatch):
    """Maps, distances and states."""
    torch.manual_seed(0)
    model, x = LIBRARIES[name](), image(32, 32)
    randomize(model)
    lists = [m for name, m in model.named_modules() if name.endswith(("blocks", "layers", "layer", "model.layer"))]
    (blocks,) = [m for m in lists if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) == 2]
    tokens = after_blocks(model, blocks, x)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
        weights = materialised(model, x)
    pooled = name == "SigLIP"
    for accelerated in (False, True):
        if accelerated:
            assert fastvit.accelerate(model).accelerated
        maps = study.attention_maps(model, x, queries=(1, 2))
        query = maps.num_prefix_tokens + maps.grid[1] + 2
        torch.testing.assert_close(maps.rows[:, :, 0], weights[:, :, query], **VISIBLE)
        far = study.attention_distance(model, x)
        torch.testing.assert_close(far.distance, defined(weights, far.grid, far.patch_size), **CLOSE)
        evolution = study.cls_evolution(model, x)
        assert evolution.pooled == pooled
        states = tokens.mean(1) if pooled else tokens[:, 0]
        torch.testing.assert_close(evolution.cosine[0], cosines(states), **CLOSE)


class Sums(nn.Module):
    """Attention, then two blocks, each a linear layer and then the given function."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.odd = Odd(lambda q: sdpa(q).transpose(1, 2).flatten(2))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        for layer in self.layers:
            layer.register_forward_hook(lambda *args: change(args[2]))

    def forward(self, x: Tensor) -> Any:
        x = self.odd(x)
        for layer in self.layers:
            layer(x)
        return x


def test_blocks_that_return_tuples_and_grids():
    for change in (lambda x: (x, None), lambda x: x.unflatten(1, (4, 6))):
        assert study.cls_evolution(Sums(change), image()).cosine.shape == (1, 2)


CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Conv2d(8, 8, 1))
WRONG: list[tuple[Any, nn.Module, Any, str]] = [
    (study.attention_distance, Odd(sdpa), [image(), "cat.jpg"], r"images\[1\] must be a tensor, got str"),
    (study.attention_distance, Odd(sdpa), [], r"images must be one or more of one shape, got \[\]"),
    (study.attention_distance, Odd(sdpa), [image(), image(16, 48)], r"one shape, got \[\(3, 16, 48\), \(3, 32, 48\)\]"),
    (study.attention_distance, Odd(sdpa), image(8, 8), "images must have two patches or more, got one"),
    (study.attention_distance, Odd(lambda q: [sdpa(q), sdpa(q[:, :1])]), image(), "layers must be given one at a time"),
    (study.cls_evolution, Odd(sdpa), image(), "Odd has no list of blocks that run"),
    (study.cls_evolution, Sums(lambda x: x[0]), image(), r"block 0 \(Linear\) must return \(1, N, D\), got \(24, 32\)"),
    (
        study.cls_evolution,
        Sums(lambda x: x[:, :12]),
        image(),
        "block 0 does not return all tokens: it is over 12 tokens",
    ),
    (study.cls_evolution, CONVOLUTIONS, image(), r"block 0 \(Conv2d\) has no self-attention"),
]


@pytest.mark.parametrize(("function", "model", "given", "message"), WRONG)
def test_wrong_images_and_models_without_distances_or_blocks(function, model, given, message):
    with pytest.raises(TypeError if "a tensor" in message else ValueError, match=message):
        function(model, given)
