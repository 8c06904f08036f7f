"""The commands `fastvit tune` and `fastvit warmup`."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import python
from study_models import SMALL
from tuned_tables import ARCH, FILE, GPU, SQUARE, write

from fastvit.cli import main
from fastvit.kernels import _attention_configs, _tuned
from fastvit.ops.runtime import backend as backends
from fastvit.study.sources import find

if not (backends.INTERPRET and backends.HAVE_TRITON):
    pytest.skip("tuning is tested in Triton's interpreter", allow_module_level=True)

from fastvit.ops.runtime.launch import launching
from fastvit.ops.runtime.registry import LAUNCH_MODULES
from fastvit.tuning import launches, model, tuner
from fastvit.tuning.calls import OpCall
from fastvit.tuning.model import Machine

for _module in LAUNCH_MODULES:  # kernels are the interpreter's, if it is on when they are imported
    importlib.import_module(_module)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for a GPU that launches nothing, on which attention with 128 rows takes half a second, and everything
    else a second. Return the path of the user's table."""
    monkeypatch.setenv("FASTVIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(model, "gpu_at_hand", lambda: Machine(GPU, ARCH, 132, torch.device("cpu")))
    monkeypatch.setattr(model, "compile_calls", lambda *_: None)
    monkeypatch.setattr(model, "compile_candidates", lambda machine: lambda work, entries: None)
    monkeypatch.setattr(tuner, "timer_of", lambda device: lambda run: 1.0 if block_m() == 64 else 0.5)
    monkeypatch.setattr(find, "find", lambda name: model.tiny_model())
    plain = OpCall.run

    def run(call: OpCall, arguments: Any) -> tuple[torch.Tensor, ...]:
        with launching(lambda *_: None):
            plain(call, arguments)
        return (torch.ones(1),)

    monkeypatch.setattr(OpCall, "run", run)
    return tmp_path / "cache" / FILE


def block_m() -> int:
    return _attention_configs.attention_fwd(5, 16, 2, False, ARCH).block_m


TUNE = ["tune", "a_model", "--batch", "2", "--mode", "infer"]


def test_tuning_a_model(gpu, capsys):
    assert main(TUNE) == 0
    out = capsys.readouterr().out
    assert "attention forward N=5 d=16: 1000000.0 -> 500000.0 us, 128x64, 8 warps, 3 stages" in out
    assert "norm forward D=32: 1000000.0 us, as shipped" in out
    assert f"choices that differ from the shipped ones: 1, in {gpu}" in out
    # attention's entry makes every call as fast, of which only attention's own is timed again
    assert "8 fused ops of a forward pass: 8000.00 -> 7500.00 ms" in out
    assert list(_tuned.users(ARCH, GPU, gpu.parent).choices) == [("attention_fwd", 5, 16, 2, 0, 0)]  # type: ignore
    written = gpu.read_text()
    assert main(TUNE) == 0
    assert ", 0 choices to measure" in capsys.readouterr().out
    assert gpu.read_text() == written


def test_without_a_model_the_default_is_named(gpu, capsys):
    assert main(["tune", "--mode", "infer", "--minutes", "1e-9"]) == 0
    said = capsys.readouterr()
    assert said.err == "no MODEL is given: vit_base_patch16_224\n"
    assert "choices not measured: " in said.out
    assert not gpu.exists()


def test_an_interruption_keeps_what_is_measured(gpu, monkeypatch, capsys):
    plain, count = tuner.Tuner.tune, iter(range(99))

    def tune(self: tuner.Tuner, work: tuner.Work) -> list[tuner.Result]:
        if next(count) == 2:
            raise KeyboardInterrupt
        return plain(self, work)

    monkeypatch.setattr(tuner.Tuner, "tune", tune)
    assert main(TUNE) == 130
    assert len(json.loads(gpu.read_text())["samples"]) == 2
    out = capsys.readouterr().out
    assert "the same command goes on with them" in out
    assert str(gpu) in out


def test_a_stale_table_is_replaced(gpu, capsys):
    gpu.parent.mkdir()
    write(gpu.parent, SQUARE, measured={"sources": "other kernels"})
    assert main(TUNE) == 0
    assert f"{gpu} is replaced: it was measured with other kernels" in capsys.readouterr().err
    assert set(json.loads(gpu.read_text())["tables"]["attention_fwd"]) == {"5,16,2,0,0"}


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_measured(gpu, monkeypatch, capsys):
    def refused(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    path = write(gpu.parent, SQUARE, measured={"sources": "other kernels"})
    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    assert main(TUNE) == 2
    said = capsys.readouterr()
    assert said.err == f"fastvit: {gpu.parent} cannot be written: Permission denied; FASTVIT_CACHE_DIR names another\n"
    assert path.exists()


def test_tables_are_shown_and_forgotten(gpu, tmp_path, monkeypatch, capsys):
    assert main(["tune", "--show"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{GPU}, sm_90",
        "shipped: none",
        "yours: none; `fastvit tune` measures one",
    ]
    shipped = write(
        tmp_path / "shipped", {}, tables={"attention_fwd": dict.fromkeys(("5,16,2,0,0", "7,16,2,0,0"), SQUARE)}
    )
    monkeypatch.setattr(_tuned, "FOLDER", shipped.parent)
    assert main(TUNE) == 0
    capsys.readouterr()
    assert main(["tune", "--show"]) == 0
    out = capsys.readouterr().out
    assert f"shipped: {shipped}, 2 choices" in out
    assert f"yours: {gpu}, 1 choices" in out
    own = "attention forward N=5 d=16: 128x64, 8 warps, 3 stages, 500000.0 us; shipped: "
    assert f"{own}64x64, 4 warps, 2 stages, 1000000.0 us\n" in out
    assert "attention forward N=7 d=16: 64x64, 4 warps, 2 stages (shipped)\n" in out
    write(gpu.parent, SQUARE, measured={})
    assert main(["tune", "--show"]) == 0
    assert f"yours: {gpu} is ignored: it was measured with other kernels" in capsys.readouterr().out
    assert main(["tune", "--forget"]) == 0
    assert capsys.readouterr().out == f"deleted {gpu}\n"
    assert not gpu.exists()
    assert main(["tune", "--forget"]) == 0
    assert capsys.readouterr().out == f"there is no table for {GPU}: {gpu}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
@pytest.mark.parametrize("words", [["tune"], ["tune", "--show"], ["tune", "--forget"], ["warmup", SMALL]])
def test_without_a_gpu_a_line_says_so(words, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastvit: no GPU: ")
    assert ("--rehearse" if words[0] == "tune" else "--target") in line


def test_in_the_interpreter_nothing_is_compiled_or_measured(capsys):
    for words in (["tune"], ["warmup", SMALL, "--target", "sm_90"]):
        assert main(words) == 2
        assert "with TRITON_INTERPRET=1 no" in capsys.readouterr().err


WRONG: list[tuple[list[str], str]] = [
    (["tune", "--out", "x"], "--out is for --rehearse"),
    (["tune", SMALL, "--rehearse"], "has a tiny model of its own: leave out"),
    (["warmup", SMALL, "--multiprocessors", "3"], "--multiprocessors is for --target"),
    (["warmup", SMALL, "--target", "sm_70"], "--target must be one of sm_80, "),
    (["warmup", "no_model", "--target", "sm_80"], "'no_model' is not a known model"),
    (["warmup", SMALL, "--target", "sm_80", "--image-size", "33"], "not a multiple of the patch size"),
]


@pytest.mark.parametrize(("words", "why"), WRONG)
def test_mistakes_are_one_line(words, why, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_model_without_kernels_is_no_success(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("fastvit.tuning.calls.record", lambda *_: None)
    assert main(["warmup", SMALL, "--target", "sm_90"]) == 2
    assert "Triton takes none of its ops" in capsys.readouterr().err


def test_warmup_compiles_for_every_batch(monkeypatch, capsys):
    """It names a kernel that fails, and returns status 1."""
    seen = []

    def record(found: Any, recorder: Any, multiprocessors: int) -> None:
        seen.append(([call.leaves[0].shape[0] for call in found if call.name == "patch_embed_fwd"], multiprocessors))
        recorder.launches = {n: SimpleNamespace(name=f"{n}_kernel") for n in "abc"}

    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("fastvit.tuning.calls.record", record)
    monkeypatch.setattr(
        launches, "compile_all", lambda all, processes: zip(all, (True, False, "ptxas says no"), strict=True)
    )
    words = ["warmup", SMALL, "--target", "sm_90", "--batch", "1,8", "--multiprocessors", "114", "--mode", "infer"]
    assert main([*words, "--processes", "2"]) == 1
    assert seen == [([1, 8], 114)]
    said = capsys.readouterr()
    assert said.err == "fastvit: c_kernel does not compile: ptxas says no\n"
    assert f"{SMALL}, batch 1, 8, 32 px, bf16, infer, for sm_90:" in said.out
    assert "3 kernels, 1 of them compiled before, in " in said.out


@pytest.mark.nightly
def test_a_rehearsal_takes_every_step(tmp_path):
    out = python("-m", "fastvit", "tune", "--rehearse", "--out", str(tmp_path))
    assert "a tiny ViT, batch 2, 16 px, fp32: 13 ops, 13 choices to measure" in out
    assert out.count(" tried, ") + out.count(" -> ") >= 15
    assert "fused ops of a training step" in out
    data = json.loads((tmp_path / "tuned_interpreter.json").read_text())
    assert len(data["samples"]) == 13
    assert data["measured"]["sources"] == _tuned.sources()


@pytest.mark.nightly
def test_what_is_compiled_beforehand_is_what_is_launched():
    """By `fastvit warmup`, for models of the zoo, of timm under autocast, with a mask, and with rotary positions; by
    tuning; and by the first minutes on a GPU."""
    out = python("tests/helpers/warmed.py")
    launched = [line.split()[1:] for line in out.splitlines() if line.startswith("launched ")]
    assert len(launched) == 6
    assert all(int(kernels) > 8 and added == "0" for _, kernels, added in launched), out
    assert out.count("compiled before") == 8
    for again in out.split("launched ")[1:-2]:
        kernels, before = again.splitlines()[2].split(" of them compiled before")[0].split(" kernels, ")
        assert kernels == before, "a second call compiles nothing"
