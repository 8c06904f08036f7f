"""Measured launch choices: what kernels take from a file, whose file counts, and which files are ignored."""

import dataclasses
import json
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastvit.kernels import _attention_configs, _configs, _tuned
from fastvit.ops.runtime import device as devices

ARCH, GPU = "sm_90", "Test GPU 80GB"

pytestmark = pytest.mark.usefixtures("nothing_tuned")


def entry(table: str, *values: int) -> dict[str, int]:
    return dict(zip(_tuned.FIELDS[table], values, strict=True))


SQUARE, WIDE = entry("attention_fwd", 64, 64, 4, 2), entry("attention_fwd", 128, 128, 8, 2)


def document(tables: Any, **changes: Any) -> dict[str, Any]:
    measured = {"sources": _tuned.sources()}
    return {"format": _tuned.FORMAT, "gpu": GPU, "arch": ARCH, "measured": measured, "tables": tables} | changes


def fwd(key: str = "197,64,2,0,0", **changes: Any) -> dict[str, Any]:
    return document({"attention_fwd": {key: SQUARE | changes}})


def write(folder: Path, data: Any) -> Path:
    """Write a table into a folder. data: text, or what becomes JSON."""
    folder.mkdir(exist_ok=True)
    path = folder / _tuned.file_name(GPU)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def load(monkeypatch: pytest.MonkeyPatch, folder: Path, data: Any) -> None:
    """Load a shipped table as the ops do at their first launch on a GPU."""
    monkeypatch.setattr(_tuned, "FOLDER", write(folder, data).parent)
    _tuned.load(ARCH, GPU)


def tile(n: int = 197) -> tuple[int, int]:
    config = _attention_configs.attention_fwd(n, 64, 2, False, ARCH)
    return config.block_m, config.block_n


SHIPPED = (64, 32)  # the tile of 197 tokens without a file


# ---- what the kernels take from a file ----

