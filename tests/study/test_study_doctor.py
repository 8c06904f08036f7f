"""`fastvit doctor` on machines where something is missing, and `fastvit bench` in and outside a checkout."""

import json
import os
import subprocess
import sys
import tempfile
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


def found(name, probe):
    (finding,) = [finding for finding in probe() if finding.name == name]
    return finding


def test_it_knows_this_machine():
    findings = doctor()
    assert {finding.topic for finding in findings} == {"versions", "devices", "compilers", "caches", "ops", "packages"}
    assert {finding.status for finding in findings} <= {"ok", "note", "trouble"}
    by_name = {finding.name: finding.value for finding in findings}
    assert by_name["torch"].startswith(torch.__version__)
    assert str(ROOT / "fastvit") in by_name["fastvit"]
    assert set(verification.OPS) <= set(by_name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
def test_the_path_of_every_op_and_why(monkeypatch):
    with ops.use_backend("auto"):
        monkeypatch.setattr(backends, "HAVE_TRITON", True)
        monkeypatch.setattr(backends, "INTERPRET", False)
        assert found("mlp", machine._ops).value.startswith("ATen: no GPU")
        monkeypatch.setattr(backends, "INTERPRET", True)
        assert found("mlp", machine._ops).value.startswith("Triton's interpreter: TRITON_INTERPRET=1")
        assert found("mlp", machine._ops).status == "note"
    with ops.use_backend("aten"):
        assert found("mlp", machine._ops).value == "ATen: FASTVIT_BACKEND or use_backend says so"


def test_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setattr(backends, "wants_triton", lambda x: True)
    monkeypatch.setattr(backends, "INTERPRET", False)
    monkeypatch.setattr(devices, "_target", lambda x: "sm_75")
    assert found("attention", machine._ops).value == "ATen: sm_75 is older than sm_80"


def test_a_gpu_and_its_tuned_table(monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA Toy", major=9, minor=0, total_memory=80e9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (40e9, 80e9))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(_tuned, "FOLDER", tmp_path)
    monkeypatch.setenv("FASTVIT_CACHE_DIR", str(tmp_path / "user"))
    device, table, users = machine._gpu(0)
    assert device.value == "NVIDIA Toy, sm_90, 80.0 GB, 40.0 GB free, 132 multiprocessors"
    assert (device.status, table.value) == ("ok", "none for NVIDIA Toy: kernels run as shipped")
    assert users.value == "none"
    tables = {"use_triton_gemm": {"8,64,64,2,0": {"use": 1}}}
    data = {"format": _tuned.FORMAT, "gpu": "NVIDIA Toy", "arch": "sm_90", "tables": tables}
    path = tmp_path / "tuned_nvidia_toy.json"
    path.write_text(json.dumps(data))
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / path.name).write_text(json.dumps(data | {"measured": {"sources": "of other kernels"}}))
    _, table, users = machine._gpu(0)
    assert (table.status, table.value) == ("ok", f"{path}, 1 choices")
    assert users.status == "note"
    assert users.value.startswith(f"{tmp_path / 'user' / path.name} is ignored: it was measured with other kernels")
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
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    why = machine.why_no_gpu()
    assert why == expected or (expected and why.endswith(expected))


def test_a_probe_that_fails_is_a_finding_and_the_others_go_on(monkeypatch):
    def _broken():
        yield machine.Finding("devices", "before", "fine")
        raise OSError("no such bus\nsecond line")

    probes = (("devices", _broken), ("packages", machine._packages))
    monkeypatch.setattr(machine, "_PROBES", probes)
    before, broken, *others = doctor()
    assert before.status == "ok"
    assert (broken.topic, broken.name, broken.status) == ("devices", "broken", "trouble")
    assert broken.value == "OSError: no such bus"
    assert others


@pytest.mark.parametrize(
    ("version", "status"), [("2.8.1", "trouble"), ("2.9.0+cu128", "ok"), ("2.15.0a0+git", "ok"), ("2.16.0", "note")]
)
def test_versions_of_torch(version, status, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert found("torch", machine._versions).status == status


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    assert machine._folder("Triton", tmp_path / "deep" / "new").status == "ok"
    assert not (tmp_path / "deep").exists()  # it changes nothing
    (tmp_path / "kernel.bin").write_bytes(bytes(3_000_000))
    assert machine._folder("Triton", tmp_path).value == f"{tmp_path}, 2 files, 3.0 MB"

    def refuse(**_):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    finding = machine._folder("Triton", tmp_path)
    assert (finding.status, finding.value) == ("trouble", f"{tmp_path} cannot be written: Permission denied")


def test_a_compiler_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert found("C", machine._compilers).value.startswith("CC=no-such-compiler is not there")


@pytest.mark.parametrize(("versions", "status"), [(("2.13.0+cpu", "3.7.9"), "ok"), (("2.13.0", "3.9.0"), "note")])
def test_a_triton_that_was_not_tested_with_this_torch(versions, status, monkeypatch):
    monkeypatch.setattr(torch, "__version__", versions[0])
    monkeypatch.setattr(machine, "version_of", lambda package: versions[1])
    finding = found("triton", machine._launches)
    assert finding.status == status
    assert ("2.11 with 3.6.0, 2.13 with 3.7.1" in finding.value) == (status == "note")


def test_a_torchvision_without_its_compiled_operators(monkeypatch):
    def import_module(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(machine.importlib, "import_module", import_module)
    monkeypatch.setattr(machine, "version_of", lambda package: "9.9.9")
    finding = found("torchvision", machine._packages)
    assert finding.status == "trouble"
    assert f"not of the same build as torch {torch.__version__}: pip uninstall torchvision" in finding.value


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


def test_json_has_every_finding(capsys):
    assert main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["topic"], row["name"]) for row in rows} == {(f.topic, f.name) for f in doctor()}


# ---- bench ----


def test_bench_runs_pytest_in_the_checkout(monkeypatch):
    calls = []
    monkeypatch.setattr(
        bench.subprocess, "run", lambda command, cwd: calls.append((command, cwd)) or SimpleNamespace(returncode=3)
    )
    assert main(["bench", "--", "-k", "attention", "--dtype", "bfloat16"]) == 3
    ((command, folder),) = calls
    assert command == [
        sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "--quick", "-k", "attention",
        "--dtype", "bfloat16",
    ]  # fmt: skip
    assert folder == ROOT


def test_bench_collects_the_quick_cases(monkeypatch):
    """The benchmarks refuse Triton's interpreter and pytest-xdist, which the tests use."""
    for name in ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["bench", "--", "--collect-only", "-q", "-k", "layer_norm"]) == 0


def test_bench_outside_a_checkout_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site/fastvit/cli/bench.py"))
    assert main(["bench"]) == 2
    err = capsys.readouterr().err
    assert "clone the repository" in err
    assert err.count("\n") == 1
    monkeypatch.chdir(ROOT)  # the folder that it is called in
    assert bench.checkout() == ROOT


def test_bench_without_pytest_says_how_to_get_it(monkeypatch, capsys):
    find = bench.importlib.util.find_spec
    monkeypatch.setattr(
        bench.importlib.util, "find_spec", lambda name: None if name == "pytest_benchmark" else find(name)
    )
    assert main(["bench"]) == 2
    assert capsys.readouterr().err == "fastvit bench: pytest_benchmark is not installed: pip install 'fastvit[bench]'\n"
