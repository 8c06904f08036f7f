"""Attention maps and rollout against explicit softmax: of the references, and of the libraries' own models."""

import copy
from typing import Any

import pytest
import torch
from oracle import assert_as_accurate
from studied_attention import GRID, VISIBLE, Odd, image, materialised, pair, sdpa, vit
from torch import Tensor, nn

from fastvit import ops, study
from fastvit.study.attention import weights as attention_weights
from fastvit.study.memory.peak import peak_bytes


def dense_rollout(weights: Tensor) -> Tensor:
    """Roll out weights (layers, H, N, N) to (N, N), in float64."""
    eye = product = torch.eye(weights.shape[-1], dtype=torch.float64)
    for layer in weights.double().mean(1):
        product = (0.5 * layer + 0.5 * eye) @ product
    return product


# ---- rows ----


@pytest.mark.parametrize(("kind", "chunk"), [("vit", 1), ("eva", 600), ("dinov3", attention_weights.CHUNK)])
def test_rows_and_rollout_are_the_references_softmax(kind, chunk, monkeypatch):
    """All layers and heads, and some of them; weights are computed a row, some rows, and all rows at a time."""
    monkeypatch.setattr(attention_weights, "CHUNK", chunk)
    ours, theirs = pair(kind)
    queries = ("cls", (1, 2), (3, 5))
    maps, rollout = (f(ours, image(), queries=queries) for f in (study.attention_maps, study.attention_rollout))
    everything = materialised(theirs, image())
    prefix = everything.shape[-1] - GRID[0] * GRID[1]
    assert (maps.num_prefix_tokens, maps.grid, maps.depth) == (prefix, GRID, 3)
    assert (maps.layers, maps.heads, maps.queries) == ((0, 1, 2), (0, 1, 2), queries)
    numbers = [0, prefix + 1 * 6 + 2, prefix + 3 * 6 + 5]
    assert everything.max() > 0.3  # far from uniform
    torch.testing.assert_close(maps.rows, everything[:, :, numbers], **VISIBLE)
    assert torch.equal(maps.patches[..., 2, 5], maps.rows[..., prefix + 2 * 6 + 5])
    torch.testing.assert_close(rollout.rows.double(), dense_rollout(everything)[numbers], **VISIBLE)
    assert (rollout.queries, rollout.grid, rollout.patches.shape) == (queries, GRID, (3, *GRID))
    some = study.attention_maps(ours, image(), [-1, 0, -3], [2, 0], [(3, 5), "cls"])
    assert (some.layers, some.heads) == ((2, 0, 0), (2, 0))
    torch.testing.assert_close(some.rows, everything[[2, 0, 0]][:, [2, 0]][:, :, [numbers[2], 0]], **VISIBLE)
    one = study.attention_maps(ours, image(), -1, -1, "cls")
    torch.testing.assert_close(one.rows, everything[2:, 2:, :1], **VISIBLE)


def test_rows_and_rollout_under_autocast_are_as_accurate_as_eager_ones():
    """Rounded weights and activations err in both; the softmax in float32 adds no error."""
    ours, theirs = pair("vit")
    expected = materialised(copy.deepcopy(theirs).double(), image().double())
    with torch.autocast("cpu", torch.bfloat16):
        maps, rollout = study.attention_maps(ours, image()), study.attention_rollout(ours, image())
        eager = materialised(theirs, image()).float()
    assert_as_accurate(maps.rows[:, :, 0], eager[:, :, 0], expected[:, :, 0])
    assert_as_accurate(rollout.rows[0], dense_rollout(eager)[0].float(), dense_rollout(expected)[0])


def test_rows_of_triton_kernels(triton_backend):
    """They rotate q and k in place."""
    ours, theirs = pair("eva", img_size=16, depth=1)
    maps = study.attention_maps(ours, image(16, 16), queries=(1, 0))
    torch.testing.assert_close(maps.rows[:, :, 0], materialised(theirs, image(16, 16))[:, :, 2 + 2], **VISIBLE)


