"""Weights that do not fit a model: one error lists all that is wrong, with a remedy; the model is unchanged."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import ONE_BLOCK, refused, state_dict
from torch import Tensor, nn

import fastvit
from fastvit import checkpoints
from fastvit.checkpoints import CheckpointError

safetensors = pytest.importorskip("safetensors.torch")


def test_one_error_lists_everything(tmp_path: Path) -> None:
    state = {**state_dict(), "norm.extra": torch.ones(2), "surprise": torch.ones(1), "cls_token": torch.ones(1, 1, 48)}
    state["norm.weight"] = torch.ones(32, dtype=torch.int64)
    del state["norm.bias"]
    safetensors.save_file(state, tmp_path / "model.safetensors")
    refused(
        tmp_path / "model.safetensors",
        r"model.safetensors \(timm\) does not fit",
        r"missing \(1\):\n    norm.bias\n",
        r"unexpected \(2\):\n    norm.extra\n    surprise\n",
        r"cls_token \(1, 1, 48\), the model's cls_token \(1, 1, 32\)",
        r"norm.weight \(32,\) torch.int64",
    )


def test_one_line_for_all_blocks() -> None:
    state = state_dict(depth=7, embed_dim=48, num_heads=3)
    for block in (0, 1, 2, 5):
        del state[f"blocks.{block}.norm1.weight"]
    refused(
        state,
        r"missing \(16\):\n    blocks.\{0-2,5\}.norm1.weight\n    blocks.\{0-5\}.ls1.gamma",
        r"unexpected \(12\):\n    blocks.6.norm1.weight\n",
        r"\n    blocks.\{0-5\}.mlp.fc1.bias \(96,\), the model's blocks.\{0-5\}.mlp.fc1.bias \(64,\)\n",
        depth=6,
        init_values=0.1,
    )
    many = {"patch_embed.proj.weight": torch.ones(2), **{f"blocks.{i}.{i}": torch.ones(2) for i in range(1300)}}
    refused(many, r"unexpected \(1300\):(\n.*){1000}\n    and 300 more\n")


@pytest.mark.parametrize(("front", "keys"), [("student.backbone.", ()), ("_orig_mod.net.", ("module", "model"))])
def test_a_prefix_is_named_with_the_remedy(front: str, keys: tuple[str, ...]) -> None:
    names = {f"{front}{key.replace('norm', '_orig_mod.norm')}": value for key, value in state_dict().items()}
    content: Any = {**names, "loss.weight": torch.ones(2)}
    for key in reversed(keys):
        content = {key: content, "epoch": 3}
    message = refused(content, r"names of timm after '.*'; with state_dict = .*, pass weights=")
    inner, remedy = re.findall(r"with state_dict = (.*), pass weights=(.*)$", message)[0]
    advised = eval(remedy, {"state_dict": eval(inner, {"weights": content})})
    checkpoints.load(fastvit.VisionTransformer(**ONE_BLOCK), advised)


def test_prefixes_of_several_models_and_of_another_one() -> None:
    """Only weights that fit are advised."""
    both = {f"{front}.{key}": value for front in ("teacher", "student") for key, value in state_dict().items()}
    refused(both, r"after 'teacher\.' and 'student\.'; with state_dict = weights, .*removeprefix\('teacher\.'\)")
    other = {f"teacher.{key}": value for key, value in state_dict(embed_dim=48, num_heads=3).items()}
    refused(both | other, r"names of timm after 'student\.'; with")
    message = refused(other | {"loss": torch.ones(2)}, r"weights, after 'teacher\.' \(timm\) does not fit the model:\n")
    assert "pass weights=" not in message


def test_positions_that_are_not_the_model_s_fixed_table() -> None:
    """Learnt ones, of the model's grid or of another: they would be lost. So would be those of another table."""
    for theirs in ({}, {"img_size": 24}, {"pos_embed": "sincos"}):
        message = r"pos_embed \(1, \d+, 32\) is of no patch grid the table of pos_embed='sincos2d'"
        refused(state_dict(**theirs), message, r"another shape or type \(1\)", pos_embed="sincos2d")
    refused(state_dict(pos_embed="none"), r"missing \(1\):\n    pos_embed$", pos_embed="sincos2d")


def test_foreign_names_are_reported_as_the_file_has_them() -> None:
    shapes = {
        "embeddings.cls_token": (1, 1, 32), "embeddings.patch_embeddings.projection.weight": (32, 3, 4, 4),
        "embeddings.position_embeddings": (1, 17, 32),
        "layers.0.attention.q_proj.weight": (32, 32), "layers.0.mlp.fc1.bias": (64,),
        "layernorm.gain": (32,), "layernorm.weight": (31,),
    }  # fmt: skip
    state = {key: torch.ones(shape) for key, shape in shapes.items()}
    missing = "(?s)missing.*attn.qkv.weight"
    message = refused(state, "Hugging Face ViT", "layernorm.gain", r"layernorm.weight \(31,\)", missing)
    assert "layers.0.attention.q_proj.weight" in message  # without k and v it has no place
    assert "fc1.bias" not in message.partition("unexpected")[2]


