"""Layers of earlier versions of transformers 5, with attention and MLP in two modules each. Stand-ins have their
structure and names; `make versions` runs test_known_models.py with the real versions.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_models import FunctionModule
from library_imports import import_library
from models import accelerate_as_it_was, assert_same_step, randomised
from stand_ins import library_class
from torch import Tensor, nn

import fastvit
from fastvit.integrations.transformers import layers
from fastvit.integrations.transformers.classes import VIT

D, H, HIDDEN = 48, 3, 96


class Checkpointing(FunctionModule):
    """With activation checkpointing around the call, and then not in it."""

    gradient_checkpointing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(super().__call__, *args, **kwargs)
        return super().__call__(*args, **kwargs)


def stand_in(name: str, forward: Callable[..., Any], base: type = FunctionModule, **modules: nn.Module) -> Any:
    """Make a module with the name of a class of transformers."""
    file = "dinov2" if name.startswith("Dinov2") else "vit"
    return library_class(f"transformers.models.{file}.modeling_{file}.{name}", base)(forward, **modules)


def attend(m: Any, x: Tensor) -> tuple[Tensor, None]:
    q, k, v = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (m.query, m.key, m.value))
    p = m.dropout_prob if m.training else 0.0
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2), None


def last(name: str, residual: bool, width: int, p: float) -> nn.Module:
    def forward(m: Any, x: Tensor, before: Tensor) -> Tensor:
        out = m.dropout(m.dense(x))
        return out + before if residual else out

    return stand_in(name, forward, dense=nn.Linear(width, D), dropout=nn.Dropout(p))


@pytest.fixture
def layer(device: torch.device) -> Any:
    import_library("transformers")
    three = {name: nn.Linear(D, D) for name in ("query", "key", "value")}
    inner = stand_in("ViTSelfAttention", attend, **three)
    inner.config = SimpleNamespace(_attn_implementation="sdpa")
    inner.num_attention_heads, inner.dropout_prob, inner.scaling, inner.is_causal = H, 0.1, (D // H) ** -0.5, False
    output = last("ViTSelfOutput", False, D, 0.2)
    attention = stand_in("ViTAttention", lambda m, x: m.output(m.attention(x)[0], x), attention=inner, output=output)
    intermediate = stand_in(
        "ViTIntermediate", lambda m, x: m.intermediate_act_fn(m.dense(x)), dense=nn.Linear(D, HIDDEN),
        intermediate_act_fn=nn.GELU(),
    )  # fmt: skip

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x + m.attention(m.layernorm_before(x))
        return m.output(m.intermediate(m.layernorm_after(x)), x)

    module = stand_in(
        "ViTLayer", forward, Checkpointing, attention=attention, intermediate=intermediate,
        output=last("ViTOutput", True, HIDDEN, 0.3), layernorm_before=nn.LayerNorm(D), layernorm_after=nn.LayerNorm(D),
    )  # fmt: skip
    return randomised(module).to(device).eval()


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(2, 17, D, device=device)


def test_a_whole_layer(layer: Any, x: Tensor) -> None:
    own, calls = copy.deepcopy(layer), []
    report = fastvit.accelerate(layer, strict=True)
    assert report.accelerated[0].detail == "layer_norm_attention, layer_norm_mlp"
    assert_same_step(layer, own, x)
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = lambda function, *args: calls.append(function) or function(*args)
    layer.train()(x)
    assert len(calls) == 1


@pytest.mark.parametrize("hooked", ["output", "attention.attention"])
def test_a_hook_is_honoured(layer: Any, x: Tensor, hooked: str) -> None:
    """Attention without it stays fused, and returns a tensor."""
    layer.get_submodule(hooked).register_forward_hook(
        lambda _, __, out: out * 2 if isinstance(out, Tensor) else (out[0] * 2, None)
    )
    report = accelerate_as_it_was(layer, lambda: layer(x))
    assert ("attention" in {entry.name for entry in report.accelerated}) == (hooked == "output")


def test_biases_beside_the_layers_are_a_reason(layer: Any, x: Tensor) -> None:
    """VideoMAE's attention has them before version 5.8."""
    layer.attention.attention.q_bias = nn.Parameter(torch.ones(D))
    report = accelerate_as_it_was(layer, lambda: layer(x))
    assert {e.detail for e in report.skipped if e.name in ("", "attention")} == {"parameters beside its layers: q_bias"}


def test_dropout_applies_where_it_stands(layer: Any) -> None:
    for training, ps in ((True, (0.1, 0.2, 0.3)), (False, (0.0, 0.0, 0.0))):
        attention, mlp = (half.branch for half in layers.read_layer(VIT, layer.train(training)))
        assert (attention.attn_drop, attention.proj_drop, mlp.drop2) == ps


def test_custom_attention_and_layers_of_version_4_are_left(
    monkeypatch: pytest.MonkeyPatch, layer: Any, x: Tensor
) -> None:
    def assert_left(reason: str) -> None:
        report = accelerate_as_it_was(layer, lambda: layer(x))
        reasons = {entry.name: entry.detail for entry in report.skipped}
        assert reasons[""] == reasons["attention"] == reason

    layer.attention.attention.config._attn_implementation = "mine"
    assert_left("its attention implementation is 'mine'")
    monkeypatch.setattr(import_library("transformers"), "__version__", "4.57.6")
    assert_left("transformers 4.57.6: its layers are known from version 5 on")


def gated(m: Any, x: Tensor) -> Tensor:
    gate, value = m.weights_in(x).chunk(2, dim=-1)
    return m.weights_out(F.silu(gate) * value)


def test_mlps_of_dinov2_had_other_names(x: Tensor) -> None:
    plain = stand_in(
        "Dinov2MLP", lambda m, x: m.fc2(m.activation(m.fc1(x))), fc1=nn.Linear(D, HIDDEN), activation=nn.GELU(),
        fc2=nn.Linear(HIDDEN, D),
    )  # fmt: skip
    swiglu = stand_in("Dinov2SwiGLUFFN", gated, weights_in=nn.Linear(D, 2 * HIDDEN), weights_out=nn.Linear(HIDDEN, D))
    model = randomised(nn.Sequential(plain, swiglu)).to(x.device)
    report = accelerate_as_it_was(model, lambda: model(x))
    assert [entry.detail for entry in report.accelerated] == ["mlp", "mlp"]