@pytest.mark.parametrize("shape", [(1, 2, 24, 24), (24,)], ids=str)
def test_a_bias_of_the_scores_is_added(shape, monkeypatch):
    monkeypatch.setattr(attention_weights, "CHUNK", 2 * 24 * 7)
    bias = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    model = Odd(lambda q: sdpa(q, attn_mask=bias.expand(24, 24) if bias.dim() == 1 else bias))
    with torch.no_grad():
        q = model.heads(image()[None])[0]
    weights = (q @ q.transpose(1, 2) / 4 + bias).softmax(-1).view(1, 2, 24, 24)
    maps = study.attention_maps(model, image(), heads=1, queries=[(0, 1), (3, 0)])
    torch.testing.assert_close(maps.rows[0, 0], weights[0, 1, [1, 18]], **VISIBLE)
    rollout = study.attention_rollout(model, image(), queries=(3, 0))
    torch.testing.assert_close(rollout.rows[0].double(), dense_rollout(weights)[18], **VISIBLE)


def test_masks_and_shared_keys():
    """Both heads attend to the first head's keys."""
    mask = torch.rand(24, 24, generator=torch.Generator().manual_seed(0)) > 0.3

    def attend(q: Tensor) -> Tensor:
        q = q.transpose(1, 2)
        return ops.attention(q, q[:, :, :1], q[:, :, :1], attn_mask=mask).transpose(1, 2)

    model = Odd(attend)
    with torch.no_grad():
        q = model.heads(image()[None])[0]
    weights = (q @ q[:1].transpose(1, 2) / 4).masked_fill(~mask, -torch.inf).softmax(-1)
    maps = study.attention_maps(model, image(), queries=[(0, 1), (3, 0)])
    torch.testing.assert_close(maps.rows[0], weights[:, [1, 18]], **VISIBLE)


# ---- what is computed, and what does not change ----


@pytest.mark.parametrize("function", [study.attention_rollout, study.attention_distance])
def test_no_matrix_of_all_weights(function, monkeypatch):
    monkeypatch.setattr(attention_weights, "CHUNK", 100_000)
    model, N = vit(img_size=384, depth=1), 1 + 2 + 48 * 48
    assert peak_bytes(lambda: function(model, image(384, 384)), torch.device("cpu")) < N * N * 4 / 2  # of one head


def test_evaluation_mode_and_no_gradient_and_both_restored():
    model = vit(attn_drop_rate=0.5, pos_drop_rate=0.5, drop_path_rate=0.5)
    expected = study.attention_maps(model, image()).rows
    model.train()
    model.blocks[1].attn.eval()
    before = {name: m.training for name, m in model.named_modules()}
    x = image().requires_grad_()
    maps = study.attention_maps(model, x)
    assert torch.equal(maps.rows, expected)
    assert not maps.rows.requires_grad
    with pytest.raises(ValueError, match="heads must be"):
        study.attention_maps(model, x, heads=7)
    assert {name: m.training for name, m in model.named_modules()} == before
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_is_compiled_runs_as_what_it_was_compiled_from():
    model = vit(depth=1)
    expected = study.attention_maps(model, image()).rows
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(image()[None])
    assert torch.equal(study.attention_maps(compiled, image()).rows, expected)


# ---- arguments ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 3}, r"layers must be in -3\.\.2, got 3"),
        ({"layers": []}, r"layers must be an integer, some integers, or None for all, got \[\]"),
        ({"heads": True}, r"heads must be .*got True"),
        ({"queries": (4, 0)}, r"rows in 0\.\.3 and columns in 0\.\.5, got \(4, 0\)"),
        ({"queries": [(0, 1), (1, 2, 3)]}, r"queries must be .*got \(1, 2, 3\)"),
        ({"image": torch.zeros(2, 3, 32, 48)}, r"image must have shape .* got \(2, 3, 32, 48\)"),
        ({"image": "cat.jpg"}, "image must be a tensor, got str"),
    ],
)
def test_what_the_model_has_not(arguments, message):
    with pytest.raises(TypeError if "tensor" in message else ValueError, match=message):
        study.attention_maps(**{"model": vit(), "image": image()} | arguments)


