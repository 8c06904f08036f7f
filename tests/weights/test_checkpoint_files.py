"""Files, folders and repositories: every kind is read alike, no code runs, and what is refused is named."""

import argparse
import importlib.util
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import ONE_BLOCK, refused, renamed, state_dict, with_prefix
from torch import Tensor, nn

import fastvit
from fastvit import checkpoints
from fastvit.checkpoints import CheckpointError
from fastvit.checkpoints import files as weight_files

safetensors = pytest.importorskip("safetensors.torch")
hub = pytest.importorskip("huggingface_hub")
constants, errors = (pytest.importorskip(f"huggingface_hub.{name}") for name in ("constants", "errors"))

save_in_one_pickle = partial(torch.save, _use_new_zipfile_serialization=False)
NAME, TAG = "test_vit", "test_vit.r160_in1k"
STATE = {key: torch.randn_like(value) for key, value in fastvit.create_model(NAME).state_dict().items()}


def assert_loaded(model: nn.Module, state: dict[str, Tensor] = STATE) -> None:
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key].to(value.dtype)), key


# ---- files ----


@pytest.mark.parametrize(  # the content says how a file is to be read, not its name
    ("name", "save", "dtype"),
    [
        ("pytorch_model.bin", safetensors.save_file, torch.float64),
        ("model_best.pth.tar", torch.save, torch.bfloat16),
        ("of torch 1.5.PTH", save_in_one_pickle, torch.float16),
    ],
)
def test_every_kind_of_file(name: str, save: Callable[..., None], dtype: torch.dtype, tmp_path: Path) -> None:
    written = {key: value.to(dtype) for key, value in STATE.items()}
    save(written, tmp_path / name)
    model = fastvit.create_model(NAME, str(tmp_path / name), dtype=torch.bfloat16)
    assert model.norm.weight.dtype is torch.bfloat16
    assert_loaded(model, written)


@pytest.mark.parametrize(
    ("wrapper", "prefix", "inside"),
    [
        (None, "module.", ""),
        ("model", "_orig_mod.module.", "_fsdp_wrapped_module._checkpoint_wrapped_module."),
        ("my_model", "student._orig_mod.", "_orig_mod."),
    ],
)
def test_training_checkpoints(wrapper: str | None, prefix: str, inside: str, tmp_path: Path) -> None:
    written = state_dict()
    content: Any = with_prefix(renamed(written, {"blocks.0.": f"blocks.0.{inside}", "fc1.": f"fc1.{inside}"}), prefix)
    if wrapper:
        options = argparse.Namespace(lr=0.1)
        content = {"epoch": 3, "args": options, "optimizer": {"state": {}, "param_groups": [{}]}, wrapper: content}
        content["ema"] = {"decay": 0.9}
    torch.save(content, tmp_path / "last.pth")
    model = fastvit.VisionTransformer(**ONE_BLOCK)
    checkpoints.load(model, tmp_path / "last.pth")
    assert_loaded(model, written)