# table, key, choice, the configuration, and what follows from the choice in it
OVERRIDES: list[tuple[str, str, tuple[int, ...], Callable[[], Any], dict[str, Any]]] = [
    ("layer_norm", "768,1", (4, 8, 3, 4), lambda: _configs.layer_norm(768, backward=True, arch=ARCH), {}),
    ("column_sum", "9,768", (64, 16, 8), lambda: _configs.column_sum(264, 768, ARCH), {}),
    ("activation_backward", "3072,2", (4, 512, 4, 8), lambda: _configs.activation_backward(3072, 2, ARCH), {}),
    (
        "gemm", "13,768,768,2", (128, 256, 64, 1, 8, 4, 0, 1),
        lambda: _configs.gemm(6304, 768, 768, 2, ARCH, described=True), {"max_registers": None},
    ),
    (
        "attention_fwd", "197,64,2,0,0", (128, 32, 8, 3),
        lambda: _attention_configs.attention_fwd(197, 64, 2, False, ARCH), {"tails": (16, 0)},
    ),
    (
        "attention_bwd_dq", "257,64,2,0,1", (128, 128, 8, 2),
        lambda: _attention_configs.attention_bwd_dq(257, 64, 2, False, ARCH, True), {"tail": 16},
    ),
    (
        "attention_bwd_dkdv", "257,80,2,1,0", (32, 128, 8, 3),
        lambda: _attention_configs.attention_bwd_dkdv(257, 80, 2, True, ARCH, False), {"parts": (64, 16)},
    ),
    (
        "attention_bwd_short", "128,64,2,0,0", (1, 128, 32, 16, 2),
        lambda: _attention_configs.attention_bwd_short(128, 64, 2, False, ARCH, False), {},
    ),
    (
        "patch_embed", "768,588,16,2,2,1", (64, 128, 32, 4, 4),
        lambda: _configs.patch_embed(
            768, 588, 50000, itemsize=2, loaded=2, arch=ARCH, multiprocessors=132, split=True
        ), {"splits": 2 * 132 // (12 * 5)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("table", "key", "choice", "config", "derived"), OVERRIDES, ids=[o[0] for o in OVERRIDES])
def test_the_file_overrides_its_table(table, key, choice, config, derived, tmp_path, monkeypatch):
    shipped = dataclasses.asdict(config())
    chosen = entry(table, *choice)
    load(monkeypatch, tmp_path, document({table: {key: chosen}}))
    measured = dataclasses.asdict(config())
    assert measured.items() >= ({name: n for name, n in chosen.items() if name != "short"} | derived).items()
    assert measured != shipped


def test_a_kernel_can_be_replaced_by_another(tmp_path, monkeypatch):
    assert _attention_configs.attention_bwd_short(128, 64, 2, False, ARCH, False) is not None
    assert _configs.use_triton_gemm(50_432, 3072, 768, 2, False, ARCH)
    tables = {
        "attention_bwd_short": {"128,64,2,0,0": entry("attention_bwd_short", 0, 64, 64, 4, 2)},
        "use_triton_gemm": {"16,3072,768,2,0": {"use": 0}},
    }
    load(monkeypatch, tmp_path, document(tables))
    assert _attention_configs.attention_bwd_short(128, 64, 2, False, ARCH, False) is None
    assert not _configs.use_triton_gemm(50_432, 3072, 768, 2, False, ARCH)
    assert _configs.use_triton_gemm(197, 3072, 768, 2, False, ARCH), "other numbers of rows as shipped"


# ---- whose file counts ----


def test_the_ops_load_the_table_of_their_gpu(monkeypatch):
    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    loaded = []
    monkeypatch.setattr(_tuned, "load", lambda arch, gpu, user: loaded.append((arch, gpu)))
    monkeypatch.setattr(torch.version, "hip", None)
    devices._cuda_arch.cache_clear()
    try:
        assert devices._cuda_arch(0) == devices._cuda_arch(0) == "sm_90"
    finally:
        devices._cuda_arch.cache_clear()
    assert loaded == [("sm_90", "NVIDIA H200")]


def test_the_users_choices_go_before_the_shipped_ones_one_by_one(tmp_path, monkeypatch):
    shipped = {"197,64,2,0,0": SQUARE, "50,64,2,0,0": SQUARE}
    path = write(tmp_path / "shipped", document({"attention_fwd": shipped}, measured={}))
    monkeypatch.setattr(_tuned, "FOLDER", path.parent)
    write(tmp_path / "user", document({"attention_fwd": {"197,64,2,0,0": WIDE}}))
    _tuned.load(ARCH, GPU, tmp_path / "user")
    assert (tile(197), tile(50), tile(100)) == ((128, 128), (64, 64), SHIPPED)
    _tuned.forget()
    _tuned.load(ARCH, GPU, None)
    assert tile(197) == (64, 64)


def test_a_second_model_of_an_arch_changes_no_choice_of_the_first(tmp_path):
    """The first one has no table, and its launches must not change during a run."""
    write(tmp_path, fwd())
    _tuned.load(ARCH, "A GPU without a table", tmp_path)
    _tuned.load(ARCH, GPU, tmp_path)
    assert tile() == SHIPPED


def test_the_digest_is_of_the_kernels(tmp_path, monkeypatch):
    """Any change of a kernel makes a user's table stale; a table in their folder does not."""
    monkeypatch.setattr(_tuned, "__file__", str(tmp_path / "_tuned.py"))
    digests = set()
    for name, text in (("kernel.py", "a = 1"), ("kernel.py", "a = 2"), ("other.py", ""), ("tuned_x.json", "{}")):
        (tmp_path / name).write_text(text)
        _tuned.sources.cache_clear()
        digests.add(_tuned.sources())
    _tuned.sources.cache_clear()
    assert len(digests) == 3


def test_the_folder_of_the_users_tables(monkeypatch):
    for name, value in {"FASTVIT_CACHE_DIR": "~/b", "XDG_CACHE_HOME": "/c", "HOME": "/home"}.items():
        monkeypatch.setenv(name, value)
    assert devices.cache_folder() == Path("/home/b")
    monkeypatch.delenv("FASTVIT_CACHE_DIR")
    assert devices.cache_folder() == Path("/c/fastvit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert devices.cache_folder() == Path("/home/.cache/fastvit")


# ---- files that are ignored ----

SHORT = entry("attention_bwd_short", 1, 128, 64, 8, 2)
DAMAGED: dict[str, tuple[Any, str]] = {
    "cut off": (json.dumps(fwd())[:-20], "delimiter|Expecting|Unterminated"),
    "another format": (document({}, format=1), "not of format 2"),
    "another GPU": (document({}, gpu="Another"), "made on 'Another'"),
    "another arch": (document({}, arch="sm_80"), "not on 'Test GPU 80GB', 'sm_90'"),
    "a short key": (fwd("20,16"), "key or fields"),
    "no tables": (document(None), "tables is not an object"),
    "an unknown table": (document({"softmax": {"20,16,2,0,0": SQUARE}}), "unknown table 'softmax'"),
    "a missing field": (document({"attention_fwd": {"20,16,2,0,0": {"block_m": 64}}}), "key or fields"),
    "a fraction": (fwd(num_warps=4.0), "4.0"),
    "96 rows": (fwd(block_m=96), "power of two"),
    "8 rows": (fwd(block_m=8), "less than 16"),
    "a use of 2": (document({"use_triton_gemm": {"16,3072,768,2,0": {"use": 2}}}), "not 0 or 1"),
    "long for the short kernel": (document({"attention_bwd_short": {"577,64,2,0,0": SHORT}}), "no more than 384 keys"),
    "a row too many": (document({"attention_bwd_short": {"197,64,2,0,0": SHORT}}), "less than the 197 queries"),
    "a narrow tile": (document({"gemm": {"1,2,3,2": entry("gemm", 128, 32, 64, 1, 8, 3, 0, 0)}}), "less than 64"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_ignored_with_one_warning(what, tmp_path, monkeypatch):
    data, reason = DAMAGED[what]
    with pytest.warns(UserWarning, match=reason) as caught:
        load(monkeypatch, tmp_path, data)
    assert len(caught) == 1
    assert "tuned_test_gpu_80gb.json is ignored" in str(caught[0].message)
    assert tile() == SHIPPED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.load(ARCH, GPU)  # a second GPU of the same model


def test_a_stale_table_of_the_user_is_ignored(tmp_path):
    path = write(tmp_path, fwd() | {"measured": {"sources": "other kernels"}})
    with pytest.warns(UserWarning, match=f"{path} is ignored: it was measured with other kernels"):
        _tuned.load(ARCH, GPU, tmp_path)
    assert tile() == SHIPPED


def test_without_a_file_that_can_be_read_there_is_no_warning(tmp_path):
    (tmp_path / "file").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.load(ARCH, GPU, tmp_path)
        _tuned.forget()
        _tuned.load(ARCH, GPU, tmp_path / "file" / "below")
