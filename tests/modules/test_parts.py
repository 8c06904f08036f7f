"""Cross-attention, attention pooling, gated MLPs and norms: against formulas, the reference and timm."""

import functools
from typing import Any

import pytest
import torch
from graph_models import FunctionModule
from library_imports import import_timm
from models import B, Calls, D, H, N, assert_module_as_accurate, assert_same_step, tokens, twins
from oracle import inputs
from torch import Tensor, nn

from fastvit import layers, reference
from fastvit.modules.parts import ACT_LAYERS
from fastvit.modules.pooling import AttentionPoolLatent
from fastvit.reference import ops as formulas

M = 5
PADDING = (torch.arange(N) < torch.tensor([[N], [N - 4]]))[:, None, None, :]


# ---- cross-attention ----


class Eager(layers.CrossAttention):
    def forward(self, x: Tensor, context: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, (k, v) = self.q(x).unflatten(-1, (H, -1)), self.kv(context).unflatten(-1, (2, H, -1)).unbind(2)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        return self.proj(formulas.attention(q, k, v, attn_mask=attn_mask, scale=self.scale).flatten(2))


def attending(kind: type[layers.CrossAttention], mask: str, **arguments: Any) -> FunctionModule:
    """Has the context and a bias as parameters, so that a step compares their gradients."""
    masks = {"padding": nn.Buffer(PADDING), "bias": nn.Parameter(torch.zeros(H, M, N)), "": None}
    context = nn.Parameter(torch.zeros(B, N, arguments.get("kv_dim", D)))
    return FunctionModule(
        lambda m, x: m.attn(x, m.context, m.mask), attn=kind(D, H, **arguments), context=context, mask=masks[mask]
    )


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {  # batch of the queries, mask, arguments
    "plain": (B, "", {"qkv_bias": True}),
    "another width, norms, padding": (B, "padding", {"kv_dim": 32, "qk_norm": True, "norm_layer": nn.LayerNorm}),
    "shared queries, bias": (1, "bias", {"qk_norm": True, "norm_layer": nn.RMSNorm, "proj_bias": False}),
}


def pair(case: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Ours, the formula, and queries."""
    batch, mask, arguments = CASES[case]
    ours, theirs = twins(*(attending(kind, mask, **arguments) for kind in (layers.CrossAttention, Eager)))
    return ours, theirs, tokens(batch, M, D)[0]


@pytest.mark.parametrize("case", CASES)
def test_cross_attention(case: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs, x = pair(case)
        dy = tokens(B, M, D)[1].to(device)
        assert_module_as_accurate(ours.to(device), theirs.to(device), x.to(device), dy, dtype)


def test_cross_attention_is_one_op_unless_the_probabilities_are_wanted() -> None:
    ours, theirs, x = pair("shared queries, bias")
    with torch.no_grad(), Calls() as calls:
        ours(x.float())
    assert "fastvit::attention_fwd" in calls.names
    ours.attn.scale = theirs.attn.scale = 1.0
    assert_same_step(ours, theirs, x.float())
    seen = []
    ours.attn.attn_drop.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape)))
    assert_same_step(ours, theirs, x.float())
    assert seen == [(B, H, M, N)]
    ours.attn.attn_drop.p = 0.5
    assert not torch.equal(ours(x.float()), ours(x.float()))
    ours.attn.proj_drop.p = 0.5
    assert (ours(x.float()) == 0).float().mean() > 0.3
    assert torch.equal(ours.eval()(x.float()), ours(x.float()))


# ---- attention pooling ----


def pools() -> tuple[nn.Module, nn.Module]:
    """Ours and the reference's."""
    norm, act = reference.NORMS["layernorm"], reference.ACTIVATIONS["gelu_tanh"]
    theirs = reference.AttentionPoolLatent(D, H, 2.0, norm, act)
    return twins(AttentionPoolLatent(D, H, 2.0, act_layer="gelu_tanh"), theirs)


@pytest.mark.parametrize("heads", [3, 4], ids=["16 channels a head", "12, which no op takes"])
def test_pooling_without_biases_of_qkv_is_timms(heads: int) -> None:
    """With a mask and without."""
    options = {"num_heads": heads, "mlp_ratio": 2.0, "qkv_bias": False, "norm_layer": nn.LayerNorm}
    ours, theirs = twins(AttentionPoolLatent(D, **options), import_timm().layers.AttentionPoolLatent(D, **options))
    x = torch.randn(B, N, D)
    assert_same_step(ours, theirs, x)
    assert not torch.equal(ours(x, PADDING), ours(x))
    for pool in (ours, theirs):
        pool.forward = functools.partial(pool.forward, attn_mask=PADDING)
    assert_same_step(ours, theirs, x)


def test_pooling_is_fused_and_its_query_is_computed_once() -> None:
    pool, _ = pools()
    with torch.no_grad(), Calls() as calls:
        pool(torch.randn(B, N, D))
    assert {"fastvit::attention_fwd", "fastvit::layer_norm_fwd"} <= {*calls.names}
    assert "aten::gelu" not in calls.names
    seen = []
    pool.q.register_forward_hook(lambda _, __, y: seen.append(tuple(y.shape)))
    pool(torch.randn(B, N, D))
    assert seen == [(1, 1, D)]


def test_changed_layers_of_pooling_are_honoured() -> None:
    x = torch.randn(B, N, D)
    for path in ("q", "kv", "proj", "norm", "mlp", "mlp.fc1", "mlp.act", "mlp.fc2"):
        ours, theirs = pools()
        for pool in (ours, theirs):
            pool.get_submodule(path).register_forward_hook(lambda _, __, y: y * 2)
        assert_same_step(ours, theirs, x)
    for pool in (ours, theirs):
        pool.norm = nn.RMSNorm(D)
    assert_same_step(ours, theirs, x)


# ---- MLPs, norms, activations, patch embedding ----

NORM = functools.partial(nn.LayerNorm, eps=1e-6)
MLPS: dict[str, tuple[str, dict[str, Any], bool]] = {  # the class, its arguments, and whether they are fused
    "SwiGLU, aligned, of gelu": ("SwiGLU", {"hidden_features": 41, "align_to": 8, "act_layer": nn.GELU}, True),
    "SwiGLU with a norm": ("SwiGLU", {"hidden_features": 40, "norm_layer": NORM, "out_features": 8}, True),
    "GluMlp of gelu": ("GluMlp", {"hidden_features": 80, "act_layer": nn.GELU, "norm_layer": NORM}, True),
    "GluMlp": ("GluMlp", {}, False),  # of sigmoid
    "Mlp with a norm": ("Mlp", {"hidden_features": 40, "norm_layer": NORM}, True),
}


@pytest.mark.parametrize("name", MLPS)
def test_mlps_are_timms(name: str, device: torch.device) -> None:
    kind, arguments, fused = MLPS[name]
    ours, theirs = (getattr(library, kind)(24, **arguments).to(device) for library in (layers, import_timm().layers))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = inputs("normal", 2, 5, 24, dtype=torch.float64, device=device)
    dy = inputs("normal", 2, 5, arguments.get("out_features", 24), dtype=torch.float64, device=device, seed=3)
    with Calls() as calls:
        assert_module_as_accurate(ours, theirs, x, dy)
    assert ("fastvit::linear_act_fwd" in calls.names) == fused


def test_activations_as_modules() -> None:
    """Which run where a hook or another layer leaves an MLP to its modules."""
    x = torch.randn(64)
    for name, kind in ACT_LAYERS.items():
        torch.testing.assert_close(kind()(x), reference.ACTIVATIONS[name]()(x))
