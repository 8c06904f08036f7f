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
from library_imports import import_library
from models import accelerate_as_it_was, assert_same_step, randomised
from stand_ins import library_class
from torch import Tensor, nn

import fastvit
from fastvit.integrations.transformers import layers as integration

D, H, HIDDEN = 48, 3, 96


def library_kind(model: str, suffix: str, base: type[nn.Module], **attributes: Any) -> Any:
    """Make a subclass with the name of a class of transformers."""
    file = model.lower()
    return library_class(f"transformers.models.{file}.modeling_{file}.{model}{suffix}", base, **attributes)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.num_attention_heads, self.dropout_prob, self.scaling, self.is_causal = H, 0.1, (D // H) ** -0.5, False
        self.query, self.key, self.value = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        p = self.dropout_prob if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2), None


class Output(nn.Module):
    def __init__(self, width: int = D, p: float = 0.2) -> None:
        super().__init__()
        self.dense, self.dropout = nn.Linear(width, D), nn.Dropout(p)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.dropout(self.dense(x))


class ViTOutput(Output):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return super().forward(x, residual) + residual


class Attention(nn.Module):
    inner: type[nn.Module]
    last: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.output = self.inner(), self.last()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.attention(x)[0], x)


def attention_of(model: str) -> nn.Module:
    inner, last = library_kind(model, "SelfAttention", SelfAttention), library_kind(model, "SelfOutput", Output)
    return library_kind(model, "Attention", Attention, inner=inner, last=last)()


class Intermediate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(D, HIDDEN), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(x))


class Checkpointing(nn.Module):
    """With activation checkpointing around the call, and then not in it."""

    gradient_checkpointing = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(super().__call__, *args, **kwargs)
        return super().__call__(*args, **kwargs)


class ViTLayer(Checkpointing):
    def __init__(self) -> None:
        super().__init__()
        self.attention = attention_of("ViT")
        self.intermediate = library_kind("ViT", "Intermediate", Intermediate)()
        self.output = library_kind("ViT", "Output", ViTOutput)(HIDDEN, 0.3)
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.layernorm_before(x))
        return self.output(self.intermediate(self.layernorm_after(x)), x)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.activation, self.fc2 = nn.Linear(D, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


LAYER = library_kind("ViT", "Layer", ViTLayer)


@pytest.fixture
def layer(device: torch.device) -> Any:
    import_library("transformers")
    return randomised(LAYER()).to(device).eval()


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


def test_attention_alone_returns_a_tensor(layer: Any, x: Tensor) -> None:
    layer.output.register_forward_hook(lambda *_: None)
    report = accelerate_as_it_was(layer, lambda: layer(x))
    assert "attention" in {entry.name for entry in report.accelerated}


def test_dropout_applies_where_it_stands(layer: Any) -> None:
    for training, ps in ((True, (0.1, 0.2, 0.3)), (False, (0.0, 0.0, 0.0))):
        attention, mlp = (half.branch for half in integration.read_layer("ViT", layer.train(training)).block)
        assert (attention.attn_drop, attention.proj_drop, mlp.drop2) == ps


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda attn: attn.register_forward_hook(lambda module, args, out: (out[0] * 2, None)), "attention has hooks"),
    (lambda attn: setattr(attn, "is_causal", True), "its attention is causal"),
    (lambda attn: setattr(attn.config, "_attn_implementation", "mine"), "its attention implementation is 'mine'"),
    (lambda attn: delattr(attn, "config"), "object has no attribute 'config'"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[reason for _, reason in CHANGES])
def test_what_is_put_on_inside_is_honoured(layer: Any, x: Tensor, change: Callable[[Any], Any], reason: str) -> None:
    change(layer.attention.attention)
    report = accelerate_as_it_was(layer, lambda: layer(x))
    reasons = {entry.name: entry.detail for entry in report.skipped}
    assert reason in reasons[""]
    assert reason in reasons["attention"]


def test_layers_of_version_4_are_left(monkeypatch: pytest.MonkeyPatch, layer: Any, x: Tensor) -> None:
    monkeypatch.setattr(import_library("transformers"), "__version__", "4.57.6")
    report = accelerate_as_it_was(layer, lambda: layer(x))
    reasons = {entry.name: entry.detail for entry in report.skipped}
    assert reasons[""] == reasons["attention"] == "transformers 4.57.6: its layers are known from version 5 on"


def test_activations_of_dinov2_had_another_name(x: Tensor) -> None:
    mlp = randomised(library_kind("Dinov2", "MLP", Mlp)()).to(x.device)
    report = accelerate_as_it_was(nn.Sequential(mlp), lambda: mlp(x))
    assert report.fused("MLP") == (1, 1)