class Command:
    """Unpickled as a program would unpickle it, this makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("raw", [False, True], ids=["torch.save", "pickle"])
def test_no_code_runs(raw: bool, tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "model.pth"
    content = {"state_dict": state_dict(), "hook": Command(made)}
    if raw:
        path.write_bytes(pickle.dumps(content, protocol=2))  # torch.save's; of others torch.load warns
    else:
        torch.save(content, path)
    refused(path, "no code is run" if raw else r"asks for \S*mkdir; only tensors are read, and no code is run")
    assert not made.exists()
    torch.save({"state_dict": state_dict(), "folder": tmp_path}, path)
    refused(
        path, r"asks for pathlib.*If you trust it, pass, in Python, weights=torch.load\(path, .*weights_only=False\)"
    )
    pickle.loads(pickle.dumps(Command(made)))  # the test's own teeth: unpickled carelessly, it does run
    assert made.exists()


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


@pytest.mark.parametrize("save", [safetensors.save_file, torch.save, save_in_one_pickle])
def test_damaged_files(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(state_dict(), path)
    content = path.read_bytes()
    for length in (0, 1, 9, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(path, "empty" if length == 0 else "damaged" if length > 8 else "damaged|but it begins with b'")


OTHER_FILES = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0": "a Git LFS pointer: run git lfs pull",
    b"\n<!DOCTYPE html>": "a page of HTML or XML",
    b"not weights": "begins with b'not weights'",
    b'{"weight_map": {"a": "../other"}}': "is no index of shards",
    b'{"weight_map":' + b"[" * 99_999: "is no index of shards",
    b"\x80\x02cevil\x1b[2J\nname\n(tR.": r"asks for evil\\x1b\[2J\.name",  # printed, a terminal would obey it
}


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    for content, message in OTHER_FILES.items():
        path.write_bytes(content)
        refused(path, message)
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    with pytest.warns(UserWarning, match="TorchScript"):
        refused(path, "TorchScript")
    torch.save([torch.ones(2)], path)
    refused(path, "holds no state_dict but a list")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cls.npy", b"")
    refused(path, "is damaged or is no file of torch.save")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("last.CKPT", "best.pth.tar", "notes.txt"):
        (folder / name).touch()
    refused(folder, r"has none of model\.safetensors, .*; it has best\.pth\.tar, last\.CKPT: weights may")
    refused(tmp_path / "model.npz", "weights must be a file of safetensors or torch.save, .* no file or folder of that")
    with pytest.raises(FileNotFoundError, match=r"^RUNS/MODEL\.PTH: no such file$"):  # the Hub is not asked
        checkpoints.read("RUNS/MODEL.PTH")
    os.mkfifo(tmp_path / "pipe.pth")
    refused(tmp_path / "pipe.pth", "is not a file")
    safetensors.save_file(state_dict(), tmp_path / "model.safetensors")
    without(monkeypatch, "safetensors")
    with pytest.raises(ImportError, match=r"fastvit\[weights\]"):
        checkpoints.read(tmp_path / "model.safetensors")


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """A machine on which a package is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a))


# ---- folders and repositories ----


