"""A torch that lacks a private name which fastvit uses for speed still imports it and computes the same."""

import ast
import os
import pickle
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from fastvit.ops.runtime import torch_private

PACKAGE = Path(torch_private.__file__).parents[2]

# Its arguments are paths in torch's namespace. For each, and for none, a fork of it hides the name while fastvit is
# imported, and runs a model forward and backward. Prints a pickled {path: results, or the traceback}.
CHILD = """
import os, pickle, sys, traceback
import torch
import torch.utils.flop_counter  # imports triton, once for all forks
from torch._ops import _OpNamespace

class Absent:
    def __get__(self, instance, owner):
        raise AttributeError

def hide(path):
    *parents, name = path.split(".")
    if parents[:2] == ["ops", "aten"]:
        hidden, find = parents[2], _OpNamespace.__getattr__
        assert name == "default" and find(torch.ops.aten, hidden)
        torch.ops.aten.__dict__.pop(hidden, None)
        def without(self, name):
            if name == hidden:
                raise AttributeError(name)
            return find(self, name)
        _OpNamespace.__getattr__ = without
        return lambda: None
    owner = torch
    for parent in parents:
        owner = getattr(owner, parent)
    if name not in vars(owner):  # inherited from a class of C++, which cannot be changed
        setattr(owner, name, Absent())
        return lambda: delattr(owner, name)
    value = getattr(owner, name)
    delattr(owner, name)
    return lambda: setattr(owner, name, value)

def results(path):
    restore = hide(path) if path else lambda: None
    from fastvit import Block, ops
    from fastvit.ops.runtime import torch_private
    absent = [v for v in vars(torch_private).values() if v is None or v is False]
    assert len(absent) == bool(path), absent
    restore()  # torch itself cannot do without
    torch.manual_seed(0)
    block = Block(32, 2).requires_grad_(True)
    x = torch.randn(2, 18, 32, requires_grad=True)
    y = ops.linear(block(x), torch.ones(8, 32), activation="gelu_tanh")
    y.square().sum().backward()
    with torch.no_grad():
        plain = ops.mlp(x, torch.ones(8, 32), None, torch.ones(32, 8), None, activation="gelu", residual=x)
        q, k, v = torch.randn(3, 2, 18, 2, 16)
        heads = ops.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        cast = ops.linear(x, torch.ones(8, 32)).float()
    tensors = [y, x.grad, *(p.grad for p in block.parameters()), plain, heads, cast]
    try:
        with torch.autograd.forward_ad.dual_level():
            ops.linear(torch.autograd.forward_ad.make_dual(x, x), torch.ones(8, 32))
    except NotImplementedError as error:
        return [t.detach().numpy() for t in tensors], str(error)

answers = {}
for path in ["", *sys.argv[1:]]:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            answer = results(path)
        except BaseException:
            answer = traceback.format_exc()
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answers[path] = pickle.load(pipe)
    os.wait()
sys.stdout.buffer.write(pickle.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers():
    environment = os.environ | {"FASTVIT_BACKEND": "aten", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, *torch_private.PATHS]
    return pickle.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)


@pytest.mark.parametrize("path", torch_private.PATHS)
def test_without_a_name(path, answers):
    tensors, message = answers[path]
    assert "does not support forward-mode AD" in message
    for got, want in zip(tensors, answers[""][0], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(abs(want).max()))


def private_names(path):
    """Names with an underscore that a file takes from torch: `torch._C`, `aten._flash`, `from torch import _x`."""
    roots = {"torch", "aten", "forward_ad", "F", "Tensor"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in [*node.module.split("."), *(alias.name for alias in node.names)]:
                if name.startswith("_"):
                    yield f"{node.module}: {name}"
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            value = node.value
            while isinstance(value, ast.Attribute):
                value = value.value
            if isinstance(value, ast.Name) and value.id in roots:
                yield ast.unparse(node)


# backend and autograd read the level of forward-mode AD; torch_private.py says whether there is one
LEVEL = {"forward_ad._current_level"}
# the graph route is made of Dynamo's own terms, and imported by those who compile
ALLOWED = {
    "ops/runtime/autograd.py": LEVEL,
    "ops/runtime/backend.py": LEVEL,
    "graph/dynamo.py": {"torch._dynamo", "torch._inductor: _inductor", "torch._inductor.compile_fx: _inductor"},
    "graph/match/rewriter.py": {"torch._ops"},
    "graph/match/values.py": {"torch._ops"},
    "study/memory/plan.py": {"torch.autograd.Variable._execution_engine"},
    "warmup.py": {"torch.utils._pytree: _pytree", "torch.utils._python_dispatch: _python_dispatch", "torch._C"},
}
# of studies, which run models under modes and on fake tensors
INSTRUMENTS = re.compile(
    r"torch\._subclasses\.fake_tensor: |torch\.utils\._python_dispatch: |torch\.utils\._pytree: |torch\.ops\.aten\."
)


def test_no_other_private_name_is_used():
    used = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        for name in private_names(file):
            if path != "ops/runtime/torch_private.py" and not (path.startswith("study/") and INSTRUMENTS.match(name)):
                used[path].add(name)
    assert used == ALLOWED
