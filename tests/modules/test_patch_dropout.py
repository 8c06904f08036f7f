"""patch_drop_rate: which patches stay, against timm under one seed, and what is saved."""

from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import assert_same_step, close, randomised, step, twins
from torch import Tensor, nn

import fastvit
from fastvit import VisionTransformer, reference
from fastvit.eva import Eva
from fastvit.modules.patch_dropout import PatchDropout
from fastvit.reference.eva import Eva as ReferenceEva
from fastvit.study.memory.peak import saved_bytes

TINY: dict[str, Any] = {
    "img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, "mlp_ratio": 2.0,
}  # fmt: skip


def seeded(module: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return module(x)


@pytest.mark.parametrize(("n", "rate", "kept"), [(64, 0.5, 32), (10, 0.75, 2), (7, 0.5, 3), (3, 0.9, 1), (10, 0.1, 9)])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_each_sample_keeps_a_subset_of_its_own(n: int, rate: float, kept: int, prefix: int) -> None:
    drop = PatchDropout(rate, prefix)
    x = torch.arange(8 * (prefix + n) * 2.0).view(8, prefix + n, 2)
    y = seeded(drop, x)
    assert y.shape == (8, prefix + kept, 2)
    assert torch.equal(y[:, :prefix], x[:, :prefix])
    rows = [[x[b].tolist().index(token) for token in y[b].tolist()] for b in range(8)]
    assert all(len(set(of_sample)) == prefix + kept for of_sample in rows)
    assert n < 7 or len({tuple(sorted(of_sample)) for of_sample in rows}) > 1
    assert torch.equal(seeded(drop, x), y)
    assert not torch.equal(seeded(drop, x, 1), y)
    assert drop.eval()(x) is x
    assert not list(drop.parameters())
    theirs = import_timm().layers.PatchDropout(rate, prefix)
    assert torch.equal(seeded(theirs, x), y)


def test_every_patch_is_kept_as_often() -> None:
    y = seeded(PatchDropout(0.75, 1), torch.arange(17.0)[None, :, None].expand(4000, -1, -1))
    counts = y[:, 1:].flatten().long().bincount(minlength=17)[1:]
    assert (counts - 1000).abs().max() < 150  # 5.5 standard deviations


@pytest.mark.parametrize(
    "arguments",
    [{}, {"class_token": False, "global_pool": "avg"}, {"reg_tokens": 2, "pre_norm": True}, {"global_pool": "map"}],
    ids=str,
)
def test_models_agree_with_timm_under_one_seed(arguments: dict[str, Any]) -> None:
    arguments = {"img_size": 64, "depth": 2, "num_classes": 5, "patch_drop_rate": 0.6, **arguments}
    ours, theirs = (lib.create_model("vit_tiny_patch16_224", **arguments) for lib in (fastvit, import_timm()))
    twins(ours, theirs)
    assert ours.patch_drop.prob == theirs.patch_drop.prob
    x = torch.randn(2, 3, 64, 64)
    assert_same_step(ours, theirs, x)
    for model in (ours, theirs):
        model.eval()
    assert close(ours(x), theirs(x))


def test_gradients_are_the_references(backend: str, device: torch.device) -> None:
    """On both backends; the image has none where the patch was dropped."""
    arguments = {**TINY, "patch_drop_rate": 0.75, "device": device}
    ours, eager = twins(VisionTransformer(**arguments), reference.VisionTransformer(**arguments))
    x = torch.randn(3, 3, 32, 32, device=device)
    got, want = step(ours, x), step(eager, x)
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
    touched = got["dx"].unfold(2, 4, 4).unfold(3, 4, 4).abs().amax(dim=(1, 4, 5)) > 0
    assert touched.flatten(1).sum(dim=1).tolist() == [16, 16, 16]
    assert not torch.equal(touched[0], touched[1])


def test_blocks_save_in_proportion() -> None:
    x = torch.randn(2, 3, 32, 32)
    saved = {}
    for depth in (1, 3):
        for rate in (0.0, 0.5):
            model = VisionTransformer(**{**TINY, "depth": depth}, patch_drop_rate=rate, class_token=False,
                                      global_pool="avg")  # fmt: skip
            saved[depth, rate] = saved_bytes(lambda model=model: model(x), list(model.parameters()))
    whole, half = (saved[3, rate] - saved[1, rate] for rate in (0.0, 0.5))
    assert half == pytest.approx(whole / 2, rel=0.01)


def test_checkpointing_and_compilation_change_nothing() -> None:
    model = randomised(VisionTransformer(**TINY, patch_drop_rate=0.5))
    x = torch.randn(2, 3, 32, 32)
    want = step(model, x)
    model.set_grad_checkpointing()
    for key, got in step(model, x).items():
        assert torch.equal(got, want[key]), key
    model.set_grad_checkpointing(False)
    torch._dynamo.reset()
    assert_same_step(torch.compile(model, fullgraph=True, backend="aot_eager"), model, x)


def test_eva_with_learnt_positions() -> None:
    arguments = {**TINY, "patch_drop_rate": 0.5, "num_reg_tokens": 2}
    ours, eager = Eva(**arguments), ReferenceEva(**arguments)
    twins(ours, eager)
    x = torch.randn(2, 3, 32, 32)
    assert_same_step(ours, eager, x)
    theirs = import_timm().models.eva.Eva(**arguments)
    theirs.load_state_dict(ours.state_dict())
    assert close(seeded(ours, x), seeded(theirs, x))


def test_position_dropout_comes_first() -> None:
    """As in timm: the same draws leave the same numbers."""
    arguments = {"img_size": 64, "depth": 1, "num_classes": 5, "patch_drop_rate": 0.5, "pos_drop_rate": 0.3}
    ours, theirs = (lib.create_model("vit_tiny_patch16_224", **arguments) for lib in (fastvit, import_timm()))
    twins(ours, theirs)
    x = torch.randn(2, 3, 64, 64)
    assert close(seeded(ours, x), seeded(theirs, x))


def test_rotary_positions_are_refused() -> None:
    message = r"^patch_drop_rate must be 0 with use_rot_pos_emb=True, got 0.5: "
    with pytest.raises(ValueError, match=message):
        fastvit.create_model("vit_small_patch16_dinov3", patch_drop_rate=0.5, device="meta")
    assert isinstance(fastvit.create_model("vit_small_patch16_dinov3", device="meta").patch_drop, nn.Identity)


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_rates_that_are_none(rate: float) -> None:
    for make in (lambda: PatchDropout(rate), lambda: VisionTransformer(**TINY, patch_drop_rate=rate),
                 lambda: Eva(**TINY, patch_drop_rate=rate)):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^(prob|patch_drop_rate) must be in \[0, 1\), got {rate}"):
            make()
