"""Lists of images of several sizes: each image has the results and the gradients that it has alone."""

import copy
import functools
import pickle
import random

import pytest
import torch
from models import randomised
from oracle import GRADIENT, assert_as_accurate
from torch import nn
from torch._dynamo.utils import counters

import fastvit
from fastvit import VisionTransformer
from fastvit.distilled import VisionTransformerDistilled
from fastvit.eva import Eva
from fastvit.modules import positions
from fastvit.modules.patch_embed import PatchEmbed
from fastvit.modules.pooling import AttentionPoolLatent
from fastvit.rope import RotaryEmbeddingCat

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
ROPE = {"use_rot_pos_emb": True, "num_reg_tokens": 1}
BYTES = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.25)}
MODELS = {
    "token": lambda: VisionTransformer(**SIZES, qk_norm=True, init_values=0.5),
    "avg": lambda: VisionTransformer(**SIZES, global_pool="avg", reg_tokens=2, block_fn="postnorm"),
    "max": lambda: VisionTransformer(**SIZES, global_pool="max", pos_embed="sincos2d"),
    "avgmax": lambda: VisionTransformer(**SIZES, global_pool="avgmax", no_embed_class=True, pre_norm=True),
    "map": lambda: VisionTransformer(**SIZES, global_pool="map", class_token=False),
    "map, 12 channels a head, which no op takes": lambda: VisionTransformer(
        **SIZES, global_pool="map", attn_pool_num_heads=4
    ),
    "all tokens, bytes": lambda: VisionTransformer(**SIZES, global_pool="", **BYTES),
    "eva": lambda: Eva(**SIZES, **ROPE, swiglu_mlp=True),
    "dinov3": lambda: Eva(
        **SIZES, **ROPE, rope_type="dinov3", rope_rotate_half=True, use_abs_pos_emb=False, qkv_fused=False,
        global_pool="map",
    ),
    "distilled": lambda: VisionTransformerDistilled(**SIZES),
}  # fmt: skip


def model_of(name):
    return randomised(MODELS[name](), 0.05).eval()


