"""Measured launch choices: what kernels take from a file, and whose file counts."""

import dataclasses
import json
import types
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


def load(monkeypatch: pytest.MonkeyPatch, folder: Path, tables: dict[str, Any]) -> None:
    """Load choices as the ops do at their first launch on a GPU."""
    monkeypatch.setattr(_tuned, "FOLDER", folder)
    (folder / "tuned_test_gpu_80gb.json").write_text(json.dumps({"gpu": GPU, "arch": ARCH, "tables": tables}))
    _tuned.load(ARCH, GPU)


OVERRIDES: list[tuple[str, str, tuple[int, ...], Callable[[], Any], dict[str, Any]]] = [
    (
        "layer_norm", "768,1", (4, 8, 3, 4), lambda: _configs.layer_norm(768, backward=True, arch=ARCH),
        {"block_rows": 4, "programs_per_sm": 3, "num_stages": 4},
    ),
    ("column_sum", "9,768", (64, 16, 8), lambda: _configs.column_sum(264, 768, ARCH), {"block_dim": 16}),
    (
        "activation_backward", "3072,2", (4, 512, 4, 8), lambda: _configs.activation_backward(3072, 2, ARCH),
        {"block_m": 4, "steps": 4, "num_warps": 8},
    ),
    (
        "gemm", "16,3072,768,2", (64, 128, 32, 1, 4, 5, 0, 0), lambda: _configs.gemm(50432, 3072, 768, 2, ARCH),
        {"block_m": 64, "block_k": 32, "num_stages": 5, "max_registers": None},
    ),
    (
        "gemm", "13,768,768,2", (128, 256, 64, 1, 8, 4, 0, 1),
        lambda: _configs.gemm(6304, 768, 768, 2, ARCH, described=True), {"block_n": 256, "programs_per_sm": 1},
    ),
    (
        "attention_fwd", "197,64,2,0,0", (128, 32, 8, 3),
        lambda: _attention_configs.attention_fwd(197, 64, 2, False, ARCH),
        {"block_m": 128, "block_n": 32, "tails": (16, 0), "num_stages": 3},
    ),
    (
        "attention_bwd_dq", "257,64,2,0,1", (128, 128, 8, 2),
        lambda: _attention_configs.attention_bwd_dq(257, 64, 2, False, ARCH, True), {"block_n": 128, "tail": 16},
    ),
    (
        "attention_bwd_dkdv", "257,80,2,1,0", (32, 128, 8, 3),
        lambda: _attention_configs.attention_bwd_dkdv(257, 80, 2, True, ARCH, False),
        {"block_m": 32, "parts": (64, 16)},
    ),
    (
        "attention_bwd_short", "128,64,2,0,0", (1, 128, 32, 16, 2),
        lambda: _attention_configs.attention_bwd_short(128, 64, 2, False, ARCH, False),
        {"block_n": 32, "num_warps": 16},
    ),
    (
        "patch_embed", "768,588,16,2,2,1", (64, 128, 32, 4, 4),
        lambda: _configs.patch_embed(
            768, 588, 50000, itemsize=2, loaded=2, arch=ARCH, multiprocessors=132, split=True
        ),
        {"block_m": 64, "block_n": 128, "splits": 2 * 132 // (12 * 5)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("table", "key", "choice", "config", "expected"), OVERRIDES, ids=[o[0] for o in OVERRIDES])
def test_the_file_overrides_its_table(table, key, choice, config, expected, tmp_path, monkeypatch):
    shipped = dataclasses.asdict(config())
    load(monkeypatch, tmp_path, {table: {key: entry(table, *choice)}})
    measured = dataclasses.asdict(config())
    assert measured.items() >= expected.items()
    assert measured != shipped


def test_a_kernel_can_be_replaced_by_another(tmp_path, monkeypatch):
    assert _attention_configs.attention_bwd_short(128, 64, 2, False, ARCH, False) is not None
    assert _configs.use_triton_gemm(50_432, 3072, 768, 2, False, ARCH)
    tables = {
        "attention_bwd_short": {"128,64,2,0,0": entry("attention_bwd_short", 0, 64, 64, 4, 2)},
        "use_triton_gemm": {"16,3072,768,2,0": {"use": 0}},
    }
    load(monkeypatch, tmp_path, tables)
    assert _attention_configs.attention_bwd_short(128, 64, 2, False, ARCH, False) is None
    assert not _configs.use_triton_gemm(50_432, 3072, 768, 2, False, ARCH)
    assert _configs.use_triton_gemm(197, 3072, 768, 2, False, ARCH), "other numbers of rows as shipped"


def test_the_ops_load_the_table_of_their_gpu(monkeypatch):
    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    loaded = []
    monkeypatch.setattr(_tuned, "load", lambda arch, gpu: loaded.append((arch, gpu)))
    monkeypatch.setattr(torch.version, "hip", None)
    devices._cuda_arch.cache_clear()
    try:
        assert devices._cuda_arch(0) == devices._cuda_arch(0) == "sm_90"
    finally:
        devices._cuda_arch.cache_clear()
    assert loaded == [("sm_90", "NVIDIA H200")]


def test_a_second_model_of_an_arch_changes_no_choice_of_the_first(tmp_path, monkeypatch):
    """The first one has no table, and its launches must not change during a run."""
    _tuned.load(ARCH, "A GPU without a table")
    before = _attention_configs.attention_fwd(197, 64, 2, False, ARCH)
    load(monkeypatch, tmp_path, {"attention_fwd": {"197,64,2,0,0": entry("attention_fwd", 128, 128, 8, 2)}})
    assert _attention_configs.attention_fwd(197, 64, 2, False, ARCH) == before
