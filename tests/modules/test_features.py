"""Dense features: `forward_intermediates` and `get_intermediate_layers` against timm and DINOv2's definition."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import close, randomised, twins
from torch import Tensor

import fastvit
from fastvit import VisionTransformer
from fastvit.eva import Eva

TINY_TIMM = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"embed_dim": 64, "depth": 4, "num_heads": 2, "num_classes": 5}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {  # name, arguments, size of the image
    "cls": (TINY_TIMM, {"img_size": 64}, (64, 64)),
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 56}, (56, 56)),
    "no_cls": (TINY_TIMM, {"img_size": 48, "class_token": False, "global_pool": "avg"}, (48, 48)),
    "norm_pre": (TINY_TIMM, {"img_size": 64, "pre_norm": True}, (64, 64)),
    "non_square": (TINY_TIMM, {"img_size": (32, 80)}, (32, 80)),
    "dynamic": (TINY_TIMM, {"img_size": 64, "dynamic_img_size": True}, (48, 96)),
    "map": ("vit_base_patch16_siglip_224", {"img_size": 64}, (64, 64)),
    "distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 64}, (64, 64)),
    "eva": ("eva02_tiny_patch14_224", {"img_size": (28, 56)}, (28, 56)),
    "dinov3": ("vit_small_patch16_dinov3", {}, (32, 48)),
}
every_model = pytest.mark.parametrize("case", MODELS)
ASKED: list[dict[str, Any]] = [
    {},
    {"indices": 2, "norm": True},
    {"indices": [2, 0], "return_prefix_tokens": True},
    {"indices": (-1, 1), "output_fmt": "NLC", "stop_early": True, "intermediates_only": True},
    {"indices": [1], "output_fmt": "NLC", "stop_early": True, "norm": True, "return_prefix_tokens": True},
]


def with_timm(case: str) -> tuple[Any, Any, Tensor]:
    """Ours and timm's with the same parameters, and an image."""
    timm = import_timm()
    name, arguments, size = MODELS[case]
    arguments = {**SMALL, **arguments}
    ours, theirs = (library.create_model(name, **arguments).eval() for library in (fastvit, timm))
    return *twins(ours, theirs), torch.randn(2, 3, *size)


def assert_same(got: Any, want: Any) -> None:
    """Check for one structure with close tensors; those with a grid are contiguous."""
    assert type(got) is type(want)
    if isinstance(want, Tensor):
        assert got.is_contiguous() or got.dim() < 4
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_same(got[key], want[key])
    else:
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)


@every_model
@torch.no_grad()
def test_intermediates_are_timms(case: str) -> None:
    ours, theirs, image = with_timm(case)
    for asked in ASKED:
        if case == "eva" or not (asked.get("return_prefix_tokens") and not theirs.num_prefix_tokens):
            assert_same(ours.forward_intermediates(image, **asked), theirs.forward_intermediates(image, **asked))
    if not isinstance(ours, Eva):  # timm's has no dict
        for asked in ({}, {"return_prefix_tokens": True}, {"intermediates_only": True, "norm": True}):
            asked = {"indices": 2, "output_dict": True, **asked}
            assert_same(ours.forward_intermediates(image, **asked), theirs.forward_intermediates(image, **asked))


@every_model
@torch.no_grad()
def test_layers_are_timms(case: str) -> None:
    """In a tuple, and with timm's default of norm."""
    ours, theirs, image = with_timm(case)
    for asked in ({}, {"n": [0, 2], "reshape": True}, {"n": 2, "return_prefix_tokens": True}):
        if isinstance(ours, Eva):  # timm's has forward_intermediates alone
            want = theirs.forward_intermediates(
                image,
                asked.get("n", 1),
                asked.get("return_prefix_tokens", False),
                intermediates_only=True,
                output_fmt="NCHW" if asked.get("reshape") else "NLC",
            )
        else:
            want = theirs.get_intermediate_layers(image, **asked)
        assert_same(ours.get_intermediate_layers(image, **asked, norm=False), tuple(want))


@pytest.mark.parametrize("case", ["cls", "registers"])
@torch.no_grad()
def test_layers_as_dinov2_calls_them(case: str) -> None:
    """Meta's evaluations, and depth and segmentation heads: after `norm`, with CLS alone whatever the registers."""
    ours, theirs, image = with_timm(case)
    for n, reshape, more in ((1, False, {}), (4, False, {}), ([0, 2], True, {}), (2, True, {"norm": False})):
        options = {"norm": True, **more, "reshape": reshape, "return_prefix_tokens": True}
        pairs = theirs.get_intermediate_layers(image, n, **options)
        assert_same(ours.get_intermediate_layers(image, n, reshape, **more), tuple(patches for patches, _ in pairs))
        with_cls = ours.get_intermediate_layers(image, n, reshape, **more, return_class_token=True)
        assert_same(with_cls, tuple((patches, prefix[:, 0]) for patches, prefix in pairs))
    (patches,) = ours.get_intermediate_layers(image)
    assert torch.equal(patches, ours.get_intermediate_layers(image, 1, norm=True)[0])


def test_an_accelerated_timm_model_has_its_own() -> None:
    _, theirs, image = with_timm("registers")
    want = theirs.forward_intermediates(image, 2)
    fastvit.accelerate(theirs)
    assert_same(theirs.forward_intermediates(image, 2), want)


# ---- training ----


