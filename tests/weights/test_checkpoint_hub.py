"""Weights named by a folder, by a repository of the Hugging Face Hub, or by a tag of timm's: without a network."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastvit
from fastvit.checkpoints import CheckpointError

save_file = pytest.importorskip("safetensors.torch").save_file
hub = pytest.importorskip("huggingface_hub")
constants, errors = (pytest.importorskip(f"huggingface_hub.{name}") for name in ("constants", "errors"))

NAME, TAG = "test_vit", "test_vit.r160_in1k"
STATE = {key: torch.randn_like(value) for key, value in fastvit.create_model(NAME).state_dict().items()}


def in_shards(folder: Path, save: Callable[[dict[str, Tensor], Path], None], suffix: str, index: str) -> None:
    shards = {f"part-{i}{suffix}": dict(list(STATE.items())[i::2]) for i in range(2)}
    for name, tensors in shards.items():
        save(tensors, folder / name)
    weight_map = {key: name for name, tensors in shards.items() for key in tensors}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def whole(folder: Path) -> None:
    save_file(STATE, folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"not read")


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "safetensors": whole,
    "shards": lambda folder: in_shards(folder, save_file, ".safetensors", "model.safetensors.index.json"),
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


def assert_loaded(model: torch.nn.Module, state: dict[str, Tensor] = STATE) -> None:
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders(kind: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path)
    assert_loaded(fastvit.create_model(NAME, tmp_path))


@pytest.mark.parametrize("kind", FOLDERS)
def test_repositories_in_the_cache(kind: str, cache: Path) -> None:
    FOLDERS[kind](snapshot(cache, "facebook/some.vit-2"))
    assert_loaded(fastvit.create_model(NAME, "facebook/some.vit-2"))


def test_spellings_of_a_repository(cache: Path) -> None:
    other = {key: value + 1 for key, value in STATE.items()}
    save_file(STATE, snapshot(cache, "timm/a") / "model.safetensors")
    save_file(other, snapshot(cache, "timm/a", "v2") / "model.safetensors")
    for spelling in ("timm/a", "hf-hub:timm/a", "hf_hub:timm/a"):
        assert_loaded(fastvit.create_model(NAME, spelling))
    for spelling in ("timm/a@v2", "hf-hub:timm/a@v2"):
        assert_loaded(fastvit.create_model(NAME, spelling), other)


def test_tags_of_timm(cache: Path) -> None:
    head = {"head.weight": torch.ones(7, 64), "head.bias": torch.ones(7)}
    save_file({**STATE, **head}, snapshot(cache, f"timm/{TAG}") / "model.safetensors")
    assert fastvit.create_model(TAG, weights=True).num_classes == 7
    assert_loaded(fastvit.create_model(NAME, weights=TAG, num_classes=7), {**STATE, **head})
    assert_loaded(fastvit.create_model(TAG, weights=TAG, num_classes=0))
    assert fastvit.create_model(TAG, weights=True, drop_head=True).num_classes == 1000
    with pytest.raises(CheckpointError, match="num_classes=7 is the file's"):
        fastvit.create_model(TAG, weights=True, num_classes=8)


def test_quickgelu_is_another_model_of_the_same_repository(cache: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"hf download timm/vit_base_patch32_clip_224.openai model.safetensors"):
        fastvit.create_model("vit_base_patch32_clip_quickgelu_224.openai", weights=True)


def test_a_path_goes_before_a_repository(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("timm/a", TAG):
        (tmp_path / name).mkdir(parents=True)
        save_file(STATE, tmp_path / name / "model.safetensors")
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
    assert [file for file, _, local in calls if not local] == [
        "model.safetensors",
        "model.safetensors.index.json",
        "part-0.safetensors",
        "part-1.safetensors",
    ]
    assert calls[0] == ("model.safetensors", None, True)
    assert calls[-1] == ("part-1.safetensors", folder.name, False)


ERRORS = {
    "GatedRepoError": "ask for access at https://huggingface.co/a/b, then run: hf auth login",
    "RepositoryNotFoundError": "has no a/b, or it is private, and you have to run: hf auth login",
    "RevisionNotFoundError": "a/b has no revision v1",
    "EntryNotFoundError": "a/b has none of model.safetensors, .*: download another file",
    "LocalEntryNotFoundError": "hf download a/b model.safetensors --revision v1 --local-dir FOLDER; then pass weights=",
    "HfHubHTTPError": r"hf download a/b .* did not give it here: HfHubHTTPError: status 500\\x1b",
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_the_hub_does_not_give(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(errors, name)

    def download(*_: Any, **__: Any) -> str:
        error = kind.__new__(kind)  # whose other arguments differ between versions
        error.args = ("status 500\x1b[2J\nmore",)
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", download)
    message = f"^weights 'hf-hub:a/b@v1' are no file or folder here; .*{ERRORS[name]}"
    with pytest.raises(FileNotFoundError, match=message):
        fastvit.create_model(NAME, "hf-hub:a/b@v1")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = "huggingface_hub"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == absent else find(name, *a))
    with pytest.raises(ImportError, match=f"to fetch timm/{TAG} from the Hugging Face Hub: pip install {absent}"):
        fastvit.create_model(TAG, weights=True)


def test_names_that_are_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    for error, message, arguments in (
        (ValueError, f"{TAG}' has a tag: weights=True loads its weights, '{NAME}' has random ones", (TAG,)),
        (ValueError, r"a name with a tag of timm's, .*timm.list_pretrained lists them; got 'test_vit'", (NAME, True)),
        (ValueError, "nearest: test_vit.* A repository of the Hugging Face Hub goes into weights", (f"timm/{TAG}",)),
        (FileNotFoundError, "test_vit.pth: no such file", (NAME, "test_vit.pth")),
        (FileNotFoundError, r"allows no such name: .*a\.\.b", (NAME, "a..b/c")),
        (CheckpointError, "facebook/dinov2-small.*there is no file or folder of that name", (NAME, "dinov2")),
        (CheckpointError, "the folder has none of model.safetensors, ", (NAME, tmp_path.parent)),
        (CheckpointError, "no index of shards", (NAME, tmp_path)),
    ):
        with pytest.raises(error, match=message):
            fastvit.create_model(*arguments)
