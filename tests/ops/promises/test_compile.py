"""Every op compiles without a graph break, with dynamic shapes, and is exported."""

import pytest
import torch
from op_cases import ROWS, function, made, results

from fastvit import ops

# one row of every op, and of those whose options take another way through Python
COMPILED = {row.op: name for name, row in reversed(ROWS.items())}.values()
COMPILED = [*COMPILED, "attention relative", "layer_norm_mlp gated"]


@pytest.mark.parametrize("name", COMPILED)
def test_compile(name, device):
    """With static shapes at first, and dynamic ones from the second batch size on. Views of a result, which the graph
    returns instead of it, keep its gradient."""

    def parts(**tensors):
        outputs = function(name)(**tensors)
        first, *others = outputs if isinstance(outputs, tuple) else [outputs]
        return first[:1], first[1:], *others

    torch._dynamo.reset()
    compiled = torch.compile(parts, backend="aot_eager", fullgraph=True)
    for B in (2, 5):
        tensors = made(name, B, 6, device)
        torch.testing.assert_close(results(compiled, tensors), results(parts, tensors))


class Module(torch.nn.Module):
    def forward(self, qkv):
        return ops.attention_qkvpacked(qkv, dropout_p=0.1 if self.training else 0.0).flatten(2)


def test_export(device):
    tokens = torch.export.Dim("tokens", min=2, max=100)
    qkv, longer = (torch.randn(2, N, 3, 2, 16, device=device) for N in (18, 31))
    program = torch.export.export(Module().eval(), (qkv,), dynamic_shapes={"qkv": {1: tokens}})
    assert torch.equal(program.module()(longer), Module().eval()(longer))
