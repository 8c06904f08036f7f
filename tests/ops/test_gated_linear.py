"""The registered ops of gated linear layers, and gated MLPs on vendors' matmuls."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import function, made
from oracle import assert_op_as_accurate, inputs

from fastvit.ops.linear import gated as registered
from fastvit.study.accuracy import formulas


@pytest.mark.parametrize("pair", [False, True], ids=["packed", "pair"])
def test_integers(pair, backend, device):
    """Every element is in its place, over several tiles: relu keeps small integers integers."""
    x, gate_weight, value_weight, gate_bias, value_bias = (
        inputs("integer", *shape, dtype=torch.float32, device=device, seed=i)
        for i, shape in enumerate(((3, 50, 16), (70, 16), (70, 16), (70,), (70,)))
    )
    want = [F.linear(x, w, b) for w, b in ((gate_weight, gate_bias), (value_weight, value_bias))]
    layers = gate_weight, value_weight, gate_bias, value_bias
    if not pair:
        layers = [half for i in (0, 2) for half in torch.cat(layers[i : i + 2]).chunk(2)]
    h, pre = registered.gated_act_fwd(x, *layers, "relu")
    assert torch.equal(pre, torch.cat(want, -1))
    assert torch.equal(h, want[0].relu() * want[1])
    assert torch.equal(registered.gated_fwd(x, *layers, "relu"), h)


@pytest.mark.parametrize(
    ("name", "dtype"), [("mlp swiglu", torch.bfloat16), ("layer_norm_mlp gated", torch.float32)], ids=str
)
def test_vendor_matmuls(name, dtype, monkeypatch, triton_backend, device):
    """Where the kernel is not used, gate and value are two matmuls into one buffer and a pass over it."""
    from fastvit.ops.linear import gated_launch as launch

    monkeypatch.setattr(launch, "is_our_matmul", lambda *_, **__: False)
    monkeypatch.delattr(launch, "_forward_launch")
    monkeypatch.delattr(launch, "gemm")
    assert_op_as_accurate(function(name), function(name, formulas), made(name, 3, 7, device, dtype), what=name)
