"""The whole model against the reference, and under what PyTorch does with models; fixed positions; the tiny ViT that
benchmarks/examples/worked_example.py computes. Against timm: test_families.py; compiled: test_compiled.py."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from models import randomised, step, twins
from oracle import inputs
from torch import Tensor
from torch.func import functional_call

from benchmarks.examples import worked_example
from fastvit import VisionTransformer, reference
from fastvit.blocks.recompute import ATTRIBUTE, Recompute, recompute_all
from fastvit.eva import Eva
from fastvit.study.sources.baselines import use_sdpa

TINY: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 96, "mlp_ratio": 2.0,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "registers": {"reg_tokens": 4, "no_embed_class": True, "init_values": 0.1},
    "registers_embedded": {"reg_tokens": 2, "qkv_bias": False, "qk_norm": True},
    "max": {"global_pool": "max", "fc_norm": False, "mlp_layer": "swiglu"},
    "avgmax": {"global_pool": "avgmax", "reg_tokens": 1, "mlp_layer": "swiglupacked"},
    "all_tokens_no_norm": {"global_pool": "", "final_norm": False, "num_classes": 0},
    "map_of_its_own_size": {
        "global_pool": "map", "reg_tokens": 2, "attn_pool_num_heads": 4, "attn_pool_mlp_ratio": 1.0,
    },
    "no_position": {"pos_embed": "none", "pre_norm": True, "act_layer": "quick_gelu"},
    "sincos": {"pos_embed": "sincos", "reg_tokens": 1},
    "sincos2d_dynamic": {
        "pos_embed": "sincos2d", "dynamic_img_size": True, "img_size": 12, "reg_tokens": 2, "no_embed_class": True,
    },
    "postnorm": {"block_fn": "postnorm", "final_norm": False, "init_values": 0.5},
    "rms_norm": {"norm_layer": "rmsnorm", "embed_norm_layer": "rmsnorm"},
    "non_square": {"img_size": (8, 20), "patch_size": (4, 2), "in_chans": 1},
}  # fmt: skip
GATED = {"swiglu": reference.SwiGLU, "swiglupacked": reference.SwiGLUPacked}
STATISTICS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


def image(model: VisionTransformer, batch: int = 2, **arguments: Any) -> Tensor:
    size = (16, 16) if model.dynamic_img_size else model.patch_embed.img_size
    shape = (batch, model.patch_embed.proj.in_channels, *size)
    return inputs("normal", *shape, **{"dtype": torch.float32, "device": "cpu", **arguments})


def models(**arguments: Any) -> tuple[VisionTransformer, reference.VisionTransformer]:
    """Ours and the reference with the same random parameters."""
    arguments = {**TINY, **arguments}
    plain = {**arguments, **({"mlp_layer": GATED[arguments["mlp_layer"]]} if "mlp_layer" in arguments else {})}
    return twins(VisionTransformer(**arguments), reference.VisionTransformer(**plain))


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_is_the_reference(variant: str, device: torch.device) -> None:
    """In float64; and with the same dtypes in bfloat16."""
    ours, eager = models(**VARIANTS[variant], device=device, dtype=torch.float64)
    x = image(ours, device=device, dtype=torch.float64)
    want = step(eager, x)
    torch.testing.assert_close(step(ours, x), want, rtol=1e-9, atol=1e-9)
    low, got = (step(model.bfloat16(), x.bfloat16()) for model in (eager, ours))
    assert {n: t.dtype for n, t in got.items()} == {n: t.dtype for n, t in low.items()}
    torch.testing.assert_close(got["output"].double(), want["output"], atol=0.1, rtol=0.1)


# ---- a citizen of PyTorch ----


def test_activation_checkpointing_changes_nothing() -> None:
    rates = {"drop_path_rate": 0.3, "attn_drop_rate": 0.2, "proj_drop_rate": 0.2}
    model = randomised(VisionTransformer(**TINY, **rates))
    x = image(model)
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        results.append(step(model, x))
    torch.testing.assert_close(*results, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", [VisionTransformer, Eva])
def test_less_memory_with_masks(kind: Any) -> None:
    """Checkpointed and fitted models, and the reference with and without SDPA, give the same outputs and gradients."""
    rope = {"use_rot_pos_emb": True} if kind is Eva else {}
    model = randomised(kind(**TINY, **rope)).double()
    checkpointed, fitted = copy.deepcopy(model), copy.deepcopy(model)
    checkpointed.set_grad_checkpointing()
    recompute_all(fitted.blocks[0])
    setattr(fitted.blocks[1], ATTRIBUTE, Recompute("all", "all"))
    others = [checkpointed, fitted]
    if kind is VisionTransformer:
        plain = reference.VisionTransformer(**TINY).double()
        plain.load_state_dict(model.state_dict())
        plain.set_grad_checkpointing()
        others += [plain, use_sdpa(copy.deepcopy(plain))]
    x = image(model, dtype=torch.float64)
    for masks in ({"attn_mask": torch.randn(2, 17, 17, dtype=torch.float64)}, {"is_causal": True}):
        results = []
        for one in (model, *others):
            one.forward = functools.partial(type(one).forward, one, **masks)
            results.append(step(one, x))
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-11)


def test_train_and_eval() -> None:
    """Each rate takes effect in training, is off in evaluation, and is reproducible under a seed."""
    for rate in ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"):
        model = randomised(VisionTransformer(**TINY, **{rate: 0.5}))
        x = image(model)
        first, again, other = (step(model, x, seed=seed)["output"] for seed in (0, 0, 1))
        assert torch.equal(first, again), rate
        assert not torch.equal(first, other), rate
        model.eval()
        assert torch.equal(model(x), model(x)), rate


def test_uint8_images() -> None:
    """NumPy's numbers, lists and tensors are taken as arguments, too."""
    model, eager = models(**STATISTICS)
    x = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    mean, std = (torch.tensor(t).view(1, 3, 1, 1) for t in STATISTICS.values())
    expected = model((x / 255 - mean) / std)
    sizes = {"img_size": [16, 16], "patch_size": np.int64(4), "embed_dim": np.int32(32), "mlp_ratio": np.float32(2)}
    statistics = {"mean": np.array([0.5, 0.4, 0.3]), "std": torch.tensor([0.2, 0.3, 0.4])}
    same = VisionTransformer(**{**TINY, **sizes, **statistics}, init_values=0, fc_norm=None)
    same.load_state_dict(model.state_dict())
    for other in (model, eager, same):
        torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-5)


