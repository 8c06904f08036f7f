"""Lists of images of several sizes: each image has the results and the gradients that it has alone."""

import copy
import pickle
import random

import pytest
import torch
from models import randomised
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit import VisionTransformer
from fastvit.distilled import VisionTransformerDistilled
from fastvit.eva import Eva
from fastvit.modules import positions
from fastvit.modules.patch_embed import PatchEmbed
from fastvit.modules.rope import RotaryEmbeddingCat

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
ROPE = {"use_rot_pos_emb": True, "num_reg_tokens": 1}
STATISTICS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.25)}
HALVES = {"rope_type": "dinov3", "rope_rotate_half": True, "use_abs_pos_emb": False, "qkv_fused": False}
MODELS = {
    "token": lambda: VisionTransformer(**SIZES, qk_norm=True, init_values=0.5),
    "avg": lambda: VisionTransformer(**SIZES, global_pool="avg", reg_tokens=2, block_fn="postnorm"),
    "max": lambda: VisionTransformer(**SIZES, global_pool="max", pos_embed="sincos2d"),
    "avgmax": lambda: VisionTransformer(**SIZES, global_pool="avgmax", no_embed_class=True, pre_norm=True),
    "map": lambda: VisionTransformer(**SIZES, global_pool="map", class_token=False),
    "all tokens": lambda: VisionTransformer(**SIZES, global_pool="", **STATISTICS),
    "eva": lambda: Eva(**SIZES, **ROPE, swiglu_mlp=True),
    "dinov3": lambda: Eva(**SIZES, **ROPE, **HALVES, global_pool="map"),
    "distilled": lambda: VisionTransformerDistilled(**SIZES),
}


def model_of(name):
    return randomised(MODELS[name](), 0.05).eval()


def images(dtype=torch.float32, seed=1):
    """Images of many aspect ratios (NaFlex), between batches of global and local crops (DINO)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, 32, 32), (3, 16, 40), (3, 8, 8), (4, 3, 16, 16), (3, 64, 8), (2, 3, 16, 40)]
    random.Random(seed).shuffle(shapes)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [(t * 60 + 128).clamp(0, 255).to(dtype) if dtype is torch.uint8 else t.to(dtype) for t in drawn]


def alone(model, function, image):
    """function(batch) on an image of any size."""
    embed = copy.copy(model.patch_embed)
    embed.strict_img_size = False
    whole = copy.copy(model)
    whole._modules = {**model._modules, "patch_embed": embed}
    y = getattr(whole, function)(image if image.dim() == 4 else image[None])
    return y if image.dim() == 4 else y[0]


def gradients(model, outputs):
    weights = torch.linspace(-1, 1, SIZES["num_classes"], dtype=torch.float64)
    loss = sum((y * weights).square().sum() for y in outputs)
    return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


@pytest.mark.parametrize("name", MODELS)
def test_an_image_has_the_results_that_it_has_alone(name):
    """Gradients are the sums of those of each image."""
    model = model_of(name).double()
    for several in (images(torch.uint8 if name == "all tokens" else torch.float64), images(torch.float64)[:1]):
        got, features = model(several), model.forward_features(several)
        each = [alone(model, "forward", image) for image in several]
        want = each if model.global_pool == "" else list(torch.cat([y.view(-1, y.shape[-1]) for y in each]))
        torch.testing.assert_close(list(got), want, rtol=1e-6, atol=1e-6)  # positions are interpolated in float32
        torch.testing.assert_close(features, [alone(model, "forward_features", image) for image in several])
        expected = gradients(model, each)
        largest = max(gradient.abs().max().item() for gradient in expected)
        torch.testing.assert_close(gradients(model, got), expected, rtol=1e-6, atol=1e-8 * largest)


def test_dense_features_by_entry():
    model, several = model_of("eva"), [torch.randn(3, 16, 40), torch.randn(2, 3, 24, 8)]
    tokens, pairs = model.forward_intermediates(several, indices=[0, 1], return_prefix_tokens=True)
    assert [t.shape for t in tokens] == [(12, 48), (2, 5, 48)]
    ((first, prefix), _) = pairs
    assert [t.shape for t in first] == [(48, 2, 5), (2, 48, 3, 1)]
    assert [t.shape for t in prefix] == [(2, 48), (2, 2, 48)]
    (layer,) = model.get_intermediate_layers(several, return_class_token=True)
    for i, image in enumerate(several):
        want = alone(model, "forward_features", image)
        torch.testing.assert_close(tokens[i], want, atol=3e-6, rtol=0)
        torch.testing.assert_close(layer[0][i], want[..., 2:, :], atol=3e-6, rtol=0)
        torch.testing.assert_close(layer[1][i], want[..., 0, :], atol=3e-6, rtol=0)


def test_one_graph_for_all_lists_and_copies_with_their_own_weights():
    torch._dynamo.reset()
    model = model_of("avgmax").train()
    del model.blocks[1]
    plain = copy.deepcopy(model)
    model.compile_lists(fullgraph=True, backend="eager")
    counters.clear()
    for several in (images(), images(seed=2)[1:]):
        got = model(several)
        got.square().sum().backward()
        torch.testing.assert_close(got, plain(several))
    assert counters["stats"]["unique_graphs"] == 1
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with torch.no_grad():
        model.head.weight.zero_()
        assert not torch.allclose(model(several), got)
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(copied(several), got)


# ---- what is remembered ----


def test_tables_are_made_once_and_positions_always():
    """Where sequences end, and rotary tables, depend on no parameter; learnt positions may change at any time."""
    eva, vit = model_of("eva"), model_of("token")
    several = [torch.randn(3, 16, 40), torch.randn(3, 8, 8)]
    first, again = (eva._embedded_list(several).cu_seqlens for _ in range(2))
    assert first is again
    assert first.tolist() == [0, 12, 15]
    tables = [eva.rope.of_image((2, 5), 2, torch.device("cpu")) for _ in range(2)]
    assert tables[0] is tables[1]
    with torch.no_grad():
        before = vit(several)
        vit.pos_embed.data.mul_(2.0)  # as an average of weights does, without the tensor's version
        after = vit(several)
        want = [alone(vit, "forward", image) for image in several]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, torch.stack(want), atol=3e-6, rtol=0)


def test_rotary_tables_depend_on_known_attributes():
    rope = RotaryEmbeddingCat(16)
    rope.notes = ["an attribute that cannot be a key"]
    first = rope.of_image((2, 3), 1, torch.device("cpu"))
    rope.temperature = 20.0
    assert not torch.equal(rope.of_image((2, 3), 1, torch.device("cpu")), first)


def test_the_last_used_tables_are_kept():
    made = {}
    for key in ("first", *range(positions._MOST - 1), "first", "one more", "first"):
        positions.remembered(key, torch.device("cpu"), lambda: torch.zeros(1), made)
    assert made.keys() == {"first", *range(1, positions._MOST - 1), "one more"}


def test_fake_tensors_after_real_ones():
    """A mode of fake tensors takes no kept table."""
    made, make = {}, lambda: torch.zeros(4)
    kept = positions.remembered("key", torch.device("cpu"), make, made)
    with FakeTensorMode():
        assert type(positions.remembered("key", torch.device("cpu"), make, made)) is not torch.Tensor
    assert made["key"] is kept


def test_means_are_in_float32_under_autocast():
    model, tokens = model_of("avg"), torch.randn(12, SIZES["embed_dim"])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        pooled = model._pool_packed(tokens, torch.tensor([0, 12]), 12)
    torch.testing.assert_close(pooled[0], tokens[3:].mean(0), atol=1e-6, rtol=1e-6)


# ---- parts of the user's ----


class Other(nn.Identity):
    """A part of the user's, which takes a batch only."""

    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, x):
        return x


