"""Dispatch, fallback and tracing by fastvit/ops/runtime, and messages of Inductor about our ops."""

import importlib
import os
import runpy
import subprocess
import sys

import pytest
import torch

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import registry

WEIGHT = torch.linspace(-1, 1, 256).view(16, 16)


def test_one_tensor_twice_compiles():
    def attention(x):
        return ops.attention(*(x.view(2, 5, 1, 16),) * 3)

    x = torch.randn(2, 5, 16, requires_grad=True)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    got, want = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, attention))
    torch.testing.assert_close(got, want)


def test_backend_is_restored_and_checked():
    before = backends.settings()
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'cuda'"), ops.use_backend("cuda"):
        pass
    with pytest.raises(TypeError, match="strict must be True, False or None, got 1"), ops.use_backend("aten", strict=1):
        pass
    refused = pytest.raises(TypeError, match="replay must be True, False or None, got 'no'")
    with refused, ops.use_backend("aten", replay="no"):
        pass
    with pytest.raises(KeyError), ops.use_backend("triton", replay=False):
        raise KeyError
    assert (backends.settings(), backends.replays) == (before, True)
    with ops.use_backend("aten", replay=False), ops.use_backend("auto"):
        assert not backends.replays, "as outside"


def test_strict_is_what_holds_outside_unless_it_is_given():
    with ops.use_backend("aten", strict=True):
        with ops.use_backend("auto"):
            assert backends.settings() == ("auto", True)
            with ops.use_backend("triton", strict=False):
                assert backends.settings() == ("triton", False)
        assert backends.settings() == ("aten", True)


def test_the_environment_counts_whenever_it_changes(monkeypatch):
    """A notebook may set it after the import. A context has priority."""
    monkeypatch.setattr(backends, "_chosen", None)
    monkeypatch.setattr(backends, "INTERPRET", False)
    for name in backends.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    x, weight = torch.randn(2, 16), WEIGHT[0]
    ops.layer_norm(x, weight, weight)
    assert backends.settings() == ("auto", False)
    monkeypatch.setenv("FASTVIT_STRICT", "1")
    monkeypatch.setenv("FASTVIT_BACKEND", "triton")
    assert backends.settings() == ("triton", True)
    with pytest.raises(RuntimeError, match="Triton cannot run on cpu"):
        ops.layer_norm(x, weight, weight)
    with ops.use_backend("aten"):
        ops.layer_norm(x, weight, weight)
    monkeypatch.setenv("FASTVIT_BACKEND", "")
    ops.layer_norm(x, weight, weight)
    for name, value, message in (
        ("FASTVIT_BACKEND", "cuda", "FASTVIT_BACKEND must be one of .*'aten'.*, got 'cuda'"),
        ("FASTVIT_STRICT", "yes", "FASTVIT_STRICT must be 0 or 1, got 'yes'"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=message):
            ops.layer_norm(x, weight, weight)
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FASTVIT_BACKEND", "cuda", "FASTVIT_BACKEND must be one of .*, got 'cuda'"),
        ("FASTVIT_REPLAY", "off", "FASTVIT_REPLAY must be 0 or 1, got 'off'"),
        ("FASTVIT_GLUON", "2", "FASTVIT_GLUON must be 0 or 1, got '2'"),
    ],
)
def test_a_wrong_environment_is_an_error_at_import(name, value, message, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        runpy.run_path(backends.__file__)


def test_calls_are_not_replayed_if_the_environment_says_so(monkeypatch):
    for value, replays in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("FASTVIT_REPLAY", value)
        assert runpy.run_path(backends.__file__)["replays"] is replays


def test_without_triton():
    """Launchers and kernels are imported when one is first wanted."""
    lines = [
        "import sys",
        "sys.modules['triton'] = None",
        "import torch, fastvit",
        "fastvit.Block(32, 2)(torch.randn(2, 5, 32)).sum().backward()",
        "from fastvit.ops.runtime.registry import LAUNCH_MODULES",
        "kernels = ('fastvit.kernels.attention', 'fastvit.kernels.layer_norm')",
        "assert not [name for name in sys.modules if name in LAUNCH_MODULES or name.startswith(kernels)]",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"FASTVIT_STRICT": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, env=environment)


def test_an_error_of_a_launcher_s_module_is_not_hidden(triton_backend, device, monkeypatch):
    """Only `KernelUnsupported` falls back."""
    launch = importlib.import_module("fastvit.ops.layer_norm.launch")
    monkeypatch.setattr(launch, "_forward", lambda *_: 1 / 0)
    with ops.use_backend("triton", strict=False), pytest.raises(ZeroDivisionError):
        ops.layer_norm(torch.randn(2, 16, device=device), WEIGHT[0].to(device), WEIGHT[0].to(device))


def test_messages_do_not_write_out_the_arguments_of_our_ops(monkeypatch):
    """Before torch 2.13 they were composed for every op, arguments of arguments included: over two minutes of compiling
    12 blocks. Other libraries' ops keep theirs."""
    issue = pytest.importorskip("torch._inductor.exc").OperatorIssue
    monkeypatch.setattr(registry, "_SHOWS_LATER", False)
    monkeypatch.setattr(registry, "_done", set())
    monkeypatch.setattr(issue, "operator_str", staticmethod(issue.operator_str))
    with torch._subclasses.FakeTensorMode():
        ops.rms_norm(torch.empty(2, 3, 8), torch.empty(8))
    ours = torch.ops.fastvit.layer_norm_fwd.default
    assert issue.operator_str(ours, ["an argument"], {}) == "  target: fastvit.layer_norm_fwd.default"
    assert "an argument" in issue.operator_str(torch.ops.aten.mm.default, ["an argument"], {})