def test_without_cls_the_patch_in_the_centre():
    model = vit(class_token=False, reg_tokens=2, global_pool="avg")
    maps = study.attention_maps(model, image())
    assert (maps.queries, maps.num_prefix_tokens) == (((2, 3),), 2)
    with pytest.raises(ValueError, match=r'got "cls": VisionTransformer has no CLS'):
        study.attention_maps(model, image(), queries="cls")


# ---- attention that is not seen ----


def test_a_layer_that_computes_its_weights_itself_is_named():
    model = vit()
    model.blocks[1].attn.attn_drop.register_forward_hook(lambda *_: None)  # which wants the weights
    everything = study.attention_maps(vit(), image(), layers=[0, 2])
    torch.testing.assert_close(study.attention_maps(model, image(), layers=[0, -1]).rows, everything.rows, **VISIBLE)
    with pytest.raises(ValueError, match=r"layer 1's attention is not seen: it computes 27 x 27 weights"):
        study.attention_maps(model, image())


def within_windows(q: Tensor) -> Tensor:
    grid = q.transpose(1, 2).unflatten(1, GRID)
    return ops.attention_windows(torch.stack((grid, grid, grid), 3), (2, 3)).flatten(1, 2).transpose(1, 2)


def with_relative_positions(q: Tensor) -> Tensor:
    rows, columns = (q.new_zeros(q.shape[0], q.shape[2], q.shape[1], n) for n in GRID)
    q = q.transpose(1, 2)
    return ops.attention(q, q, q, relative=ops.Relative(rows, columns)).transpose(1, 2)


def with_several_lengths(q: Tensor) -> Tensor:
    return ops.attention_varlen(*(q[0].transpose(0, 1),) * 3, torch.tensor([0, 10, 24])).transpose(0, 1)


def of_other_sizes(q: Tensor) -> list[Tensor]:
    return [sdpa(t) for t in (q, torch.cat([q, q], 2), q[:, :1])]


UNSEEN: list[tuple[Any, str]] = [
    (lambda q: ops.attention(q, q, q, is_causal=True, layout="bhnd"), "layer 0's .* not seen: it is causal"),
    (lambda q: sdpa(q.unflatten(2, (2, 12))[0].transpose(0, 1)), "over 2 sequences of 12 tokens, as in windows"),
    (lambda q: sdpa(q[:, :, ::2]), "it is over 12 tokens, of an image of 4 x 6 patches"),
    (with_several_lengths, "it is within sequences of several lengths"),
    (within_windows, "it is within windows"),
    (with_relative_positions, "it has relative positions"),
    (lambda q: (q @ q.transpose(2, 3)).softmax(-1), "it computes 24 x 24 weights"),
    (of_other_sizes, "layer 1's attention is not seen: it is over 48 tokens, where others are over 24"),
    (lambda q: q, "the model has no self-attention that is seen"),
]


@pytest.mark.parametrize(("attend", "message"), UNSEEN)
def test_attention_that_is_not_seen_is_named(attend, message):
    with pytest.raises(ValueError, match=message):
        study.attention_maps(Odd(attend), image())


def test_layers_of_other_numbers_of_heads_and_no_patches():
    model = Odd(of_other_sizes)
    with pytest.raises(ValueError, match="layers have different numbers of heads"):
        study.attention_maps(model, image(), layers=[0, 2])
    assert study.attention_maps(model, image(), layers=[0, 2], heads=0).rows.shape == (2, 1, 1, 24)
    model.patches = nn.Conv2d(3, 32, 9, 8)
    with pytest.raises(ValueError, match="Odd has no grid of patches"):
        study.attention_maps(model, image())
