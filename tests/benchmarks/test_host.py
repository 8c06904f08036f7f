"""The command that measures the host: stand-ins for PyTorch's kernels, and what it prints."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness.provenance import ROOT

pytestmark = [
    pytest.mark.nightly,  # the stand-ins are compiled in 10 s
    pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="needs a C++ compiler"),
]
pytest.importorskip("triton")


class Results(TorchDispatchMode):
    """Records every function of ATen that is called, with the layout of its results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
        self.calls.append((func, [(t.dtype, t.shape, t.stride()) for t in tensors]))
        return results


def results_of(steps):
    with Results() as seen:
        for step in steps:
            step()
    return seen.calls


def test_stand_ins_return_what_pytorch_returns(monkeypatch):
    from benchmarks.host import stand_ins
    from benchmarks.host.__main__ import rows

    # conftest.py fills fresh memory, which counts as work; there fastvit runs on ATen, and is not compared
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    steps = [step for row in rows(torch.device("cpu")) for name, step in row.steps.items() if name != "fastvit"]
    expected = results_of(steps)
    assert "aten::mm" in stand_ins.real_work(steps)
    with stand_ins.stand_ins():
        found, real = results_of(steps), stand_ins.real_work(steps)
    assert not real
    for one, other in zip(expected, found, strict=True):
        assert one == other
    called = {str(func).removeprefix("aten.").removesuffix(".default") for func, _ in found} | {"cat"}  # by stack
    replaced = re.findall(r'impl\("(.+?)"', stand_ins.SOURCE.read_text())
    assert {name for name in replaced if name not in ("add_.Tensor", "copy_")} <= called  # these return their argument
    assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 2), torch.full((2, 2), 3.0)), "PyTorch's kernels are back"


def test_the_command_prints_its_tables():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.host"]
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert "attention_fwd_kernel" in printed
    assert "both passes, autocast" in printed
