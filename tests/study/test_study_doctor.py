"""`fastvit doctor` on machines where something is missing, and `fastvit bench` in and outside a checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastvit import ops
from fastvit.cli import bench, main
from fastvit.kernels import _tuned
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices
from fastvit.study import doctor, machine
from fastvit.study.accuracy import verification

ROOT = Path(__file__).parents[2]


def finding(name, probe):
    (only,) = [one for one in probe() if one.name == name]
    return only


def test_json_has_every_finding_of_this_machine(capsys):
    findings = doctor()
    assert {one.topic for one in findings} == {"versions", "devices", "compilers", "ops", "packages"}
    by_name = {one.name: one.value for one in findings}
    assert by_name["torch"].startswith(torch.__version__)
    assert str(ROOT / "fastvit") in by_name["fastvit"]
    assert set(verification.OPS) <= set(by_name)
    assert main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["topic"], row["name"], row["status"]) for row in rows] == [
        (one.topic, one.name, one.status) for one in findings
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
def test_the_path_of_every_op_and_why(monkeypatch):
    with ops.use_backend("auto"):
        monkeypatch.setattr(backends, "HAVE_TRITON", True)
        monkeypatch.setattr(backends, "INTERPRET", False)
        assert finding("mlp", machine._ops).value.startswith("ATen: no GPU")
        monkeypatch.setattr(backends, "INTERPRET", True)
        assert finding("mlp", machine._ops).value.startswith("Triton's interpreter: TRITON_INTERPRET=1")
        assert finding("mlp", machine._ops).status == "note"
    with ops.use_backend("aten"):
        assert finding("mlp", machine._ops).value == "ATen: FASTVIT_BACKEND or use_backend says so"
    monkeypatch.setattr(backends, "wants_triton", lambda x: True)
    monkeypatch.setattr(backends, "INTERPRET", False)
    monkeypatch.setattr(devices, "_target", lambda x: "sm_75")
    assert finding("attention", machine._ops).value == "ATen: sm_75 is older than sm_80"


def test_a_gpu_and_its_tuned_table(monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA Toy", major=9, minor=0, total_memory=80e9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(_tuned, "FOLDER", tmp_path)
    device, table, *_ = machine._gpu(0)
    assert device.value == "NVIDIA Toy, sm_90, 80.0 GB, 132 multiprocessors"
    assert (device.status, table.value) == ("ok", "none for NVIDIA Toy")
    path = tmp_path / "tuned_nvidia_toy.json"
    path.write_text(json.dumps({"format": 0}))
    _, table, *_ = machine._gpu(0)
    assert table.status == "note"
    assert table.value.startswith(f"{path} is ignored: ")
    properties.major, properties.minor = 7, 5
    old = next(machine._gpu(0))
    assert old.status == "note"
    assert old.value.endswith("older than sm_80, its ops run on ATen")


@pytest.mark.parametrize(
    ("built", "visible", "error", "capability", "expected"),
    [
        (None, None, None, None, "is a CPU build"),
        ("13.0", None, "Found no NVIDIA driver.\nGo there", None, "Found no NVIDIA driver."),
        ("13.0", "", None, None, "CUDA_VISIBLE_DEVICES= hides every GPU"),
        ("13.0", None, None, None, "torch is built for 13.0, and sees no GPU"),
        ("13.0", None, None, (7, 5), "Tesla T4 is sm_75, and the kernels need sm_80 or newer"),
        ("13.0", None, None, (9, 0), ""),
    ],
)
def test_why_no_kernel_can_run_on_a_gpu(built, visible, error, capability, expected, monkeypatch):
    def init():
        if error:
            raise RuntimeError(error)

    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    why = machine.why_no_gpu()
    assert why == expected or (expected and why.endswith(expected))


def test_a_probe_that_fails_is_a_finding_and_the_others_go_on(monkeypatch):
    def _broken():
        yield machine.Finding("devices", "before", "fine")
        raise OSError("no such bus\nsecond line")

    monkeypatch.setattr(machine, "_PROBES", (("devices", _broken), ("packages", machine._packages)))
    before, broken, *others = doctor()
    assert before.status == "ok"
    assert (broken.topic, broken.name, broken.status) == ("devices", "broken", "trouble")
    assert broken.value == "OSError: no such bus"
    assert others


def test_what_is_not_as_it_was_tested_is_named(monkeypatch):
    """Versions of torch, a triton of another torch, a missing compiler, a torchvision without compiled operators."""

    def import_module(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    for version, status in (("2.8.1", "trouble"), ("2.9.0+cu128", "ok"), ("2.15.0a0+git", "ok"), ("2.16.0", "note")):
        monkeypatch.setattr(torch, "__version__", version)
        assert finding("torch", machine._versions).status == status
    monkeypatch.setenv("CC", "no-such-compiler")
    assert finding("C", machine._compilers).value.startswith("CC=no-such-compiler is not there")
    monkeypatch.setattr(machine._triton, "is_installed", lambda: True)
    for torch_version, triton_version, status in (("2.13.0+cpu", "3.7.9", "ok"), ("2.13.0", "3.9.0", "note")):
        monkeypatch.setattr(torch, "__version__", torch_version)
        monkeypatch.setattr(machine, "version_of", lambda package, version=triton_version: version)
        triton = finding("triton", machine._versions)
        assert triton.status == status
        assert ("2.11 with 3.6.0, 2.13 with 3.7.1" in triton.value) == (status == "note")
    monkeypatch.setattr(machine.importlib, "import_module", import_module)
    vision = finding("torchvision", machine._packages)
    assert vision.status == "trouble"
    assert f"not of the same build as torch {torch.__version__}: pip uninstall torchvision" in vision.value


def test_without_triton_and_rich():
    program = "import sys; sys.modules['triton'] = sys.modules['rich'] = None\n"
    program += "from fastvit.cli import main; sys.exit(main(['doctor']))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    own = [line for line in run.stderr.splitlines() if "torch/utils/flop_counter.py" not in line]  # which misses triton
    assert (run.returncode, own) == (0, [])
    lines = run.stdout.splitlines()
    assert any(line.split()[:4] == ["-", "triton", "not", "installed:"] for line in lines)
    assert any("18 ops" in line and "ATen: triton is not installed" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_bench_runs_pytest_in_the_checkout(monkeypatch, tmp_path, capsys):
    calls = []
    done = SimpleNamespace(returncode=3)
    monkeypatch.setattr(bench.subprocess, "run", lambda command, cwd: calls.append((command, cwd)) or done)
    assert main(["bench", "--", "-k", "attention"]) == 3
    command = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "--quick", "-k", "attention"]
    assert calls == [(command, ROOT)]
    with monkeypatch.context() as patch:  # without a package that it needs
        patch.setattr(bench.importlib.util, "find_spec", lambda name: None)
        assert main(["bench"]) == 2
        assert capsys.readouterr().err == "fastvit bench: pytest is not installed: pip install 'fastvit[bench]'\n"
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site/fastvit/cli/bench.py"))
    monkeypatch.chdir(ROOT)  # the folder that it is called in
    assert bench.checkout() == ROOT
    monkeypatch.chdir(tmp_path)
    assert main(["bench"]) == 2
    assert "clone the repository" in capsys.readouterr().err
