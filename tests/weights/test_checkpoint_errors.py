"""Files that must be refused: the error says why and names the file, the model is unchanged, and no code has run."""

import importlib.util
import os
import pickle
import re
import struct
import traceback
import zipfile
from pathlib import Path
from typing import Any

import checkpoint_models
import pytest
import torch
from torch import Tensor, nn

import fastvit
from fastvit import checkpoints
from fastvit.checkpoints import CheckpointError
from fastvit.weights import files as weight_files

safetensors = pytest.importorskip("safetensors.torch")

SMALL: dict[str, Any] = {**checkpoint_models.SMALL, "depth": 1, "num_classes": 5}


def state_dict(**changes: Any) -> dict[str, Tensor]:
    return dict(fastvit.VisionTransformer(**{**SMALL, **changes}).state_dict())


def refused(weights: Any, *messages: str, **arguments: Any) -> str:
    """Asserts that loading raises with all of these patterns and changes nothing; the message."""
    model = fastvit.VisionTransformer(**{**SMALL, **arguments})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(model, weights)
    for message in messages:
        assert re.search(message, str(caught.value)), str(caught.value)
    if not isinstance(weights, dict):
        assert str(weights) in str(caught.value)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    return str(caught.value)


class Command:
    """Unpickled as a program would unpickle it, this makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


# ---- damaged and hostile files ----


def test_escape_sequences_are_not_printed(tmp_path: Path) -> None:
    """Neither of keys nor of the class that a file asks for, in the message or in the traceback."""
    evil, tensor, path = "\x1b]0;title\x07\x1b[2J\u202e", torch.zeros(1), tmp_path / "model.pth"
    path.write_bytes(b"cevil\x1b[2J\nname\n(tR.")
    files = [{evil: tensor}, {evil: 1}, {f"{evil}.patch_embed.proj.weight": tensor}, {f"dist_token{evil}": tensor}]
    for weights in (*files, {**state_dict(), f"blocks.0.{evil}": tensor}, path):
        with pytest.raises(CheckpointError, match=r"\\x1b") as caught:
            checkpoints.load(fastvit.VisionTransformer(**SMALL), weights)
        text = "".join(traceback.format_exception(caught.value))
        assert all(map(str.isprintable, text.splitlines())), text


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
def test_files_that_inflate_without_measure(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, path = tmp_path / f"plain{suffix}", tmp_path / f"deflated{suffix}"
    torch.save({"a": torch.zeros(1 << 18)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert torch.equal(checkpoints.read(path)["a"], torch.zeros(1 << 18))
    monkeypatch.setattr(weight_files, "INFLATED", 1 << 20)  # of 1 GiB
    monkeypatch.setattr(torch, "load", None)
    refused(path, r"would inflate to 1,04\d,\d{3} bytes, and at most 1,048,576 are")
    with zipfile.ZipFile(plain, "a") as archive:  # not compressed, but there five times
        archive.filelist += 4 * archive.filelist
        archive.writestr("end", "")
    refused(plain, "would inflate to 5,")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin"])
def test_damaged_files(suffix: str, tmp_path: Path) -> None:
    whole = tmp_path / f"whole{suffix}"
    (safetensors.save_file if suffix == ".safetensors" else torch.save)(state_dict(), whole)
    content = whole.read_bytes()
    path = tmp_path / f"damaged{suffix}"
    for length in (0, 1, 7, 9, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(path, "empty" if length == 0 else "damaged|asks for")
    for noise in (b"\x00" * 64, b"\xff" * 64, b"not weights at all, but a page of HTML", bytes(range(256)) * 8):
        path.write_bytes(noise)
        refused(path, "damaged|asks for")


def test_hostile_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def write(header: bytes, length: int | None = None, data: bytes = b"\x00" * 16) -> None:
        path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)

    write(b"{}", length=1 << 62)
    refused(path, "damaged")
    for header in (
        b"[" * 4096,
        b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1600]}}',
        b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[9],"data_offsets":[7,16]}}',
        b'{"a":{"dtype":"X99","shape":[4],"data_offsets":[0,16]}}',
    ):
        write(header)
        refused(path, "damaged")
    write(b"{}", data=b"")
    refused(path, "holds no state_dict")


@pytest.mark.parametrize("raw", [False, True], ids=["torch.save", "pickle"])
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin"])
def test_no_code_runs(suffix: str, raw: bool, tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / f"model{suffix}"
    for content in (Command(made), {"state_dict": state_dict(), "hook": Command(made)}):
        if raw:
            path.write_bytes(pickle.dumps(content))
        else:
            torch.save(content, path)
        refused(path, "no code is run" if raw else r"asks for \S*mkdir; only tensors are read, and no code is run")
        assert not made.exists()
    with open(path, "wb") as file:  # the test's own teeth: unpickled carelessly, it does run
        pickle.dump(Command(made), file)
    pickle.loads(path.read_bytes())
    assert made.exists()


def test_a_program_is_no_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    refused(path, "TorchScript")
    torch.save(nn.Linear(2, 2), path)
    refused(path, r"asks for torch\.nn\.modules\.linear\.Linear")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "holds no state_dict but a list"),
        (torch.ones(2), "holds no state_dict but a Tensor"),
        ({}, "holds no state_dict"),
        ({"state_dict": {}}, "holds no state_dict"),
        ({"norm.weight": torch.ones(2), "step": 3, "name": "x"}, "'step': int, 'name': str"),
        ({"norm.weight": torch.ones(2), 5: torch.ones(2)}, "5: Tensor"),
        ({"norm.weight": torch.ones(2, 2).to_sparse()}, "not a name with a dense tensor: 'norm.weight'"),
        ({"norm.weight": torch.ones(1).expand(1 << 40)}, "not a name with a dense tensor: 'norm.weight'"),
        ({"norm.weight": torch.empty(3, device="meta")}, "not a name with a dense tensor: 'norm.weight'"),
        (
            {"conv1.weight": torch.ones(2), "fc.bias": torch.ones(2)},
            "no key of a Vision Transformer that is known, but conv1.weight, fc.bias:\n  torchvision: conv_proj.weight",
        ),
        ({f"layer{i}": torch.ones(2) for i in range(400)}, "layer7 and 392 more:\n"),
        ({f"value{i}": i for i in range(400)}, "'value7': int and 392 more$"),
        (
            {"state_dict": {"a": torch.ones(1)}, "state_dict_ema": {"a": torch.ones(1)}},
            "several.*'state_dict_ema'.*read.path",
        ),
    ],
)
def test_files_that_are_no_state_dict(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "model.pth")
    refused(tmp_path / "model.pth", message)


def test_tensors_that_are_not_plain_are_refused() -> None:
    class Packed(Tensor):
        pass

    state = state_dict()
    refused({**state, "norm.weight": state["norm.weight"].as_subclass(Packed)}, "'norm.weight': Packed")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.pth"):
        checkpoints.read(tmp_path / "absent.pth")
    (tmp_path / "folder.pth").mkdir()
    refused(tmp_path / "folder.pth", "is not a file")
    refused(tmp_path / "model.npz", r"\.safetensors, \.pth, \.pt, \.bin")
    safetensors.save_file(state_dict(), tmp_path / "model.safetensors")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "safetensors" else find(name, *a))
    with pytest.raises(ImportError, match=r"fastvit\[weights\]"):
        checkpoints.read(tmp_path / "model.safetensors")


# ---- weights that do not fit ----


def test_one_error_lists_everything(tmp_path: Path) -> None:
    state = state_dict()
    del state["norm.bias"], state["blocks.0.mlp.fc2.weight"]
    state |= {"norm.extra": torch.ones(2), "blocks.1.norm1.weight": torch.ones(32), "surprise": torch.ones(1)}
    state |= {"cls_token": torch.ones(1, 1, 48), "norm.weight": torch.ones(32, dtype=torch.int64)}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    refused(
        tmp_path / "model.safetensors",
        r"model.safetensors \(timm\) does not fit",
        r"missing \(2\):\n    blocks.0.mlp.fc2.weight\n    norm.bias\n",
        r"unexpected \(3\):\n",
        *(f"\n    {key}\n" for key in ("norm.extra", "blocks.1.norm1.weight", "surprise")),
        r"cls_token \(1, 1, 48\), the model's cls_token \(1, 1, 32\)",
        r"norm.weight \(32,\) torch.int64",
    )


def test_one_line_for_all_blocks() -> None:
    state = state_dict(depth=7, embed_dim=48, num_heads=3)
    for block in (0, 1, 2, 5):
        del state[f"blocks.{block}.norm1.weight"]
    message = refused(
        state,
        r"missing \(16\):\n    blocks.\{0-2,5\}.norm1.weight\n    blocks.\{0-5\}.ls1.gamma",
        r"unexpected \(12\):\n    blocks.6.norm1.weight\n",
        r"\n    blocks.\{0-5\}.mlp.fc1.bias \(96,\), the model's blocks.\{0-5\}.mlp.fc1.bias \(64,\)\n",
        depth=6,
        init_values=0.1,
    )
    assert max(map(len, message.splitlines())) < 120
    assert len(message.splitlines()) < 45
    assert "drop_head" not in message  # the number of classes is the same
    theirs = {"conv_proj.weight": torch.ones(32, 3, 4, 4)}
    theirs |= {f"encoder.layers.encoder_layer_{i}.mlp.3.weight": torch.ones(32, 63) for i in range(5)}
    refused(theirs, r"\n    encoder.layers.encoder_layer_\{0-4\}.mlp.3.weight \(32, 63\), the model's", depth=5)


@pytest.mark.parametrize("front", ["model.", "encoder.", "student.backbone."])
def test_a_prefix_is_named_with_the_remedy(front: str) -> None:
    state_dict_of_file = {f"{front}{key}": value for key, value in state_dict().items()}
    state_dict_of_file["loss.weight"] = torch.ones(2)
    message = refused(state_dict_of_file, f"names of timm after '{front}'; with its state_dict, pass weights=")
    remedy = eval(message.partition("weights=")[2], {"state_dict": state_dict_of_file})
    checkpoints.load(fastvit.VisionTransformer(**SMALL), remedy)


def test_mae() -> None:
    """Its encoder is a ViT, and the decoder is left out. DINOv2 has a mask token too."""
    state = state_dict(num_classes=0)
    decoder = ("mask_token", "decoder_embed.weight", "decoder_pos_embed", "decoder_blocks.0.mlp.fc1.weight")
    decoder += ("decoder_norm.bias", "decoder_pred.weight")
    pretrained = {**state, **{key: torch.ones(1, 1, 16) for key in decoder}}
    model = fastvit.VisionTransformer(**{**SMALL, "num_classes": 0})
    checkpoints.load(model, pretrained)
    assert torch.equal(model.blocks[0].attn.qkv.weight, state["blocks.0.attn.qkv.weight"])
    message = refused(pretrained, "Meta's MAE with its decoder", r"missing \(2\)")
    assert "DINOv2" not in message


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


def test_heads() -> None:
    state = state_dict()
    refused(state, r"num_classes=5 is the file's; drop_head=True", num_classes=7)
    headless = {key: value for key, value in state.items() if "head" not in key}
    refused(headless, r"missing \(2\):\n    head.weight\n    head.bias\n", "num_classes=0 is")
    fresh = fastvit.create_model("vit_base_patch16_224", state, drop_head=True, **{**SMALL, "num_classes": 7})
    assert fresh.head.weight.shape == (7, 32)
    assert fresh.head.weight.std() > 0.01
    assert torch.equal(fresh.norm.weight, state["norm.weight"])
    same = fastvit.create_model("vit_base_patch16_224", state, drop_head=True, **SMALL)
    assert not torch.equal(same.head.weight, state["head.weight"])
    none = fastvit.create_model("vit_base_patch16_224", state, **{**SMALL, "num_classes": 0})
    assert isinstance(none.head, nn.Identity)
    with pytest.raises(ValueError, match="drop_head=True needs weights"):
        fastvit.create_model("vit_base_patch16_224", drop_head=True, **SMALL)


def test_poolers_are_left_out_on_request_only() -> None:
    for extra in ("attn_pool.latent", "attn_pool.mlp.fc1.weight"):
        state = {**state_dict(num_classes=0), extra: torch.ones(2)}
        refused(state, f"unexpected .1.:\n    {extra}", "drop_head=True leaves out", num_classes=0)
        checkpoints.load(fastvit.VisionTransformer(**{**SMALL, "num_classes": 0}), state, drop_head=True)
    refused(state_dict(), "fc_norm=False", global_pool="avg")


def test_distilled_models() -> None:
    """Their weights fit models with a distillation token only, which have a second head."""
    distilled, name = fastvit.VisionTransformerDistilled(**SMALL).state_dict(), "deit_tiny_distilled_patch16_224"
    message = refused(
        dict(distilled), r"unexpected \(3\):\n    dist_token\n", "the file has a distillation token, which"
    )
    assert "drop_head" not in message
    one_head = {key: value for key, value in distilled.items() if not key.startswith("head_dist")}
    for weights, messages in {
        "plain": (state_dict(), r"(?s)missing \(3\):\n    dist_token.*the file lacks a distillation token, which"),
        "one head": (
            one_head,
            r"(?s)missing \(2\):\n    head_dist.weight.*drop_head=True leaves out the file's one head",
        ),
    }.values():
        with pytest.raises(CheckpointError, match=messages):
            fastvit.create_model(name, weights, **SMALL)
    ours = fastvit.create_model(name, one_head, **SMALL, drop_head=True)
    assert torch.equal(ours.dist_token, distilled["dist_token"])
    assert not torch.equal(ours.head.weight, distilled["head.weight"])
    headless = fastvit.create_model(name, dict(distilled), **{**SMALL, "num_classes": 0})
    assert isinstance(headless.head_dist, nn.Identity)


def test_the_same_weight_twice() -> None:
    state = {"mask_token": torch.ones(1, 32), **state_dict()}
    state |= {k.replace("blocks.0.", "blocks.0.0."): v for k, v in state.items()}
    refused(state, r"(?s)twice.*blocks.0.norm1.weight.*blocks.0.0.norm1.weight")


def test_misshapen_tensors_never_break_the_conversion() -> None:
    """Every weight of every shape that a file may claim ends in the one error, not in one of torch's."""
    dinov2 = {**state_dict(num_classes=0), "mask_token": torch.ones(1, 32), "register_tokens": torch.ones(1, 4, 32)}
    clip = {"class_embedding": torch.ones(32), "positional_embedding": torch.ones(17, 32), "proj": torch.ones(32, 5)}
    options = {"num_classes": 0, "reg_tokens": 4, "no_embed_class": True}
    for state, keys in ((dinov2, ("cls_token", "pos_embed", "register_tokens")), (clip, tuple(clip))):
        for key in keys:
            for shape in ((), (0,), (33,), (3, 2, 32), (1, 0, 32), (1, 3, 7), (2, 2, 2, 2), (1, 17, 32, 1)):
                refused({**state, key: torch.ones(shape)}, "does not fit", **options)


def test_the_meta_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device must not be 'meta'"):
        fastvit.create_model("vit_base_patch16_224", state_dict(), device="meta", **SMALL)
