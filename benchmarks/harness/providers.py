"""Build every op and model as each provider runs it: eager, SDPA, compiled, fastvit. A builder draws its tensors in one
fixed order, so that all providers get the same numbers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastvit
from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.families import VIT_B_16, output
from benchmarks.harness.photographs import MEAN, SOURCE, STD
from fastvit import layers, ops, reference, zoo
from fastvit.eva import Eva
from fastvit.reference.eva import Eva as ReferenceEva
from fastvit.study.accuracy import formulas as eager
from fastvit.study.sources.baselines import use_sdpa
from fastvit.study.sources.from_zoo import reference_arguments
from fastvit.zoo.eva import CONFIGS as EVAS

PROVIDERS = ("eager", "sdpa", "compile", "graph", "fused")
COMPILED = ("compile", "graph")
_OF_ATTENTION = ("eager", "sdpa", "compile", "fused")


def compiled(provider: str, forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return forward under torch.compile; for the provider "graph", with fastvit's ops in the graph."""
    compiler = fastvit.compile if provider == "graph" else torch.compile
    return compiler(forward, dynamic=False, **options)


def attention(
    provider: str, draw: Draw, B: int, N: int, H: int, d: int, separate: bool = False, dropout_p: float = 0.0,
    kv_heads: int = 0, mask: str = "",
) -> Runner:  # fmt: skip
    """kv_heads: heads of k and v, fewer than H. mask: "padding" hides the last third of the keys of every other sample;
    "positions" adds H x N x N numbers, which all samples share and which require a gradient."""
    if separate or kv_heads or mask:
        q, k, v = draw.normal(B, N, H, d), *(draw.normal(B, N, kv_heads or H, d) for _ in "kv")
        attn_mask = _mask(draw, B, N, H, mask) if mask else None
        run = _function(provider, "attention", attn_mask=attn_mask, **_of_attention(provider, dropout_p))
        return Runner(lambda: run(q, k, v), (q, k, v), () if attn_mask is None else (attn_mask,))
    qkv = draw.normal(B, N, 3, H, d)
    run = _function(provider, "attention_qkvpacked", **_of_attention(provider, dropout_p))
    return Runner(lambda: run(qkv), (qkv,))


def _function(provider: str, op: str, **options: Any) -> Callable[..., Any]:
    """Return the op, or its formula in plain PyTorch."""
    return functools.partial(getattr(ops if provider == "fused" else eager, op), **options)


def _of_attention(provider: str, dropout_p: float = 0.0) -> dict[str, Any]:
    return {"dropout_p": dropout_p} if provider == "fused" else {"sdpa": provider == "sdpa"}


