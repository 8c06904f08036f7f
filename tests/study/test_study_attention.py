"""Attention maps and rollout against explicit softmax: of the references, and of the libraries' own models."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from library_imports import import_library
from oracle import assert_as_accurate
from studied_attention import GRID, LIBRARIES, PAIRS, VISIBLE, Odd, image, materialised, pair, sdpa, vit
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastvit
from fastvit import ops, study
from fastvit.study.attention import weights as attention_weights


def dense_rollout(weights: Tensor) -> Tensor:
    """Roll out weights (layers, H, N, N) to (N, N), in float64."""
    eye = product = torch.eye(weights.shape[-1], dtype=torch.float64)
    for layer in weights.double().mean(1):
        product = (0.5 * layer + 0.5 * eye) @ product
    return product


# ---- rows ----


@pytest.mark.parametrize("kind", PAIRS)
def test_rows_are_the_references_softmax(kind):
    ours, theirs = pair(kind)
    found = study.attention_maps(ours, image(), queries=["cls", (1, 2), (3, 5)])
    everything = materialised(theirs, image())
    prefix = everything.shape[-1] - GRID[0] * GRID[1]
    assert (found.num_prefix_tokens, found.grid, found.depth) == (prefix, GRID, 3)
    assert (found.layers, found.heads, found.queries) == ((0, 1, 2), (0, 1, 2), ("cls", (1, 2), (3, 5)))
    numbers = [0, prefix + 1 * 6 + 2, prefix + 3 * 6 + 5]
    assert everything.max() > 0.3  # far from uniform
    torch.testing.assert_close(found.rows, everything[:, :, numbers], **VISIBLE)
    assert torch.equal(found.patches[..., 2, 5], found.rows[..., prefix + 2 * 6 + 5])


def test_rows_in_bfloat16_are_as_accurate_as_eager_ones():
    """Rounded weights and activations err in both; the softmax in float32 adds no error."""
    ours, theirs = pair("vit")
    low, exact = copy.deepcopy(theirs).bfloat16(), copy.deepcopy(theirs)
    exact.load_state_dict(low.state_dict())  # the rounded weights
    x = image().bfloat16()
    found = study.attention_maps(ours.bfloat16(), x, queries=["cls", (1, 2)])
    expected, eager = materialised(exact.double(), x.double()), materialised(low, x).float()
    assert found.rows.dtype is torch.float32
    assert_as_accurate(found.rows, eager[:, :, [0, 3 + 8]], expected[:, :, [0, 3 + 8]])


def test_rows_and_rollout_under_autocast_are_as_accurate_as_eager_ones():
    ours, theirs = pair("vit")
    expected = materialised(copy.deepcopy(theirs).double(), image().double())
    with torch.autocast("cpu", torch.bfloat16):
        maps, rollout = study.attention_maps(ours, image()), study.attention_rollout(ours, image())
        eager = materialised(theirs, image()).float()
    assert_as_accurate(maps.rows[:, :, 0], eager[:, :, 0], expected[:, :, 0])
    assert_as_accurate(rollout.rows[0], dense_rollout(eager)[0].float(), dense_rollout(expected)[0])
    for found in (maps, rollout):
        torch.testing.assert_close(found.rows.sum(-1), torch.ones(found.rows.shape[:-1]), rtol=0.0, atol=1e-6)


def test_rows_of_triton_kernels(triton_backend):
    """They rotate q and k in place."""
    ours, theirs = pair("eva", img_size=16, depth=1)
    found = study.attention_maps(ours, image(16, 16), queries=(1, 0))
    torch.testing.assert_close(found.rows[:, :, 0], materialised(theirs, image(16, 16))[:, :, 2 + 2], **VISIBLE)


def test_a_model_in_float64_has_rows_in_float64():
    ours, theirs = pair("vit")
    found = study.attention_maps(ours.double(), image().double())
    torch.testing.assert_close(found.rows[:, :, 0], materialised(theirs.double(), image().double())[:, :, 0])


@pytest.mark.parametrize("architecture", LIBRARIES, ids=str)
def test_models_of_libraries_accelerated_and_not(architecture, monkeypatch):
    import_library(architecture.library)
    model = architecture.model()
    x = architecture.image(model, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
        expected = materialised(model, x[0])
    untouched = study.attention_maps(model, x, queries=(1, 2))
    assert fastvit.accelerate(model).accelerated
    fused = study.attention_maps(model, x, queries=(1, 2))
    h, w = fused.grid
    patch_size = next(m.stride[0] for m in model.modules() if isinstance(m, nn.Conv2d))
    assert (h * w, fused.depth) == ((x.shape[2] // patch_size) ** 2, 2)
    query = fused.num_prefix_tokens + w + 2
    assert fused.num_prefix_tokens == expected.shape[-1] - h * w
    assert len(repr(fused)) < 200, "a REPL shows no numbers of the maps"
    for found in (untouched, fused):
        torch.testing.assert_close(found.rows[:, :, 0], expected[:, :, query], **VISIBLE)


# ---- what is computed, and what does not change ----


@pytest.mark.parametrize("shape", [(24, 24), (1, 2, 24, 24), (24,)], ids=str)
def test_a_bias_of_the_scores_is_added(shape, monkeypatch):
    monkeypatch.setattr(attention_weights, "CHUNK", 2 * 24 * 7)
    bias = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    model = Odd(lambda q: sdpa(q, attn_mask=bias.expand(24, 24) if bias.dim() == 1 else bias))
    with torch.no_grad():
        q = model.heads(image()[None])[0]
    weights = (q @ q.transpose(1, 2) / 4 + bias).softmax(-1).view(1, 2, 24, 24)
    found = study.attention_maps(model, image(), heads=1, queries=[(0, 1), (3, 0)])
    torch.testing.assert_close(found.rows[0, 0], weights[0, 1, [1, 18]], **VISIBLE)
    rollout = study.attention_rollout(model, image(), queries=(3, 0))
    torch.testing.assert_close(rollout.rows[0].double(), dense_rollout(weights)[18], **VISIBLE)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_and_shared_keys(kind, fused):
    """Both heads attend to the first head's keys."""
    mask = torch.rand(24, 24, generator=torch.Generator().manual_seed(0)) > 0.3
    given = mask if kind == "bool" else torch.zeros(24, 24).masked_fill(~mask, -torch.inf)

    def attend(q: Tensor) -> Tensor:
        if not fused:
            keys = q[:, :1].expand_as(q)
            return F.scaled_dot_product_attention(q, keys, keys, attn_mask=given)
        q = q.transpose(1, 2)
        return ops.attention(q, q[:, :, :1], q[:, :, :1], attn_mask=given).transpose(1, 2)

    model = Odd(attend)
    with torch.no_grad():
        q = model.heads(image()[None])[0]
    weights = (q @ q[:1].transpose(1, 2) / 4).masked_fill(~mask, -torch.inf).softmax(-1)
    found = study.attention_maps(model, image(), queries=[(0, 1), (3, 0)])
    torch.testing.assert_close(found.rows[0], weights[:, [1, 18]], **VISIBLE)