def test_heads_and_poolers() -> None:
    state, name = state_dict(), "vit_base_patch16_224"
    refused(state, r"num_classes=5 is the file's; drop_head=True", num_classes=7)
    headless = {key: value for key, value in state.items() if "head" not in key}
    refused(headless, r"missing \(2\):\n    head.weight\n    head.bias\n", "num_classes=0 is")
    fresh = fastvit.create_model(name, state, drop_head=True, **ONE_BLOCK)
    assert fresh.head.weight.std() > 0.01
    assert not torch.equal(fresh.head.weight, state["head.weight"])
    assert torch.equal(fresh.norm.weight, state["norm.weight"])
    assert isinstance(fastvit.create_model(name, state, **{**ONE_BLOCK, "num_classes": 0}).head, nn.Identity)
    pooler = {**state_dict(num_classes=0), "attn_pool.latent": torch.ones(2)}
    refused(pooler, "unexpected .1.:\n    attn_pool.latent", "drop_head=True leaves out", num_classes=0)
    checkpoints.load(fastvit.VisionTransformer(**{**ONE_BLOCK, "num_classes": 0}), pooler, drop_head=True)
    refused(state, "fc_norm=False", global_pool="avg")


def test_distilled_models() -> None:
    """Their weights fit models with a distillation token only, which have a second head."""
    distilled, name = fastvit.VisionTransformerDistilled(**ONE_BLOCK).state_dict(), "deit_tiny_distilled_patch16_224"
    refused(dict(distilled), r"unexpected \(3\):\n    dist_token\n", "the file has a distillation token, which")
    one_head = {key: value for key, value in distilled.items() if not key.startswith("head_dist")}
    for weights, messages in (
        (state_dict(), r"(?s)missing \(3\):\n    dist_token.*the file lacks a distillation token, which"),
        (one_head, r"(?s)missing \(2\):\n    head_dist.weight.*drop_head=True leaves out the file's one head"),
    ):
        with pytest.raises(CheckpointError, match=messages):
            fastvit.create_model(name, weights, **ONE_BLOCK)
    ours = fastvit.create_model(name, one_head, **ONE_BLOCK, drop_head=True)
    assert torch.equal(ours.dist_token, distilled["dist_token"])
    assert not torch.equal(ours.head.weight, distilled["head.weight"])


def test_misshapen_tensors_never_break_the_conversion() -> None:
    """Weights of every shape that a file may claim end in the one error, not in one of torch's."""
    dinov2 = {**state_dict(num_classes=0), "mask_token": torch.ones(1, 32), "register_tokens": torch.ones(1, 4, 32)}
    clip = {"class_embedding": torch.ones(32), "positional_embedding": torch.ones(17, 32), "proj": torch.ones(32, 5)}
    options = {"num_classes": 0, "reg_tokens": 4, "no_embed_class": True}
    for state, keys in ((dinov2, ("cls_token", "pos_embed", "register_tokens")), (clip, tuple(clip))):
        for key in keys:
            for shape in ((), (33,), (3, 2, 32), (1, 0, 32), (1, 3, 7)):
                # a number is no weight: a file without the weight that tells its library is not known
                message = "does not fit" if shape or key != "class_embedding" else "no key of a Vision Transformer"
                refused({**state, key: torch.ones(shape)}, message, **options)


class Packed(Tensor):
    pass


ONES = torch.ones(2)
NO_STATE_DICTS: list[tuple[Any, str]] = [
    ({}, "holds no state_dict"),
    ({"norm.weight": ONES, "name": "x"}, "'name': str"),
    ({"step": 3, "loss": torch.ones(())}, "holds no state_dict"),
    ({"norm.weight": ONES, 5: ONES}, "5: Tensor"),
    ({"\x1b[2J": ONES}, r"\\x1b"),  # not printed, because a terminal would obey
    ({"norm.weight": torch.ones(2, 2).to_sparse()}, "not a name with a dense tensor: 'norm.weight'"),
    ({"norm.weight": torch.ones(1).expand(1 << 40)}, "not a name with a dense tensor: 'norm.weight'"),
    ({"norm.weight": torch.empty(3, device="meta")}, "dense tensor: 'norm.weight'"),
    ({"norm.weight": ONES.as_subclass(Packed)}, "'norm.weight': Packed"),
    ({"conv1.weight": ONES}, "no key of a Vision Transformer that is known, but conv1.weight:\n  Hugging Face ViT"),
    ({f"layer{i}": ONES for i in range(400)}, "layer7 and 392 more:\n"),
    ({"blocks.0.a": ONES, "blocks.0._orig_mod.a": ONES}, "the same weight twice"),
    ({"mask_token": ONES, **state_dict(), "blocks.0.0.norm1.weight": ONES}, r"(?s)twice.*blocks.0.0.norm1.weight"),
    ({"state_dict": {"a": ONES}, "ema": {"a": ONES}}, r"several.*'ema'.* weights=weights\['state_dict'\], or save"),
]


@pytest.mark.parametrize(("content", "message"), NO_STATE_DICTS)
def test_what_is_no_state_dict(content: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(fastvit.VisionTransformer(**ONE_BLOCK), content)


def test_a_model_of_inference_mode() -> None:
    """Its tensors cannot change outside: none does, neither those that come first."""
    with torch.inference_mode():
        model = fastvit.VisionTransformer(**ONE_BLOCK)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = fastvit.VisionTransformer(**ONE_BLOCK).state_dict()
    with pytest.raises(ValueError, match="was made in"):
        checkpoints.load(model, state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    with torch.inference_mode():
        checkpoints.load(model, state)
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