def attention_varlen(provider: str, draw: Draw, B: int, N: int, H: int, d: int, kv_heads: int = 0) -> Runner:
    """B images: the longest has N tokens, the others three quarters, a half and a quarter of that."""
    lengths = [max(N * (4 - i % 4) // 4, 1) for i in range(B)]
    ends = [0, *itertools.accumulate(lengths)]
    q, k, v = draw.normal(ends[-1], H, d), *(draw.normal(ends[-1], kv_heads or H, d) for _ in "kv")
    # numbers on the host for eager: reading them from a GPU would make it wait
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=draw.device) if provider == "fused" else ends
    run = _function(provider, "attention_varlen", **({} if provider == "fused" else _of_attention(provider)))
    return Runner(lambda: run(q, k, v, cu_seqlens, N), (q, k, v))


def rotary(
    provider: str, draw: Draw, B: int, N: int, H: int, d: int, spelling: str = "halves", tables: str = "shared"
) -> Runner:
    """tables: "shared", or one for each "sample" or "head"."""
    x, positions = draw.normal(B, N, H, d), _positions(draw, N, d, spelling, _OF_TABLES[tables](B, H))
    function = _function(provider, "rotary")
    return Runner(lambda: function(x, positions), (x,))


def qk_norm(
    provider: str, draw: Draw, B: int, N: int, H: int, d: int, norm: str = "layer", spelling: str | None = None,
    tables: str = "shared",
) -> Runner:  # fmt: skip
    """Normalise q and k of a packed qkv. spelling: that of rotary positions, or None. tables: as in `rotary`."""
    qkv, norms = draw.normal(B, N, 3, H, d), (_norm_of_kind(draw, d, norm), _norm_of_kind(draw, d, norm))
    positions = None if spelling is None else _positions(draw, N, d, spelling, _OF_TABLES[tables](B, H))
    function = _function(provider, "qk_norm")
    q, k = qkv.detach().unbind(2)[:2]
    leaves = q.requires_grad_(), k.requires_grad_()
    return Runner(lambda: function(*leaves, *norms, positions), leaves, _parameters(norms))


def dropout(provider: str, draw: Draw, B: int, N: int, D: int) -> Runner:
    x = draw.normal(B, N, D)
    return Runner(lambda: ops.dropout(x, 0.1), (x,))


def layer_norm(provider: str, draw: Draw, B: int, N: int, D: int, norm: str = "layer") -> Runner:
    """norm: as the op's."""
    x, parameters = draw.normal(B, N, D), _norm(draw, D)[: 1 if norm == "rms" else 2]
    function = _function(provider, "layer_norm", norm=norm)
    return Runner(lambda: function(x, *parameters), (x,), parameters)


def add_layer_norm(
    provider: str, draw: Draw, B: int, N: int, D: int, layer_scale: bool = True, row_scale: bool = False
) -> Runner:
    residual, branch, norm = draw.normal(B, N, D), draw.normal(B, N, D), _norm(draw, D)
    gamma, rows = draw.normal(D) if layer_scale else None, _row_scale(draw, B) if row_scale else None
    parameters = norm if gamma is None else (*norm, gamma)
    function = _function(provider, "add_layer_norm", layer_scale=gamma, row_scale=rows)
    return Runner(lambda: function(residual, branch, *norm), (residual, branch), parameters)


def linear(
    provider: str, draw: Draw, B: int, N: int, D: int, out: int,
    activation: str | None = None, residual: bool = False, scales: bool = False,
) -> Runner:  # fmt: skip
    """scales: layer_scale, row_scale and the residual that they go with."""
    x = draw.normal(B, N, D)
    weight, bias = draw.normal(out, D, std=D**-0.5), draw.normal(out, std=0.1)
    other = draw.normal(B, N, out) if residual or scales else None
    gamma, rows = _scales(draw, B, out, scales)
    optional = tuple(t for t in (gamma, other) if t is not None)
    function = _function(provider, "linear", activation=activation, residual=other, layer_scale=gamma, row_scale=rows)
    return Runner(lambda: function(x, weight, bias), (x,), (weight, bias, *optional))


def layer_norm_linear(provider: str, draw: Draw, B: int, N: int, D: int, out: int) -> Runner:
    x, parameters = draw.normal(B, N, D), (*_norm(draw, D), draw.normal(out, D, std=D**-0.5), draw.normal(out))
    function = _function(provider, "layer_norm_linear")
    return Runner(lambda: function(x, *parameters), (x,), parameters)


def layer_norm_attention(
    provider: str, draw: Draw, B: int, N: int, D: int, H: int, rotary: str | None = None, qk_norm: str | None = None
) -> Runner:
    """The residual is the norm's input. rotary: "halves" or "interleaved"; qk_norm: "layer" or "rms"."""
    x, parameters = draw.normal(B, N, D), _norm(draw, D)
    for out in (3 * D, D):
        parameters += (draw.normal(out, D, std=D**-0.5), draw.normal(out, std=0.1))
    options: dict[str, Any] = {"sdpa": True} if provider == "sdpa" else {}
    if rotary is not None:
        options["rotary"] = _positions(draw, N, D // H, rotary)
    leaves = parameters
    if qk_norm is not None:
        options["qk_norm"] = norms = tuple(_norm_of_kind(draw, D // H, qk_norm) for _ in "qk")
        leaves = (*parameters, *_parameters(norms))
    function = _function(provider, "layer_norm_attention", residual=x, **options)
    return Runner(lambda: function(x, *parameters, H), (x,), leaves)


def mlp(
    provider: str, draw: Draw, B: int, N: int, D: int,
    activation: str = "gelu", recompute: str = "activation", dropout_p: float = 0.0, residual: bool = False,
    scales: bool = False, norm: bool = False, hidden: int = 0, inner: bool = False,
) -> Runner:  # fmt: skip
    """D -> hidden, by default 4 D, -> D. norm: after a LayerNorm; the residual is then the norm's input. inner: with a
    LayerNorm of the gated product."""
    x, hidden = draw.normal(B, N, D), hidden or 4 * D
    rows = 2 * hidden if activation in eager.GATED else hidden
    parameters = _norm(draw, D) if norm else ()
    parameters += (draw.normal(rows, D, std=D**-0.5), draw.normal(rows, std=0.1))
    parameters += (draw.normal(D, hidden, std=hidden**-0.5), draw.normal(D, std=0.1))
    gamma, row_scale = _scales(draw, B, D, scales)
    options: dict[str, Any] = {"activation": activation, "layer_scale": gamma, "row_scale": row_scale}
    options["residual"] = x if residual or scales or norm else None
    if provider == "fused":
        options |= {"recompute": recompute, "dropout_p": dropout_p}
    leaves = parameters if gamma is None else (*parameters, gamma)
    if inner:
        inner_norm = _norm(draw, hidden)
        leaves, options["inner_norm"] = (*leaves, *inner_norm), (*inner_norm, 1e-6)
    function = _function(provider, "layer_norm_mlp" if norm else "mlp", **options)
    return Runner(lambda: function(x, *parameters), (x,), leaves)


def patch_embed(provider: str, draw: Draw, B: int, px: int, patch: int, D: int, image: str = "photographs") -> Runner:
    """image: "photographs", "wanted" (with a gradient) or "uint8" (normalised by the kernel)."""
    if image == "uint8":
        pixels = draw.bytes(B, 3, px, px)
    else:
        pixels = draw.photographs(B, px) if image == "photographs" else draw.normal(B, 3, px, px)
    weight, bias = draw.normal(D, 3, patch, patch, std=(3 * patch * patch) ** -0.5), draw.normal(D, std=0.1)
    position, prefix = draw.normal((px // patch) ** 2, D), draw.normal(1, D)
    parameters = (weight, bias, position, prefix)
    options: dict[str, Any] = {"mean": MEAN, "std": STD} if image == "uint8" else {}
    options |= {"pos_embed": position, "prefix": prefix}
    function = _function(provider, "patch_embed", **options)
    return Runner(lambda: function(pixels, weight, bias), (pixels,), parameters)


def block(provider: str, draw: Draw, B: int, N: int, D: int, H: int) -> Runner:
    kind = layers.Block if provider == "fused" else reference.Block
    module = draw.module(lambda: kind(D, H, qkv_bias=True))
    if provider == "sdpa":
        use_sdpa(module)
    return Runner.of(module, draw.normal(B, N, D))


def model(provider: str, draw: Draw, name: str, B: int, px: int, **options: int) -> Runner:
    """Build a model of the zoo, on photographs."""
    kinds = (Eva, ReferenceEva) if name in EVAS else (fastvit.VisionTransformer, reference.VisionTransformer)
    kind: Callable[..., Any] = kinds[provider != "fused"]
    config = zoo.config(name) if provider == "fused" else reference_arguments(name)
    vit = draw.module(lambda: kind(**{**config, "img_size": px, **options}))
    if provider == "sdpa":
        use_sdpa(vit)
    return Runner.of(vit, draw.photographs(B, px))


def accelerate(provider: str, draw: Draw, library: str, B: int, **options: int) -> Runner:
    """ViT-B/16 of another library: unchanged (as "sdpa", which the libraries use, or compiled), or accelerated."""
    vit = draw.module(lambda: VIT_B_16[library](**options))
    if provider == "fused":
        fastvit.accelerate(vit, strict=True)
    images = draw.photographs(B, 224)
    return Runner(lambda: output(vit(images)), (images,), tuple(vit.parameters()), vit)


def _norm(draw: Draw, D: int) -> tuple[Tensor, ...]:
    return draw.normal(D, std=0.1, mean=1.0), draw.normal(D, std=0.1)


def _norm_of_kind(draw: Draw, D: int, kind: str) -> ops.Norm:
    weight, bias = _norm(draw, D)
    return ops.Norm(weight, bias if kind == "layer" else None, kind=kind)


def _parameters(norms: Sequence[ops.Norm]) -> tuple[Tensor, ...]:
    return tuple(t for norm in norms for t in norm[:2] if t is not None)


_OF_TABLES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "shared": lambda B, H: (),
    "sample": lambda B, H: (B, 1),
    "head": lambda B, H: (H,),
}


def _positions(draw: Draw, N: int, d: int, spelling: str, of: tuple[int, ...] = ()) -> ops.Rotary:
    """Return float32 sin/cos tables for the patches after one prefix token; no two tables are equal."""
    count = math.prod(of)
    angles = torch.linspace(0, 100 * count, count * (N - 1) * d // 2, device=draw.device).view(*of, N - 1, d // 2)
    angles = angles.repeat_interleave(2, -1) if spelling == "interleaved" else torch.cat((angles, angles), -1)
    return ops.Rotary(angles.sin(), angles.cos(), 1, spelling == "interleaved")


def _mask(draw: Draw, B: int, N: int, H: int, kind: str) -> Tensor:
    """Return the mask of a kind that `attention` names."""
    if kind == "positions":
        return draw.normal(1, H, N, N)
    visible = torch.ones(B, 1, 1, N, dtype=torch.bool, device=draw.device)
    visible[1::2, ..., N - N // 3 :] = False
    return visible


def _scales(draw: Draw, B: int, D: int, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return LayerScale's factors, and DropPath's, one a sample."""
    return (draw.normal(D), _row_scale(draw, B)) if wanted else (None, None)


def _row_scale(draw: Draw, B: int) -> Tensor:
    """Return DropPath's factors, which drop every other sample."""
    return 1.25 * (torch.arange(B, device=draw.device) % 2)


# ---- smaller sizes for the check of agreement, where eager in float64 would take too long or not fit ----

Sizes = dict[str, Any]


def _few_scores(sizes: Sizes) -> Sizes:
    B, N, H = (sizes[name] for name in "BNH")
    return {"B": min(B, 2), "H": 1 if N > 4000 else H} if B * N >= 10_000 else {}


def _few_samples(sizes: Sizes) -> Sizes:
    return {"B": min(sizes["B"], 2)} if sizes["B"] * sizes["N"] > 10_000 else {}


def _few_images(sizes: Sizes) -> Sizes:
    px = sizes["px"]
    return {"B": 1, "depth": 2} if px > 1000 else {"B": 1 if px > 500 else min(sizes["B"], 2)}


@dataclass(frozen=True)
class Op:
    """check: sizes to use instead where providers are compared with float64."""

    build: Callable[..., Runner]
    providers: tuple[str, ...] = ("eager", "compile", "fused")
    check: Callable[[Sizes], Sizes] = lambda sizes: {}
    note: str = ""


OPS = {
    "attention": Op(attention, _OF_ATTENTION, _few_scores),
    "attention_varlen": Op(attention_varlen, _OF_ATTENTION, _few_scores),
    "rotary": Op(rotary),
    "qk_norm": Op(qk_norm),
    "dropout": Op(dropout, ("fused",)),
    "layer_norm": Op(layer_norm),
    "add_layer_norm": Op(add_layer_norm),
    "linear": Op(linear),
    "layer_norm_linear": Op(layer_norm_linear),
    "layer_norm_attention": Op(layer_norm_attention, _OF_ATTENTION, _few_samples),
    "mlp": Op(mlp),
    "layer_norm_mlp": Op(functools.partial(mlp, norm=True)),
    "patch_embed": Op(patch_embed, note=f"on {SOURCE}"),
    "block": Op(block, _OF_ATTENTION, _few_samples),
    "model": Op(model, _OF_ATTENTION, _few_images, f"on {SOURCE}"),
    "accelerate": Op(
        accelerate,
        PROVIDERS[1:],
        lambda sizes: {"B": min(sizes["B"], 2), "depth": 2},
        f"ViT-B/16 at 224 px, of as many blocks as a case says, on {SOURCE}; sdpa: the library's own",
    ),
    "memory, attention": Op(attention, _OF_ATTENTION, lambda sizes: {"H": 1}),
    "memory, block": Op(block, _OF_ATTENTION, lambda sizes: {"D": 64, "H": 1}),
}