class Largest(TorchDispatchMode):
    """The largest number of elements of any result. It is outside of the study's own mode, and sees its tensors too."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize(
    "function",
    [study.attention_maps, study.attention_rollout, study.attention_distance],
    ids=["maps", "rollout", "distance"],
)
def test_no_matrix_of_all_weights(function, monkeypatch):
    monkeypatch.setattr(attention_weights, "CHUNK", 200_000)
    model = vit(img_size=256, depth=2)
    with Largest() as largest:
        function(model, image(256, 256))
    N = 1 + 2 + 32 * 32
    assert 3 * N * 48 <= largest.elements < N * N / 2  # of one head


def test_only_the_layers_asked_for_are_kept(monkeypatch):
    """Only their rows are computed, if they are known before the last layer."""
    computed: list[int] = []
    softmax = attention_weights.softmax
    monkeypatch.setattr(
        attention_weights, "softmax", lambda call, *rest: computed.append(call.layer) or softmax(call, *rest)
    )
    study.attention_maps(vit(), image(), layers=[2, 0])
    assert computed == [0, 2]


def test_evaluation_mode_and_no_gradient_and_both_restored():
    model = vit(attn_drop_rate=0.5, pos_drop_rate=0.5, drop_path_rate=0.5)
    expected = study.attention_maps(model, image()).rows
    model.train()
    model.blocks[1].attn.eval()
    before = {name: m.training for name, m in model.named_modules()}
    x = image().requires_grad_()
    found = study.attention_maps(model, x)
    assert torch.equal(found.rows, expected)
    assert not found.rows.requires_grad
    with pytest.raises(ValueError, match="heads must be"):
        study.attention_maps(model, x, heads=7)
    assert {name: m.training for name, m in model.named_modules()} == before
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_is_compiled_runs_as_what_it_was_compiled_from():
    model = vit(depth=1)
    expected = study.attention_maps(model, image()).rows
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(study.attention_maps(compiled, image()).rows, expected)
        with torch.no_grad():
            compiled(image()[None])  # from here on there is a graph


# ---- arguments ----


@pytest.mark.parametrize(
    ("layers", "heads", "queries"),
    [(1, 2, (0, 3)), (-1, -1, "cls"), ([-1, 0, -3], [2, 0], [(3, 5), "cls"]), (range(2, 0, -1), None, [[1, 1]])],
    ids=str,
)
def test_some_of_them_are_those_of_all(layers, heads, queries):
    model = vit()
    every = [(r, c) for r in range(4) for c in range(6)]
    everything = study.attention_maps(model, image(), queries=["cls", *every])
    found = study.attention_maps(model, image(), layers, heads, queries)
    assert all(number >= 0 for number in (*found.layers, *found.heads))
    numbers = [0 if q == "cls" else 1 + every.index(q) for q in found.queries]
    expected = everything.rows[list(found.layers)][:, list(found.heads)][:, :, numbers]
    torch.testing.assert_close(found.rows, expected, rtol=0.0, atol=1e-6)
    wanted = [layers] if isinstance(layers, int) else layers
    assert found.layers == tuple(layer % 3 for layer in wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 3}, r"layers must be in -3\.\.2, got 3"),
        ({"layers": []}, r"layers must be an integer, some integers, or None for all, got \[\]"),
        ({"heads": True}, r"heads must be .*got True"),
        ({"queries": "all"}, "queries must be \"cls\", .*got 'all'"),
        ({"queries": (4, 0)}, r"rows in 0\.\.3 and columns in 0\.\.5, got \(4, 0\)"),
        ({"queries": [(0, 1), (1, 2, 3)]}, r"queries must be .*got \(1, 2, 3\)"),
        ({"queries": []}, r"queries must be .*got \[\]"),
    ],
)
def test_what_the_model_has_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        study.attention_maps(vit(), image(), **arguments)


def test_images_that_are_not_one():
    with pytest.raises(ValueError, match=r"image must have shape .* got \(2, 3, 32, 48\)"):
        study.attention_maps(vit(), torch.zeros(2, 3, 32, 48))
    with pytest.raises(TypeError, match="image must be a tensor, got str"):
        study.attention_rollout(vit(), "cat.jpg")  # type: ignore[arg-type]


@pytest.mark.parametrize("registers", [0, 2])
def test_without_cls_the_patch_in_the_centre(registers):
    model = vit(class_token=False, reg_tokens=registers, global_pool="avg")
    found = study.attention_maps(model, image())
    assert (found.queries, found.num_prefix_tokens) == (((2, 3),), registers)
    with pytest.raises(ValueError, match=r'got "cls": VisionTransformer has no CLS'):
        study.attention_maps(model, image(), queries="cls")


# ---- attention that is not seen ----


def test_a_layer_that_computes_its_weights_itself_is_named():
    model = vit()
    model.blocks[1].attn.attn_drop.register_forward_hook(lambda *_: None)  # which wants the weights
    everything = study.attention_maps(vit(), image(), layers=[0, 2])
    torch.testing.assert_close(study.attention_maps(model, image(), layers=[0, -1]).rows, everything.rows, **VISIBLE)
    message = r"layer 1's attention is not seen: it computes 27 x 27 weights \(aten::_softmax\)"
    for layers in (1, None, [0, -2]):
        with pytest.raises(ValueError, match=message):
            study.attention_maps(model, image(), layers)
    with pytest.raises(ValueError, match=message):
        study.attention_rollout(model, image())


def within_windows(q: Tensor) -> Tensor:
    grid = q.transpose(1, 2).unflatten(1, GRID)
    return ops.attention_windows(torch.stack((grid, grid, grid), 3), (2, 3)).flatten(1, 2).transpose(1, 2)


def with_relative_positions(q: Tensor) -> Tensor:
    rows, columns = (q.new_zeros(q.shape[0], q.shape[2], q.shape[1], n) for n in GRID)
    q = q.transpose(1, 2)
    return ops.attention(q, q, q, relative=ops.Relative(rows, columns)).transpose(1, 2)


def with_relative_positions_in_windows(q: Tensor) -> Tensor:
    grid = q.transpose(1, 2).unflatten(1, GRID)
    relative = ops.Relative(*[grid.new_zeros(*grid.shape[:4], n) for n in (2, 3)])
    out = ops.attention_windows(torch.stack((grid, grid, grid), 3), (2, 3), relative=relative)
    return out.flatten(1, 2).transpose(1, 2)


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (lambda q: sdpa(q, is_causal=True), "it is causal"),
        (lambda q: ops.attention(q, q, q, is_causal=True, layout="bhnd"), "it is causal"),
        (lambda q: sdpa(q.unflatten(2, (2, 12))[0].transpose(0, 1)), "2 sequences of 12 tokens, as in windows"),
        (lambda q: sdpa(q[:, :, ::2]), "over 12 tokens, of an image of 4 x 6 patches"),
        (
            lambda q: ops.attention_varlen(*(q[0].transpose(0, 1),) * 3, torch.tensor([0, 10, 24])).transpose(0, 1),
            "sequences of several lengths",
        ),
        (within_windows, "it is within windows"),
        (with_relative_positions, "it has relative positions"),
        (with_relative_positions_in_windows, "it has relative positions"),
        (lambda q: (q @ q.transpose(2, 3)).softmax(-1), "computes 24 x 24 weights"),
        (lambda q: (q[0] @ q[0].transpose(1, 2)).softmax(-1), "computes 24 x 24 weights"),
    ],
    ids=[
        "causal", "causal op", "windows", "fewer tokens", "several lengths", "windows op", "relative",
        "relative in windows", "eager", "eager 3D",
    ],
)  # fmt: skip
def test_attention_of_other_kinds_is_named(attend, message):
    with pytest.raises(ValueError, match=f"layer 0's attention is not seen: .*{message}"):
        study.attention_maps(Odd(attend), image())


def test_layers_of_other_sizes_are_named():
    def attend(q: Tensor) -> Any:
        return [sdpa(t) for t in (q, torch.cat([q, q], 2), q[:, :1])]

    with pytest.raises(ValueError, match="layer 1's attention is not seen: it is over 48 tokens, where others"):
        study.attention_maps(Odd(attend), image())
    with pytest.raises(ValueError, match="layers have different numbers of heads"):
        study.attention_maps(Odd(attend), image(), layers=[0, 2])
    assert study.attention_maps(Odd(attend), image(), layers=[0, 2], heads=0).rows.shape == (2, 1, 1, 24)


def test_models_without_attention_or_patches():
    with pytest.raises(ValueError, match="no self-attention that is seen"):
        study.attention_maps(Odd(lambda q: q), image())
    model = Odd(sdpa)
    model.patches = nn.Conv2d(3, 32, 9, 8)  # patches that overlap
    with pytest.raises(ValueError, match="Odd has no grid of patches"):
        study.attention_maps(model, image())


# ---- rollout ----


@pytest.mark.parametrize(("kind", "chunk"), [("vit", 1), ("vit", 1 << 22), ("eva", 600)])
def test_rollout_is_its_definition(kind, chunk, monkeypatch):
    """With weights computed a row at a time, all at once, and some at a time."""
    monkeypatch.setattr(attention_weights, "CHUNK", chunk)
    ours, theirs = pair(kind)
    found = study.attention_rollout(ours, image(), queries=["cls", (2, 1)])
    expected = dense_rollout(materialised(theirs, image()))
    numbers = [0, found.num_prefix_tokens + 2 * 6 + 1]
    torch.testing.assert_close(found.rows.double(), expected[numbers], **VISIBLE)
    assert (found.queries, found.grid, found.patches.shape) == (("cls", (2, 1)), GRID, (2, *GRID))
