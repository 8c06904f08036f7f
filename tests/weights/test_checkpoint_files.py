"""Files that must be refused: the error says why and names the file, the model is unchanged, and no code has run."""

import importlib.util
import json
import os
import pickle
import struct
import traceback
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import ONE_BLOCK, refused, state_dict
from torch import Tensor, nn

import fastvit
from fastvit import checkpoints
from fastvit.checkpoints import CheckpointError
from fastvit.weights import files as weight_files

safetensors = pytest.importorskip("safetensors.torch")


class Command:
    """Unpickled as a program would unpickle it, this makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_escape_sequences_are_not_printed(tmp_path: Path) -> None:
    """Neither of keys nor of the class that a file asks for, in the message or in the traceback."""
    evil, tensor, path = "\x1b]0;title\x07\x1b[2J\u202e", torch.zeros(1), tmp_path / "model.pth"
    path.write_bytes(b"cevil\x1b[2J\nname\n(tR.")
    files = [{evil: tensor}, {evil: 1}, {f"dist_token{evil}": tensor}]
    files += [{evil: tensor, f"{evil}.patch_embed.proj.weight": tensor}]
    for weights in (*files, {**state_dict(), f"blocks.0.{evil}": tensor}, path):
        with pytest.raises(CheckpointError, match=r"\\x1b") as caught:
            checkpoints.load(fastvit.VisionTransformer(**ONE_BLOCK), weights)
        text = "".join(traceback.format_exception(caught.value))
        assert all(map(str.isprintable, text.splitlines())), text


def test_files_that_inflate_without_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, path = tmp_path / "plain.pth", tmp_path / "deflated.pth"
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


@pytest.mark.parametrize(
    "save", [safetensors.save_file, torch.save, partial(torch.save, _use_new_zipfile_serialization=False)]
)
def test_damaged_files(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(state_dict(), path)
    content = path.read_bytes()
    for length in (0, 1, 7, 9, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(path, "empty" if length == 0 else "damaged" if length > 8 else "damaged|but it begins with b'")


OTHER_FILES = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0": "a Git LFS pointer: run git lfs pull",
    b"\n<!DOCTYPE html>": "a page of HTML or XML",
    b"\x1f\x8b\x08\0\0\0\0\0\0\3": "compressed by gzip, ",
    b"model.pth".ljust(257, b"\0") + b"ustar\x0000": "a tar archive",
    b"\x81\xa6params\x85": "msgpack, as Flax writes it",
    b"\x89HDF\r\n\x1a\n": "HDF5",
    b"\x00" * 64: r"begins with b'\\x00",
    b"\xff" * 64: r"begins with b'\\xff",
    b"not weights": "begins with b'not weights'",
    b'{"a": {"b": 1}}': "is no index of shards",
    b"[" * 99: r"begins with b'\[",
    b'{"weight_map": {"a": ".."}}': "is no index of shards",
    b'{"weight_map":' + b"[" * 99_999: "is no index of shards",
}


@pytest.mark.parametrize("content", OTHER_FILES)
def test_other_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(content)
    refused(path, OTHER_FILES[content])


def test_a_zip_archive_of_other_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as archive:
        archive.writestr("cls.npy", b"")
    refused(tmp_path / "model.npz", r"no data\.pkl, but cls\.npy$")


@pytest.mark.parametrize("kind", ["zip", "pickle", "safetensors", "json"])
def test_files_with_too_many_names(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes minutes, however little they weigh. The values of tensors do not count."""
    path, limit = tmp_path / "model", 1 << 11
    for count in (1, 99):
        tensors = {f"name{i}": torch.ones(2 * limit // count) for i in range(count)}
        if kind == "json":
            path.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.bin")}))
            torch.save(tensors, tmp_path / "model.bin")
        elif kind == "safetensors":
            safetensors.save_file(tensors, path)
        else:
            torch.save(tensors, path, _use_new_zipfile_serialization=kind == "zip")
        assert checkpoints.read(path).keys() == tensors.keys()
        with monkeypatch.context() as patch:
            patch.setattr(weight_files, "LISTING", limit)
            if count > 1:
                refused(path, "more than 2,048 bytes of names")
            else:
                assert torch.equal(checkpoints.read(path)["name0"], tensors["name0"])


def test_hostile_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def write(header: bytes, length: int | None = None, data: bytes = b"\x00" * 16) -> None:
        path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)

    write(b"{}", length=1 << 31)
    refused(path, "damaged")
    for header in (
        b'{"a":' + b"[" * 4096,
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
def test_no_code_runs(raw: bool, tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "model.pth"
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
        ({"state_dict": {}}, "is no state_dict"),
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
        ({"patch_embed.proj.weight": torch.ones(2), "." * 500_000: torch.ones(2)}, "does not fit"),
        ({"patch_embed.proj.weight": torch.ones(2), f"blocks.{'9' * 5000}.norm1": torch.ones(2)}, "does not fit"),
        (
            {"patch_embed.proj.weight": torch.ones(2), **{f"blocks.{i}.{i}": torch.ones(2) for i in range(1300)}},
            r"unexpected \(1300\):(\n.*){1000}\n    and 300 more\n",
        ),
        ({"blocks.0.a": torch.ones(2), "blocks.0._orig_mod.a": torch.ones(2)}, "the same weight twice"),
        ({f"value{i}": i for i in range(400)}, "'value7': int and 392 more$"),
        (
            {"state_dict": {"a": torch.ones(1)}, "state_dict_ema": {"a": torch.ones(1)}},
            r"several.*'state_dict_ema'.*weights=fastvit\.checkpoints\.read\('.*'\)\['state_dict'\], or save",
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
    (tmp_path / "folder").mkdir()
    for name in ("last.CKPT", "best.pth.tar", "notes.txt"):
        (tmp_path / "folder" / name).touch()
    refused(tmp_path / "folder", r"has none of model\.safetensors, .*; it has best\.pth\.tar, last\.CKPT: weights may")
    refused(tmp_path / "model.npz", "weights must be a file of safetensors or torch.save, .* no file or folder of that")
    for name in ("runs/last.ckpt", "runs/model_best.pth.tar", "RUNS/MODEL.PTH"):  # these are not asked of the Hub
        with pytest.raises(FileNotFoundError, match=f"^{name}: no such file$"):
            checkpoints.read(name)
    os.mkfifo(tmp_path / "pipe.pth")
    refused(tmp_path / "pipe.pth", "is not a file")
    safetensors.save_file(state_dict(), tmp_path / "model.safetensors")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "safetensors" else find(name, *a))
    with pytest.raises(ImportError, match=r"fastvit\[weights\]"):
        checkpoints.read(tmp_path / "model.safetensors")