# ---- fixed positions ----


WIDE: dict[str, Any] = {**TINY, "img_size": (16, 24), "depth": 1}
KINDS = ("sincos", "sincos2d")


@pytest.mark.parametrize("kind", KINDS)
def test_another_grid_has_a_table_of_its_own(kind: str) -> None:
    model = VisionTransformer(**WIDE, pos_embed=kind, dynamic_img_size=True)
    other = VisionTransformer(**{**WIDE, "img_size": (32, 40)}, pos_embed=kind)
    other.load_state_dict({**model.state_dict(), "pos_embed": other.pos_embed})
    image, before = torch.randn(2, 3, 32, 40), model.pos_embed.clone()
    want = other(image)
    torch.testing.assert_close(model(image), want)
    model.set_input_size((32, 40))
    assert torch.equal(model.pos_embed, other.pos_embed)
    assert "pos_embed" in dict(model.named_buffers())
    assert torch.equal(model.state_dict()["pos_embed"], other.pos_embed)
    assert torch.equal(model(image), want)
    other.set_input_size((16, 24))
    assert torch.equal(other.pos_embed, before)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_learns_the_table(kind: str) -> None:
    """Not even after all of a model was set to train; initialising a model again restores it."""
    model = randomised(VisionTransformer(**WIDE, pos_embed=kind)).requires_grad_(True)
    before = model.pos_embed.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model(torch.randn(2, 3, 16, 24)).square().mean().backward()
    optimizer.step()
    assert torch.equal(model.pos_embed, before)
    assert model.cls_token.grad.any()
    model = VisionTransformer(**WIDE, pos_embed=kind, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    model.pos_embed.fill_(torch.nan)
    model.init_weights("skip", needs_reset=False)
    assert torch.equal(model.pos_embed, before.bfloat16())


def test_parameters_of_another_dtype() -> None:
    """FSDP2's mixed precision casts parameters for a call, and no buffers."""
    model = randomised(VisionTransformer(**WIDE, pos_embed="sincos2d"))
    low = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    image = torch.randn(2, 3, 16, 24).bfloat16()
    assert torch.equal(functional_call(model, low, (image,)), model.bfloat16()(image))


# ---- worked by hand ----


def test_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong number is named and makes the exit status 1."""
    monkeypatch.setattr("sys.argv", ["worked_example.py"])
    assert worked_example.main() == 0
    assert "\nbird   0.7773      0.7773\n" in capsys.readouterr().out
    expected = worked_example.EXAMPLE["expected"]
    monkeypatch.setitem(expected, "mlp", (torch.tensor(expected["mlp"], dtype=torch.float64) + 2e-6).tolist())
    assert worked_example.main() == 1
    assert capsys.readouterr().out.endswith("off by more than 1e-06: MLP of the attended tokens\n")