@pytest.mark.parametrize("method", ["forward_features", "pool", "forward_head"])
def test_a_replaced_method_is_refused(method):
    """A method of a subclass, and one of an instance."""
    kind = type("Other", (VisionTransformer,), {method: lambda self, x: x})
    given = VisionTransformer(**SIZES)
    setattr(given, method, lambda x: x)
    for model, name in ((kind(**SIZES), "Other"), (given, "VisionTransformer")):
        with pytest.raises(TypeError, match=f"a list of images needs the {method} of fastvit, which {name} replaces"):
            model([torch.ones(3, 8, 8)])


class OtherEmbed(PatchEmbed):
    def forward(self, x, pos_embed=None, prefix=None):
        return super().forward(x, pos_embed, prefix)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("attn_pool", "attn_pool .* must take cu_seqlens: the forward of .*Other does not"),
        ("patch_embed", "patch_embed .* must take any_size: .*OtherEmbed does not"),
        ("blocks.0", r"blocks\[0\] .* must take cu_seqlens: .*Other does not"),
        ("blocks.0.drop_path1", "stochastic depth must take cu_seqlens: .*Other does not"),
    ],
)
def test_a_part_that_takes_no_lists_is_refused(path, message):
    model, several = model_of("map"), [torch.ones(3, 8, 8)]
    want = model(several)
    other = OtherEmbed(32, 8, embed_dim=SIZES["embed_dim"]) if path == "patch_embed" else Other()
    model.set_submodule(path, other.eval())
    if path == "blocks.0.drop_path1":  # which does nothing in evaluation
        torch.testing.assert_close(model(several), want)
        model.train()
    with pytest.raises(TypeError, match=message):
        model(several)


def test_hooks_and_dropout_of_attention_pooling_run():
    model, several, seen = model_of("map"), [torch.randn(2, 3, 16, 40), torch.randn(3, 8, 8)], []
    want = model(several)
    model.attn_pool.register_forward_hook(lambda _, __, y: seen.append(tuple(y.shape)))
    hook = model.attn_pool.attn_drop.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape)))
    torch.testing.assert_close(model(several), want)
    assert seen == [(1, 3, 3, 21), (3, 48)]
    hook.remove()
    model.attn_pool.attn_drop.train().p = 0.5
    assert not torch.allclose(model(several), want)