def in_shards(folder: Path, save: Callable[[dict[str, Tensor], Path], None], suffix: str, index: str) -> None:
    shards = {f"part-{i}{suffix}": dict(list(STATE.items())[i::2]) for i in range(2)}
    for name, tensors in shards.items():
        save(tensors, folder / name)
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def whole(folder: Path) -> None:
    safetensors.save_file(STATE, folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"not read")


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "safetensors": whole,
    "shards": lambda folder: in_shards(folder, safetensors.save_file, ".safetensors", "model.safetensors.index.json"),
    "pickle": lambda folder: torch.save(STATE, folder / "pytorch_model.bin"),
    "shards of pickles": lambda folder: in_shards(folder, torch.save, ".bin", "pytorch_model.bin.index.json"),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def snapshot(cache: Path, repo: str, revision: str = "main") -> Path:
    """The folder of a repository's revision in the cache, as huggingface_hub lays it out."""
    folder, commit = cache / f"models--{repo.replace('/', '--')}", revision.encode().hex().ljust(40, "0")
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    return folder / "snapshots" / commit


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_and_repositories_in_the_cache(kind: str, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for place, weights in ((folder, folder), (snapshot(cache, "facebook/some.vit-2"), "facebook/some.vit-2")):
        FOLDERS[kind](place)
        assert_loaded(fastvit.create_model(NAME, weights))


def test_spellings_of_a_repository(cache: Path) -> None:
    other = {key: value + 1 for key, value in STATE.items()}
    safetensors.save_file(STATE, snapshot(cache, "timm/a") / "model.safetensors")
    safetensors.save_file(other, snapshot(cache, "timm/a", "v2") / "model.safetensors")
    for spelling, state in (("hf-hub:timm/a", STATE), ("hf_hub:timm/a", STATE), ("hf-hub:timm/a@v2", other)):
        assert_loaded(fastvit.create_model(NAME, spelling), state)


def test_tags_of_timm(cache: Path) -> None:
    head = {"head.weight": torch.ones(7, 64), "head.bias": torch.ones(7)}
    safetensors.save_file({**STATE, **head}, snapshot(cache, f"timm/{TAG}") / "model.safetensors")
    assert fastvit.create_model(TAG, weights=True).num_classes == 7
    assert_loaded(fastvit.create_model(NAME, weights=TAG, num_classes=7), {**STATE, **head})
    assert fastvit.create_model(TAG, weights=True, drop_head=True).num_classes == 1000
    with pytest.raises(CheckpointError, match="num_classes=7 is the file's"):
        fastvit.create_model(TAG, weights=True, num_classes=8)
    # timm has one repository for CLIP with and without the exact GELU
    with pytest.raises(FileNotFoundError, match=r"hf download timm/vit_base_patch32_clip_224.openai model.safetensors"):
        fastvit.create_model("vit_base_patch32_clip_quickgelu_224.openai", weights=True)


def test_a_path_goes_before_a_repository(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("timm/a", TAG):
        (tmp_path / name).mkdir(parents=True)
        safetensors.save_file(STATE, tmp_path / name / "model.safetensors")
        assert_loaded(fastvit.create_model(NAME, name))


def test_what_is_not_in_the_cache_is_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the cache is asked, without the network; shards come from the commit that the index is of."""
    calls = []

    def download(repo: str, file: str, *, revision: str | None, local_files_only: bool = False) -> str:
        calls.append((file, revision, local_files_only))
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not there")
        if not file.startswith("part") and not file.endswith("safetensors.index.json"):
            raise errors.EntryNotFoundError("404")
        source = cache.parent / file
        return str(source.rename(folder / file))

    folder = snapshot(cache, "a/b")
    FOLDERS["shards"](cache.parent)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert_loaded(fastvit.create_model(NAME, "a/b"))
    shards = ["part-0.safetensors", "part-1.safetensors"]
    downloaded = [file for file, _, local in calls if not local]
    assert downloaded == ["model.safetensors", "model.safetensors.index.json", *shards]
    assert calls[0] == ("model.safetensors", None, True)
    assert calls[-1] == ("part-1.safetensors", folder.name, False)


@pytest.mark.parametrize("name", ["GatedRepoError", "HfHubHTTPError"])
def test_what_the_hub_does_not_give(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(errors, name)

    def download(*_: Any, **__: Any) -> str:
        error = kind.__new__(kind)  # whose other arguments differ between versions
        error.args = ("status 403\x1b[2J\nmore",)
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", download)
    message = rf"^weights 'hf-hub:a/b@v1' are no file or folder here; .*: {name}: status 403\\x1b\[2J more\. .*"
    with pytest.raises(FileNotFoundError, match=message + "run: hf download a/b model.safetensors --revision v1 --loc"):
        fastvit.create_model(NAME, "hf-hub:a/b@v1")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "huggingface_hub")
    with pytest.raises(ImportError, match=f"to fetch timm/{TAG} from the Hugging Face Hub: pip install huggingface_"):
        fastvit.create_model(TAG, weights=True)


def test_names_that_are_refused(cache: Path, tmp_path: Path) -> None:
    for error, message, arguments in (
        (ValueError, f"{TAG}' has a tag: weights=True loads its weights, '{NAME}' has random ones", (TAG,)),
        (ValueError, r"a name with a tag of timm's, .*timm.list_pretrained lists them; got 'test_vit'", (NAME, True)),
        (ValueError, "nearest: test_vit.* A repository of the Hugging Face Hub goes into weights", (f"timm/{TAG}",)),
        (FileNotFoundError, r"HFValidationError: .*a\.\.b", (NAME, "a..b/c")),
        (CheckpointError, "facebook/dinov2-small.*there is no file or folder of that name", (NAME, "dinov2")),
    ):
        with pytest.raises(error, match=message):
            fastvit.create_model(*arguments)


def test_numbers_next_to_weights(tmp_path: Path) -> None:
    """AveragedModel and trainers have them, also in a file of their own."""
    model = fastvit.VisionTransformer(**ONE_BLOCK)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    shards = {"a": model.state_dict(), "b": {"n_averaged": torch.tensor(1)}}
    for name, tensors in shards.items():
        torch.save(tensors, tmp_path / f"{name}.bin")
    names = {key: f"{name}.bin" for name, tensors in shards.items() for key in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for content in (
        averaged.state_dict(),
        {"state_dict": averaged.state_dict(), "epoch": 3},
        {**model.state_dict(), "epoch": 3, "decay": nn.Parameter(torch.tensor(0.9))},
        checkpoints.read(tmp_path / "model.safetensors.index.json"),
    ):
        other = fastvit.VisionTransformer(**ONE_BLOCK)
        checkpoints.load(other, content)
        assert_loaded(other, model.state_dict())