@pytest.mark.parametrize("case", ["cls", "dinov3"])
def test_gradients_are_timms_with_and_without_checkpointing(case: str) -> None:
    ours, theirs, image = with_timm(case)
    results = []
    for model, checkpointing in ((theirs, False), (ours, False), (ours, True)):
        model.train().set_grad_checkpointing(checkpointing)
        final, kept = model.forward_intermediates(image, [0, 2], norm=True)
        loss = final.square().mean() + sum((i + 1) * y.square().mean() for i, y in enumerate(kept))
        parameters = {n: p for n, p in model.named_parameters() if not n.startswith(("head", "rope"))}
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        results.append(dict(zip(parameters, gradients, strict=True)))
    for key, want in results[0].items():
        assert close(results[1][key], want), key
        assert torch.equal(results[2][key], results[1][key]), key


def test_stop_early_runs_no_block_in_vain() -> None:
    model = VisionTransformer(16, 4, embed_dim=32, depth=3, num_heads=2)
    ran: list[int] = []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    image = torch.randn(1, 3, 16, 16)
    final, (y,) = model.forward_intermediates(image, [1], output_fmt="NLC", stop_early=True, norm=True)
    assert torch.equal(final[:, 1:], y)
    model.get_intermediate_layers(image, [0])
    model.forward_intermediates(image, [0])
    assert ran == [0, 1, 0, 0, 1, 2]


@pytest.mark.parametrize("case", ["registers", "dinov3"])
def test_compile_fullgraph(case: str) -> None:
    name, arguments, size = MODELS[case]
    model = randomised(fastvit.create_model(name, **{**SMALL, "depth": 2, **arguments})).eval()
    image = torch.randn(2, 3, *size)
    torch._dynamo.reset()

    def features(x: Tensor) -> Any:
        return model.forward_intermediates(x, [0, -1], return_prefix_tokens=True), model.get_intermediate_layers(x)

    assert_same(torch.compile(features, fullgraph=True, backend="aot_eager")(image), features(image))


# ---- pruning ----


@pytest.mark.parametrize("case", ["map", "dinov3"])
@torch.no_grad()
def test_pruning_is_timms(case: str) -> None:
    for options in ({}, {"indices": [1, -2]}, {"indices": 1, "prune_norm": True}, {"prune_head": False}):
        ours, theirs, image = with_timm(case)
        assert ours.prune_intermediate_layers(**options) == theirs.prune_intermediate_layers(**options)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert_same(ours.forward_features(image), theirs.forward_features(image))
        assert close(ours(image), theirs(image))


@pytest.mark.parametrize("options", [{"out_indices": (0, -2)}, {"norm": True}, {"prune": False}], ids=str)
@pytest.mark.parametrize("case", ["registers", "dinov3"])
def test_timms_feature_extractor_takes_models(case: str, options: dict[str, Any]) -> None:
    *models, image = with_timm(case)
    from timm.models._features import FeatureGetterNet

    ours, theirs = (FeatureGetterNet(model, **options) for model in models)
    for key in ("channels", "reduction", "module_name"):
        assert getattr(ours.feature_info, key)() == getattr(theirs.feature_info, key)()
    assert_same(ours(image), theirs(image))


# ---- errors ----


def without_cls() -> VisionTransformer:
    return VisionTransformer(32, 8, **SMALL, class_token=False, global_pool="avg", reg_tokens=1)


BLOCKS = "a number of last blocks from 1 to 4, or blocks from -4 to 3"


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, f"indices must be {BLOCKS}, got 5", lambda m, x: m.forward_intermediates(x, 5)),
        (ValueError, f"indices must be {BLOCKS}, got []", lambda m, x: m.forward_intermediates(x, [])),
        (ValueError, f"indices must be {BLOCKS}, got [0, 4]", lambda m, x: m.forward_intermediates(x, [0, 4])),
        (TypeError, f"indices must be {BLOCKS}, got 'all'", lambda m, x: m.forward_intermediates(x, "all")),
        (TypeError, f"indices must be {BLOCKS}, got [1.0]", lambda m, x: m.forward_intermediates(x, [1.0])),
        (ValueError, "output_fmt must be one of ('NCHW', 'NLC'), got 'NHWC'",
         lambda m, x: m.forward_intermediates(x, output_fmt="NHWC")),
        (TypeError, "norm must be True or False, got 'yes'", lambda m, x: m.forward_intermediates(x, norm="yes")),
        (ValueError, f"n must be {BLOCKS}, got (-5,)", lambda m, x: m.get_intermediate_layers(x, (-5,))),
        (ValueError, "return_class_token and return_prefix_tokens must not both be True",
         lambda m, x: m.get_intermediate_layers(x, return_class_token=True, return_prefix_tokens=True)),
        (ValueError, f"indices must be {BLOCKS}, got 9", lambda m, x: m.prune_intermediate_layers(9)),
        (ValueError, "image must have shape (B, C, H, W) with C = 3", lambda m, x: m.forward_intermediates(x[0])),
        (ValueError, "image must have the size (H, W) = (32, 32), got (32, 16)",
         lambda m, x: m.get_intermediate_layers(x[..., :16])),
        (ValueError, "return_class_token must be False for a model with class_token=False",
         lambda _, x: without_cls().get_intermediate_layers(x, return_class_token=True)),
        # the arguments after `reshape`, whose order differs between libraries
        (TypeError, "Backbone.get_intermediate_layers() takes from 2 to 4 positional arguments",
         lambda m, x: m.get_intermediate_layers(x, 1, False, True)),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], message: str, call: Callable[[Any, Tensor], Any]) -> None:
    model = VisionTransformer(32, 8, **SMALL)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call(model, torch.ones(1, 3, 32, 32))
    assert len(model.blocks) == 4