def patches(rng, longest):
    """Draw a grid of at most `longest` patches, of any aspect ratio."""
    h = rng.randint(1, longest)
    return h, rng.randint(1, longest // h)


def draw_list(rng, dtype=torch.float32):
    """Draw a mix: images of many aspect ratios whose sequences have a limit (NaFlex), or two batches of global and
    local crops (DINO), or both."""
    kind, images = rng.choice(("naflex", "dino", "both")), []
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    if kind != "naflex":
        batch = rng.randint(1, 2)
        images += [draw(2 * batch, 3, 32, 32), draw(8 * batch, 3, 16, 16)]
    if kind != "dino":
        images += [draw(3, 8 * h, 8 * w) for h, w in (patches(rng, 24) for _ in range(rng.randint(1, 6)))]
    rng.shuffle(images)
    return [(t * 60 + 128).clamp(0, 255).to(dtype) for t in images] if dtype is torch.uint8 else images


def alone(model, function, image):
    """function(batch) on an image of any size."""
    embed = copy.copy(model.patch_embed)
    embed.strict_img_size = False
    whole = copy.copy(model)
    whole._modules = {**model._modules, "patch_embed": embed}
    y = getattr(whole, function)(image if image.dim() == 4 else image[None])
    return y if image.dim() == 4 else y[0]


def check_lists(name, count, seed=0):
    """Compare random lists with their images alone; return the largest difference."""
    rng, model, worst = random.Random(seed), model_of(name), 0.0
    for _ in range(count):
        images = draw_list(rng, torch.uint8 if "bytes" in name else torch.float32)
        with torch.no_grad():
            got, features = model(images), model.forward_features(images)
            want = [alone(model, "forward", image) for image in images]
            wanted_features = [alone(model, "forward_features", image) for image in images]
        if model.global_pool != "":
            want = list(torch.cat([y.view(-1, y.shape[-1]) for y in want]))
        for a, b in zip((*got, *features), (*want, *wanted_features), strict=True):
            assert a.shape == b.shape
            worst = max(worst, float((a - b).abs().max()))
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_an_image_has_the_results_that_it_has_alone(name):
    assert check_lists(name, 7) < 3e-6


@pytest.mark.parametrize("name", ["avg", "map", "max"])
def test_autocast(name):
    """Means are of the widened tokens, as for a batch."""
    model, images = model_of(name), [torch.randn(2, 3, 16, 40), torch.randn(3, 24, 8)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, features = model(images), model.forward_features(images)
        want = torch.cat([alone(model, "forward", image).view(-1, SIZES["num_classes"]) for image in images])
        pooled = [model._pool_packed(t.view(-1, t.shape[-1]), torch.tensor([0, t.shape[-2]]), 99) for t in features[1:]]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    if name == "avg":
        torch.testing.assert_close(pooled[0][0], features[1][3:].mean(0), atol=1e-6, rtol=1e-6)


def gradients(model, images, run):
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = torch.linspace(-1, 1, SIZES["num_classes"]).to(parameters[0])
    loss = sum((y * weights).square().sum() for y in run(images))
    return dict(zip([n for n, _ in model.named_parameters()], torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("name", ["token", "avgmax", "eva", "dinov3"])
def test_gradients_are_the_sums_of_those_of_each_image(name):
    model, rng = model_of(name), random.Random(3)
    images = [*draw_list(rng), torch.randn(3, 16, 40), torch.randn(2, 3, 16, 40)]
    one_by_one = lambda model: lambda images: [alone(model, "forward", image) for image in images]  # noqa: E731
    exact = copy.deepcopy(model).double()
    wanted = gradients(exact, [image.double() for image in images], one_by_one(exact))
    eager = gradients(model, images, one_by_one(model))
    for name, got in gradients(model, images, model).items():
        assert_as_accurate(got, eager[name], wanted[name], factor=GRADIENT, what=name)


def test_dense_features_by_entry():
    model = model_of("eva")
    images = [torch.randn(3, 16, 40), torch.randn(2, 3, 24, 8)]
    tokens, pairs = model.forward_intermediates(images, indices=[0, 1], return_prefix_tokens=True)
    assert [t.shape for t in tokens] == [(12, 48), (2, 5, 48)]
    ((first, prefix), _) = pairs
    assert [t.shape for t in first] == [(48, 2, 5), (2, 48, 3, 1)]
    assert [t.shape for t in prefix] == [(2, 48), (2, 2, 48)]
    (layer,) = model.get_intermediate_layers(images, return_class_token=True)
    for i, image in enumerate(images):
        want = alone(model, "forward_features", image)
        torch.testing.assert_close(tokens[i], want, atol=3e-6, rtol=0)
        torch.testing.assert_close(layer[0][i], want[..., 2:, :], atol=3e-6, rtol=0)
        torch.testing.assert_close(layer[1][i], want[..., 0, :], atol=3e-6, rtol=0)


def test_recomputed_blocks_have_the_same_gradients():
    images = draw_list(random.Random(5))
    model = model_of("eva").train()
    want = gradients(model, images, model)
    model.set_grad_checkpointing()
    checkpointed = gradients(model, images, model)
    model.set_grad_checkpointing(False)
    for block in model.blocks:
        fastvit.blocks.recompute.recompute_all(block)
    whole = gradients(model, images, model)
    for name, gradient in want.items():
        assert torch.equal(checkpointed[name], gradient)
        assert torch.equal(whole[name], gradient)


def test_one_graph_for_all_lists():
    torch._dynamo.reset()
    model = model_of("avgmax").train()
    del model.blocks[1]
    plain = copy.deepcopy(model)
    model.compile_lists(fullgraph=True, backend="aot_eager")
    rng = random.Random(1)
    counters.clear()
    for _ in range(3):
        images = draw_list(rng)
        got = model(images)
        got.square().sum().backward()
        torch.testing.assert_close(got, plain(images))
    assert counters["stats"]["unique_graphs"] == 1


def test_copies_and_pickles_of_a_compiled_model_have_their_own_weights():
    model, images = model_of("avg"), [torch.randn(2, 3, 16, 40), torch.randn(3, 8, 8)]
    model.compile_lists(backend="eager")
    want = model(images)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model.head.weight.zero_()
    assert not torch.allclose(model(images), want)
    for other in copies:
        torch.testing.assert_close(other(images), want)


def test_tables_are_made_once_and_positions_always():
    """Where sequences end, and rotary tables, depend on no parameter; learnt positions may change at any time."""
    eva, vit = model_of("eva"), model_of("token")
    images = [torch.randn(3, 16, 40), torch.randn(3, 8, 8)]
    first, again = (eva._embedded_list(images)[0].cu_seqlens for _ in range(2))
    assert first is again
    assert first.tolist() == [0, 12, 15]
    tables = [eva.rope.of_image((2, 5), 2, torch.device("cpu")) for _ in range(2)]
    assert tables[0] is tables[1]
    with torch.no_grad():
        before = vit(images)
        vit.pos_embed.data.mul_(2.0)  # as an average of weights does, without the tensor's version
        after = vit(images)
        want = [alone(vit, "forward", image) for image in images]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, torch.stack(want), atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        ([], ValueError, "images must not be an empty list"),
        ([torch.ones(3, 8, 8), 3.0], TypeError, r"images\[1\] must be a tensor, got float"),
        ([torch.nested.nested_tensor([torch.ones(3, 8, 8)])], TypeError, r"images\[0\] must be a dense tensor, got"),
        ([torch.ones(8, 8)], ValueError, r"images\[0\] must have shape \(C, H, W\) or \(B, C, H, W\)"),
        ([torch.ones(0, 3, 8, 8)], ValueError, r"images\[0\] must have shape .*, got \(0, 3, 8, 8\)"),
        ([torch.ones(3, 8, 8), torch.ones(3, 12, 8)], ValueError, r"images\[1\]: patch_size \(8, 8\) must divide"),
        ([torch.ones(3, 8, 8), torch.ones(4, 8, 8)], ValueError, r"images\[1\]: image must"),
        ([torch.ones(3, 8, 8), torch.ones(3, 8, 8).half()], TypeError, r"images\[1\] must be like images\[0\]"),
        ([torch.ones(3, 8, 8, device="meta"), torch.ones(3, 8, 8)], TypeError, r"images\[1\] must be like images\[0\]"),
    ],
)
def test_a_wrong_entry_is_named(images, error, message):
    with pytest.raises(error, match=message):
        model_of("token")(images)


def test_a_list_takes_no_mask():
    model, images = model_of("token"), [torch.ones(3, 8, 8)]
    for call in (model, model.forward_features, model.forward_intermediates):
        with pytest.raises(ValueError, match="attn_mask must be None and is_causal False with a list of images"):
            call(images, is_causal=True)


class OtherPool(AttentionPoolLatent):
    def forward(self, x, attn_mask=None):
        return super().forward(x, attn_mask)


class OtherEmbed(PatchEmbed):
    def forward(self, x, pos_embed=None, prefix=None):
        return super().forward(x, pos_embed, prefix)


class OtherBlock(nn.Identity):
    def __init__(self, *_, **__):
        super().__init__()


class OtherDropPath(nn.Module):
    def forward(self, x):
        return x


def replaced(method):
    """A model that overrides a method, and one that was given another."""
    kind = type("Other", (VisionTransformer,), {method: lambda self, x: x})
    given = VisionTransformer(**SIZES)
    setattr(given, method, lambda x: x)
    return kind(**SIZES), given


@pytest.mark.parametrize("method", ["forward_features", "pool", "forward_head"])
def test_a_replaced_method_is_refused(method):
    for model, name in zip(replaced(method), ("Other", "VisionTransformer"), strict=True):
        with pytest.raises(TypeError, match=f"a list of images needs the {method} of fastvit, which {name} replaces"):
            model([torch.ones(3, 8, 8)])


def test_a_part_that_takes_no_lists_is_refused():
    images = [torch.ones(3, 8, 8)]
    pooled, embedded = model_of("map"), model_of("token")
    pooled.attn_pool = OtherPool(SIZES["embed_dim"], 3)
    embedded.patch_embed = OtherEmbed(32, 8, embed_dim=SIZES["embed_dim"])
    for model, message in (
        (pooled, r"attn_pool .* must take cu_seqlens: the forward of .*OtherPool does not"),
        (embedded, r"patch_embed .* must take any_size: .*OtherEmbed does not"),
        (
            VisionTransformer(**SIZES, block_fn=OtherBlock),
            r"blocks\[0\] .* must take cu_seqlens: .*OtherBlock does not",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            model(images)
    dropping = model_of("token")
    want = dropping(images)
    dropping.blocks[0].drop_path1 = OtherDropPath().eval()
    torch.testing.assert_close(dropping(images), want)
    with pytest.raises(TypeError, match=r"stochastic depth must take cu_seqlens: .*OtherDropPath does not"):
        dropping.train()(images)


def test_hooks_and_dropout_of_attention_pooling_run():
    model, images, seen = model_of("map"), [torch.randn(2, 3, 16, 40), torch.randn(3, 8, 8)], []
    want = model(images)
    model.attn_pool.register_forward_hook(lambda _, __, y: seen.append(tuple(y.shape)))
    hook = model.attn_pool.attn_drop.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape)))
    torch.testing.assert_close(model(images), want)
    assert seen == [(1, 3, 3, 21), (3, 48)]
    hook.remove()
    model.attn_pool.attn_drop.train().p = 0.5
    assert not torch.allclose(model(images), want)


def test_a_default_device_moves_nothing():
    model, images = model_of("avgmax"), [torch.randn(3, 16, 24), torch.randn(3, 8, 8)]
    with torch.device("meta"):
        got = model(images)
    torch.testing.assert_close(got, model(images))


def test_rotary_tables_depend_on_known_attributes():
    rope = RotaryEmbeddingCat(16)
    rope.notes = ["an attribute that cannot be a key"]
    first = rope.of_image((2, 3), 1, torch.device("cpu"))
    rope.temperature = 20.0
    assert not torch.equal(rope.of_image((2, 3), 1, torch.device("cpu")), first)


def test_the_last_used_tables_are_kept():
    made, device = {}, torch.device("cpu")
    get = functools.partial(positions.remembered, device=device, make=lambda: torch.zeros(1), made=made)
    first = get("first")
    for key in range(positions._MOST - 1):
        get(key)
    assert get("first") is first
    get("one more")
    assert get("first") is first
    assert 0 not in made
    assert len(made) == positions._MOST
