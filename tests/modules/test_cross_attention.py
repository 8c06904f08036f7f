"""`CrossAttention` against its formula. `AttentionPoolLatent`, which is that with one query: test_pooling.py."""

from typing import Any

import pytest
import torch
from models import B, Calls, D, H, N, assert_module_as_accurate, assert_same_step, randomised, tokens, twins
from torch import Tensor, nn

from fastvit import layers

M = 5


class Eager(layers.CrossAttention):
    def forward(self, x: Tensor, context: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q = self.q(x).view(*x.shape[:2], H, -1).transpose(1, 2)
        k, v = self.kv(context).view(B, N, 2, H, -1).permute(2, 0, 3, 1, 4)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class Attending(nn.Module):
    """Has the context and a bias as parameters, so that a step compares their gradients."""

    def __init__(self, kind: type[layers.CrossAttention], mask: str, **arguments: Any) -> None:
        super().__init__()
        self.attn = kind(D, H, **arguments)
        self.context = nn.Parameter(torch.zeros(B, N, arguments.get("kv_dim", D)))
        self.mask: Tensor | None
        if mask == "padding":
            self.register_buffer("mask", (torch.arange(N) < torch.tensor([[N], [N - 4]]))[:, None, None, :])
        else:
            self.mask = nn.Parameter(torch.zeros(H, M, N)) if mask == "bias" else None

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, self.context, self.mask)


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {  # batch of the queries, mask, arguments
    "plain": (B, "", {"qkv_bias": True}),
    "another width, norms, padding": (B, "padding", {"kv_dim": 32, "qk_norm": True, "norm_layer": nn.LayerNorm}),
    "shared queries, bias": (1, "bias", {"qk_norm": True, "norm_layer": nn.RMSNorm, "proj_bias": False}),
}


def pair(case: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Ours, the formula, and queries."""
    batch, mask, arguments = CASES[case]
    ours, theirs = twins(*(Attending(kind, mask, **arguments) for kind in (layers.CrossAttention, Eager)))
    return ours, theirs, tokens(batch, M, D)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_as_accurate_as_the_formula(case: str, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    ours, theirs, x = pair(case)
    assert_module_as_accurate(ours.to(device), theirs.to(device), x.to(device), tokens(B, M, D)[1].to(device), dtype)


def test_it_is_one_op_unless_the_probabilities_are_wanted() -> None:
    ours, theirs, x = pair("shared queries, bias")
    with torch.no_grad(), Calls() as calls:
        ours(x.float())
    assert "fastvit::attention_fwd" in calls.names
    seen = []
    ours.attn.attn_drop.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape)))
    assert_same_step(ours, theirs, x.float())
    assert seen == [(B, H, M, N)]


def test_compile_fullgraph_and_dropout() -> None:
    ours, _, x = pair("another width, norms, padding")
    ours.attn.attn_drop.p = ours.attn.proj_drop.p = 0.5
    torch._dynamo.reset()
    compiled = torch.compile(ours.eval(), fullgraph=True, backend="aot_eager")
    assert_same_step(compiled, ours, x.float())
    assert (ours.train()(x.float()) == 0).float().mean() > 0.3
    ours.attn.proj_drop.p = 0.0
    assert not torch.equal(ours(x.float()), ours(x.float()))


def test_a_scale_of_the_users() -> None:
    ours, theirs, x = pair("plain")
    ours.attn.scale = theirs.attn.scale = 1.0
    assert_same_step(ours, theirs, x.float())


def test_errors() -> None:
    for arguments, message in (
        ({"num_heads": 5}, "num_heads must be a divisor of dim = 48, got 5"),
        ({"num_heads": 6}, "head_dim = dim / num_heads = 48 / 6 must be a multiple of 8 from 16 to 256, got 8"),
        ({"kv_dim": 0}, "kv_dim must be at least 1, got 0"),
        ({"attn_drop": 1.0}, r"attn_drop must be in \[0, 1\), got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            layers.CrossAttention(**{"dim": D, "num_heads": H, **arguments})
    attn = randomised(layers.CrossAttention(D, H))
    x, context = torch.randn(B, M, D), torch.randn(3, N, D)
    with pytest.raises(ValueError, match=r"x must have shape \(B, M, D\) or \(1, M, D\) with context's B = 3"):
        attn(x, context)
    with pytest.raises(ValueError, match=r"context must have shape \(B, N, kv_dim\) with kv_dim = 48, got \(17, 48\)"):
        attn(x, context[0])
    with pytest.raises(ValueError, match=r"x must have shape \(B, M, D\) with D = 48, got \(2, 5, 32\)"):
        attn(x[..., :32], context[:B])
    with pytest.raises(
        ValueError, match=r"context must have shape \(B, N, kv_dim\) with kv_dim = 48, got \(2, 17, 32\)"
    ):
        attn(x, context[:B, :, :32])
    with pytest.raises(TypeError, match="context must be a tensor, got NoneType"):
        attn(x, None)
    with pytest.raises(ValueError, match=r"attn_mask must be broadcastable to .*, got \(17, 5\)"):
        attn(x, context[:B], torch.ones(N, M))
