"""`fastvit warmup`: which kernels it records, what it compiles, and what it refuses."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import needs_triton, python
from study_models import SMALL, known

from fastvit.cli import main
from fastvit.study.memory.step import StepSpec

warmup = pytest.importorskip("fastvit.warmup", reason="triton is not installed")


@pytest.fixture(autouse=True)
def _models() -> Iterator[None]:
    with known():
        yield


RECORD = """
import sys
from study_models import SMALL, known
from fastvit.study.memory.step import Setting, StepSpec
from fastvit.study.sources.find import find
from fastvit.warmup import Recorder, record_step
with known():
    for name, size, dtype, mode in ((SMALL, 32, "bf16", "infer"), (SMALL, 32, "bf16", "train"),
                                    ("study_models:timm_vit", 32, "amp", "infer")):
        recorder = Recorder("sm_90")
        spec = StepSpec(find(name), (size, size), 2, Setting(mode, dtype, "none"), gpu=True)
        record_step(recorder, spec, 132)
        launches = recorder.launches.values()
        names = [launch.name.removesuffix("_kernel") for launch in launches]
        print(*dict.fromkeys(names), len(names), *{launch.target for launch in launches}, sep=",")
        attention = next(launch for launch in launches if launch.name == "attention_fwd_kernel")
        print([kind for kind in attention.signature.values() if kind.startswith("*")][:3])
"""


@needs_triton
def test_the_kernels_of_a_step_are_recorded_in_their_order():
    infer, _, train, _, amp, pointers = python("-c", RECORD, PYTHONPATH="tests/helpers:.").splitlines()
    assert infer == "patch_embed_fwd,layer_norm_fwd,attention_fwd,linear_fwd,6,sm_90", "two blocks, each kernel once"
    forward, _, backward = train.partition(",linear_fwd,")
    assert forward == "patch_embed_fwd,layer_norm_fwd,attention_fwd"
    assert {"layer_norm_bwd", "linear_dact", "column_sum", "patch_embed_bwd_weight"} < set(backward.split(","))
    assert amp.startswith("patch_embed_fwd,layer_norm_fwd,")
    assert pointers == "['*bf16', '*bf16', '*bf16']", "attention in 16 bits under autocast"


def test_it_compiles_for_every_batch_and_mode(monkeypatch, capsys):
    """It names a kernel that fails, and returns status 1."""
    seen = []

    def record(recorder: Any, spec: StepSpec, multiprocessors: int) -> None:
        dtype, mode, precision = spec.setting.dtype, spec.setting.mode, torch.get_float32_matmul_precision()
        seen.append((spec.source.name, spec.image_size, spec.batch, dtype, mode, multiprocessors, precision))
        recorder.launches = {n: SimpleNamespace(name=f"{n}_kernel") for n in "abc"}

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(warmup, "record_step", record)
    monkeypatch.setattr(
        warmup, "in_processes", lambda _, all, processes: zip(all, (True, False, "ptxas says no"), strict=True)
    )
    words = ["warmup", SMALL, "--target", "sm_90", "--batch", "1,8", "--multiprocessors", "114", "--dtype", "tf32"]
    assert main([*words, "--processes", "2"]) == 1
    assert seen == [
        (SMALL, (32, 32), batch, "fp32", mode, 114, "high") for batch in (1, 8) for mode in ("infer", "train")
    ]
    said = capsys.readouterr()
    assert said.err == "fastvit: c_kernel does not compile: ptxas says no\n"
    assert f"{SMALL}, batch 1, 8, 32 px, tf32, infer and train, for sm_90:" in said.out
    assert "3 kernels, 1 of them compiled before, in " in said.out
    seen.clear()
    assert main(["warmup", SMALL, "--target", "sm_80", "--mode", "train", "--image-size", "64"]) == 1
    assert seen == [(SMALL, (64, 64), 32, "bf16", "train", 108, "highest")]


WRONG: list[tuple[list[str], str]] = [
    (["--multiprocessors", "3"], "--multiprocessors is for --target"),
    (["--target", "sm_70"], "--target must be one of sm_80, "),
    (["--target", "sm_80"], "Triton takes none of its ops"),
    ([], "no GPU: no driver; --target sm_80|"),
]


@pytest.mark.parametrize(("words", "why"), WRONG)
def test_what_cannot_be_compiled_is_one_line(words, why, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["warmup", SMALL, "--target", "sm_90"]) == 2
    assert "with TRITON_INTERPRET=1 nothing is compiled" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(warmup, "record_step", lambda *_: None)
    monkeypatch.setattr(warmup, "why_no_gpu", lambda: "no driver")
    assert main(["warmup", SMALL, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_the_gpu_at_hand_says_target_and_multiprocessors(monkeypatch):
    monkeypatch.setattr(warmup, "why_no_gpu", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=114))
    monkeypatch.setattr(torch, "empty", lambda size, device: device)
    monkeypatch.setattr(warmup.devices, "arch", {torch.device("cuda", 1): "sm_90"}.__getitem__)
    assert warmup.gpu_at_hand() == ("sm_90", 114)


def test_compilation_ends_with_its_caller(tmp_path):
    """Ctrl-C leaves no kernels to compile in the background."""

    def compile(number: int) -> None:
        time.sleep(0.01)
        (tmp_path / str(number)).touch()

    done = warmup.in_processes(compile, range(300), 1)
    next(done)
    done.close()
    assert len(list(tmp_path.iterdir())) < 300
