"""`fastvit doctor` on machines where something is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastvit import ops
from fastvit.cli import main
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
    (of_ops,) = [one for one in findings if one.name.endswith(" ops")]
    assert {one.topic for one in findings} == {"versions", "devices", "compilers", "ops", "packages"}
    assert all(op in of_ops.value for op in verification.OPS)
    assert main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["topic"], row["name"], row["status"]) for row in rows] == [
        (one.topic, one.name, one.status) for one in findings
    ]


def test_calls_that_are_not_replayed(monkeypatch):
    monkeypatch.setenv("FASTVIT_REPLAY", "0")
    variable = finding("FASTVIT_REPLAY", machine._ops)
    assert (variable.value, variable.status) == ("0", "note")
    with ops.use_backend("aten", replay=False):
        assert finding("calls", machine._ops).value.startswith("in Python every time: FASTVIT_REPLAY or use_backend")


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
def test_the_path_of_every_op_and_why(monkeypatch):
    monkeypatch.setattr(backends, "HAVE_TRITON", True)
    for backend, interprets, value in (
        ("auto", False, "ATen: no GPU"),
        ("auto", True, "Triton's interpreter: TRITON_INTERPRET=1"),
        ("aten", True, "ATen: FASTVIT_BACKEND or use_backend says so"),
    ):
        monkeypatch.setattr(backends, "INTERPRET", interprets)
        with ops.use_backend(backend):
            assert finding("18 ops", machine._ops).value.startswith(value)
    monkeypatch.setattr(backends, "wants_triton", lambda x: True)
    monkeypatch.setattr(backends, "INTERPRET", False)
    monkeypatch.setattr(devices, "_target", lambda x: "sm_75")
    assert finding("18 ops", machine._ops).value.startswith("ATen: sm_75 is older than sm_80 (")


def test_a_gpu(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA Toy", major=9, minor=0, total_memory=80e9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    device = machine._gpu(0)
    assert (device.status, device.value) == ("ok", "NVIDIA Toy, sm_90, 80.0 GB, 132 multiprocessors")
    properties.major, properties.minor = 7, 5
    assert machine._gpu(0).value.endswith("older than sm_80, its ops run on ATen")


WHY_NO_GPU = [  # torch's CUDA, CUDA_VISIBLE_DEVICES, its error, the capability, and the answer's end
    (None, "all", None, None, "is a CPU build"),
    ("13.0", "all", "Found no NVIDIA driver.\nGo there", None, "Found no NVIDIA driver."),
    ("13.0", "", None, None, "CUDA_VISIBLE_DEVICES= hides every GPU"),
    ("13.0", "all", None, (7, 5), "Tesla T4 is sm_75, and the kernels need sm_80 or newer"),
]


@pytest.mark.parametrize(("built", "visible", "error", "capability", "expected"), WHY_NO_GPU)
def test_why_no_kernel_can_run_on_a_gpu(built, visible, error, capability, expected, monkeypatch):
    def init():
        raise RuntimeError(error)

    cuda = {"is_available": lambda: capability is not None, "init": init, "get_device_name": lambda: "Tesla T4"}
    for name, function in {**cuda, "get_device_capability": lambda: capability}.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.why_no_gpu().endswith(expected)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert capability is None or machine.why_no_gpu() == ""


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
    monkeypatch.setattr(machine.which_triton, "is_installed", lambda: True)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    for triton_version, status in (("3.7.9", "ok"), ("3.9.0", "note")):
        monkeypatch.setattr(machine, "version_of", lambda package, version=triton_version: version)
        assert finding("triton", machine._versions).status == status
    monkeypatch.setattr(machine.importlib, "import_module", import_module)
    vision = finding("torchvision", machine._packages)
    assert vision.status == finding("timm", machine._packages).status == "trouble"
    assert f"not of the same build as torch {torch.__version__}: pip uninstall torchvision" in vision.value


def test_without_triton_and_rich():
    program = "import sys; sys.modules['triton'] = sys.modules['rich'] = None\n"
    program += "from fastvit.cli import main; sys.exit(main(['doctor']))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert run.returncode == 0
    lines = run.stdout.splitlines()
    assert any(line.split()[:4] == ["-", "triton", "not", "installed:"] for line in lines)
    assert any("18 ops" in line and "ATen: triton is not installed" in line for line in lines)
