"""Build every op and model as each provider runs it: eager, SDPA, compiled, fastvit without and with graphs. Tensors of
an op have the names of the table of ops, `study.accuracy.cases`, and are drawn in one fixed order: all providers get
the same numbers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fastvit
from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.libraries import load
from benchmarks.harness.photographs import MEAN, SOURCE, STD
from fastvit import layers, ops, reference, zoo
from fastvit.reference import ops as eager
from fastvit.study.accuracy import cases
from fastvit.study.accuracy.cases import Shapes, sizes
from fastvit.study.sources.baselines import plain_model, use_sdpa
from fastvit.study.sources.model_source import output_of

PROVIDERS = ("eager", "sdpa", "flash", "cudnn", "compile", "graph", "fastvit", "graphs")
COMPILED = ("compile", "graph")
FIRST_CALLS = {"compile": 1, "graph": 1, "graphs": 3}  # that compile, or warm up and capture
Sizes = dict[str, Any]
_OF_ATTENTION = ("eager", "sdpa", "compile", "fastvit")
_OF_MODULES = (*_OF_ATTENTION, "graphs")


def compiled(provider: str, forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return forward under torch.compile; for the provider "graph", with fastvit's ops in the graph."""
    compiler = fastvit.compile if provider == "graph" else torch.compile
    return compiler(forward, dynamic=False, **options)


def attention(
    provider: str, draw: Draw, B: int, N: int, H: int, d: int, separate: bool = False, dropout_p: float = 0.0,
    kv_heads: int = 0, mask: str = "", causal: bool = False, keys: int = 0,
) -> Runner:  # fmt: skip
    """kv_heads: heads of k and v, fewer than H. mask: "padding" hides the last third of the keys of every other sample;
    "positions" adds H x N x keys numbers, which all samples share and which require a gradient. keys: how many, N if
    0. "relative" adds decomposed relative positions of a square grid of keys, which eager and SDPA materialise."""
    options: dict[str, Any] = {"is_causal": True} if causal else {}
    fused = {"dropout_p": dropout_p}
    if not (separate or kv_heads or mask or keys):
        return _runner(provider, draw, "attention_qkvpacked", {"qkv": (B, N, 3, H, d)}, fused=fused, **options)
    keys = keys or N
    shapes: Shapes = {"q": (B, N, H, d), **dict.fromkeys("kv", (B, keys, kv_heads or H, d))}
    if mask == "positions":
        shapes["attn_mask"] = (1, H, N, keys)
    elif mask == "relative":
        shapes |= dict.fromkeys(("rows", "columns"), (B, N, H, math.isqrt(N)))
    elif mask:
        options["attn_mask"] = visible = torch.ones(B, 1, 1, keys, dtype=torch.bool, device=draw.device)
        visible[1::2, ..., keys - keys // 3 :] = False
    return _runner(provider, draw, "attention", shapes, fused=fused, **options)


def attention_varlen(
    provider: str, draw: Draw, B: int, N: int, H: int, d: int, kv_heads: int = 0, queries: int = 0
) -> Runner:
    """B images: the longest has N tokens, the others three quarters, a half and a quarter of that. queries: of each
    image, which attend to its tokens, as in pooling; 0: its tokens do."""
    lengths = [max(N * (4 - i % 4) // 4, 1) for i in range(B)]
    ends = [0, *itertools.accumulate(lengths)]
    of_q = [i * queries for i in range(B + 1)] if queries else ends
    shapes: Shapes = {"q": (of_q[-1], H, d), **dict.fromkeys("kv", (ends[-1], kv_heads or H, d))}
    # numbers on the host for eager: reading them from a GPU would make it wait
    options: dict[str, Any] = {"cu_seqlens": of_q}
    if provider == "fastvit":
        on_device = functools.partial(torch.tensor, dtype=torch.int32, device=draw.device)
        options = {"cu_seqlens": on_device(of_q), "max_seqlen": queries or N}
        options |= {"cu_seqlens_k": on_device(ends), "max_seqlen_k": N} if queries else {}
    elif queries:
        options["cu_seqlens_k"] = ends
    return _runner(provider, draw, "attention_varlen", shapes, **options)


def attention_windows(
    provider: str, draw: Draw, B: int, grid: int, window: int, H: int, d: int, shift: int = 0, added: str = "bias",
    dropout_p: float = 0.0,
) -> Runner:  # fmt: skip
    """Windows of a square grid. eager and sdpa: with copies into windows and back, and the masks as Swin makes them.
    added: to the scores. A "bias" that all windows share, as in Swin; "biases", one for each window; or "relative"
    positions in two parts, as in SAM; or "nothing"."""
    shapes: Shapes = {"qkv": (B, grid, grid, 3, H, d)}
    if added == "relative":
        shapes |= dict.fromkeys(("rows", "columns"), (B, grid, grid, H, window))
    elif added != "nothing":
        shapes["attn_mask"] = (*[(grid // window) ** 2] * (added == "biases"), H, window**2, window**2)
    options: dict[str, Any] = {"window": (window, window), "shift": (shift, shift)}
    return _runner(provider, draw, "attention_windows", shapes, fused={"dropout_p": dropout_p}, **options)


def rotary(
    provider: str, draw: Draw, B: int, N: int, H: int, d: int, spelling: str = "halves", tables: str = ""
) -> Runner:
    """tables: one for each "sample" or "head"; by default all share one."""
    shapes = {"x": cases.HEAD, **_tables(tables)}
    return _runner(provider, draw, "rotary", shapes, sizes(B, N, H=H, d=d), interleaved=spelling == "interleaved")


def qk_norm(
    provider: str, draw: Draw, B: int, N: int, H: int, d: int, norm: str = "layer", spelling: str = "", tables: str = ""
) -> Runner:
    """Normalise q and k of a packed qkv. spelling: that of rotary positions; none without. tables: as in `rotary`."""
    q, k, _ = draw.normal(B, N, 3, H, d).detach().unbind(2)
    shapes = {**_norms(norm), **_tables(tables)} if spelling else _norms(norm)
    options: dict[str, Any] = {"q": q.requires_grad_(), "k": k.requires_grad_()}
    options["interleaved"] = spelling == "interleaved"
    return _runner(provider, draw, "qk_norm", shapes, sizes(B, N, H=H, d=d), **options)


def layer_norm(provider: str, draw: Draw, B: int, N: int, D: int, norm: str = "layer") -> Runner:
    """norm: as the op's."""
    shapes = {**cases.X, "weight": ("D",)} if norm == "rms" else {**cases.X, "weight": ("D",), "bias": ("D",)}
    return _runner(provider, draw, "layer_norm", shapes, sizes(B, N, D), norm=norm)


def add_layer_norm(
    provider: str, draw: Draw, B: int, N: int, D: int, layer_scale: bool = True, row_scale: bool = False
) -> Runner:
    given = {"layer_scale": layer_scale, "row_scale": row_scale}
    tensors = cases.OF_TOKENS["add_layer_norm"].tensors
    shapes = {name: shape for name, shape in tensors.items() if given.get(name, True)}
    return _runner(provider, draw, "add_layer_norm", shapes, sizes(B, N, D))


def linear(
    provider: str, draw: Draw, B: int, N: int, D: int, out: int,
    activation: str | None = None, residual: bool = False, scales: bool = False,
) -> Runner:  # fmt: skip
    """scales: layer_scale, row_scale and the residual that they go with."""
    shapes: Shapes = {**cases.X, "weight": (out, D), "bias": (out,)}
    if residual or scales:
        shapes["residual"] = (B, N, out)
    if scales:
        shapes |= {"layer_scale": (out,), "row_scale": (B,)}
    return _runner(provider, draw, "linear", shapes, sizes(B, N, D), activation=activation)


def layer_norm_linear(provider: str, draw: Draw, B: int, N: int, D: int, out: int) -> Runner:
    shapes: Shapes = {**cases.X, **cases.NORM, "weight": (out, D), "bias": (out,)}
    return _runner(provider, draw, "layer_norm_linear", shapes, sizes(B, N, D))


def layer_norm_attention(
    provider: str, draw: Draw, B: int, N: int, D: int, H: int, rotary: str | None = None, qk_norm: str | None = None
) -> Runner:
    """The residual is the norm's input. rotary: "halves" or "interleaved"; qk_norm: "layer" or "rms"."""
    shapes = {**cases.X, **cases.NORM, **cases.QKV}
    if rotary is not None:
        shapes |= _tables("")
    if qk_norm is not None:
        shapes |= _norms(qk_norm)
    options: dict[str, Any] = {"num_heads": H, "interleaved": rotary == "interleaved"}
    return _runner(provider, draw, "layer_norm_attention", shapes, sizes(B, N, D, H, D // H), **options)


def mlp(
    provider: str, draw: Draw, B: int, N: int, D: int,
    activation: str = "gelu", recompute: str = "activation", dropout_p: float = 0.0, residual: bool = False,
    scales: bool = False, norm: bool = False, hidden: int = 0, inner: bool = False,
) -> Runner:  # fmt: skip
    """D -> hidden, by default 4 D, -> D. norm: after a LayerNorm; the residual is then the norm's input. inner: with a
    LayerNorm of the gated product."""
    hidden = hidden or 4 * D
    shapes = {**cases.X, **(cases.NORM if norm else {}), **(cases.GATED_FC if activation in eager.GATED else cases.FC)}
    if scales:
        shapes |= cases.SCALES
    if inner:
        shapes |= {"inner_weight": (hidden,), "inner_bias": (hidden,)}
    options: dict[str, Any] = {"activation": activation}
    if not (residual or scales or norm):
        options["residual"] = None
    op, of = "layer_norm_mlp" if norm else "mlp", sizes(B, N, D, hidden=hidden, gated=hidden)
    return _runner(provider, draw, op, shapes, of, fused={"recompute": recompute, "dropout_p": dropout_p}, **options)


def patch_embed(
    provider: str, draw: Draw, B: int, px: int, patch: int, D: int, image: str = "photographs", frames: int = 0
) -> Runner:
    """image: "photographs", "wanted" (with a gradient) or "uint8" (normalised by the kernel). frames: of a random video
    in tubelets of two frames, instead of an image."""
    of = sizes(B, D=D, patch=patch, height=px, width=px)
    if frames:
        video = draw.normal(B, frames, 3, px, px).detach().transpose(1, 2)  # as transformers' models read it
        video.requires_grad_(image == "wanted")
        shapes = {**cases.TUBELETS, "pos_embed": (frames // 2 * of["P"], D)}
        return _runner(provider, draw, "patch_embed", shapes, of, image=video)
    if image == "photographs":
        return _runner(provider, draw, "patch_embed", cases.PATCHES, of, image=draw.photographs(B, px))
    if image == "wanted":
        return _runner(provider, draw, "patch_embed", cases.OF_TOKENS["patch_embed"].tensors, of)
    shapes = cases.OF_TOKENS["patch_embed uint8"].tensors
    return _runner(provider, draw, "patch_embed", shapes, of, mean=MEAN, std=STD)


_INPUTS = ("x", "q", "k", "v", "qkv", "residual", "branch", "image", "pixels")


def _runner(
    provider: str, draw: Draw, op: str, shapes: Shapes, of: Sizes | None = None, fused: Sizes | None = None,
    **arguments: Any,
) -> Runner:  # fmt: skip
    """Run an op, or its formula in plain PyTorch.

    Args:
        shapes: of tensors to draw, as in the table of ops, `study.accuracy.cases`. of: sizes of named dimensions.
        arguments: of the op, in addition to these tensors. fused: those that the formula does not have.
    """
    if provider == "fastvit":
        arguments |= fused or {}
    elif provider == "sdpa":
        arguments["sdpa"] = True
    row = cases.OpCase(op, shapes)
    drawn = {name: draw.tensor(name, *shape) for name, shape in row.shapes(of or {}).items()}
    function, every = getattr(ops if provider == "fastvit" else eager, op), row.arguments(drawn, **arguments)
    tensors = {name: t for name, t in (arguments | drawn).items() if isinstance(t, Tensor)}
    inputs = tuple(t for name, t in tensors.items() if name in _INPUTS)
    others = {*_INPUTS, *cases.WITHOUT_GRADIENT, "cu_seqlens", "cu_seqlens_k"}
    return Runner(lambda: function(**every), inputs, tuple(t for name, t in tensors.items() if name not in others))


def _norms(kind: str) -> Shapes:
    """Return the parameters of the norms of q and k."""
    return cases.QK_WEIGHTS if kind == "rms" else {**cases.QK_WEIGHTS, "q_bias": ("d",), "k_bias": ("d",)}


def _tables(of: str) -> Shapes:
    """Return tables of positions for the patches after one prefix token. of: as `tables` of `rotary`."""
    before = {"": (), "sample": ("B", 1), "head": ("H",)}[of]
    return {name: (*before, *shape) for name, shape in cases.FIXED_TABLES.items()}


def block(provider: str, draw: Draw, B: int, N: int, D: int, H: int, causal: bool = False) -> Runner:
    kind = layers.Block if provider == "fastvit" else reference.Block
    module = draw.module(lambda: kind(D, H, qkv_bias=True))
    if provider == "sdpa":
        use_sdpa(module)
    x = draw.normal(B, N, D)
    return Runner(lambda: module(x, is_causal=causal), (x,), tuple(module.parameters()), module)


def model(provider: str, draw: Draw, name: str, B: int, px: int, **options: int) -> Runner:
    """Build a model of the zoo, on photographs. The CIFAR models' dropout of attention is left out, because providers
    with dropout take other paths: SDPA has no flash kernel with dropout on a CPU."""
    if provider == "fastvit":
        make: Callable[..., Any] = fastvit.create_model
    else:
        if zoo.model_class(name) is not fastvit.VisionTransformer:
            load("timm")  # whose model is the plain one
        make = functools.partial(plain_model, provider=provider)
    vit = draw.module(lambda: make(name, img_size=px, attn_drop_rate=0.0, **options))
    images = draw.photographs(B, px)
    return Runner(lambda: vit(images), (images,), tuple(vit.parameters()), vit)


def _timm(px: int, depth: int) -> nn.Module:
    return load("timm").create_model("vit_base_patch16_224", img_size=px, depth=depth)


def _transformers(px: int, depth: int) -> nn.Module:
    kind = load("transformers").ViTForImageClassification
    return kind(kind.config_class(image_size=px, num_hidden_layers=depth, num_labels=1000))


def _torchvision(px: int, depth: int) -> nn.Module:
    size = {"image_size": px, "patch_size": 16, "num_layers": depth, "num_heads": 12}
    return load("torchvision").models.VisionTransformer(**size, hidden_dim=768, mlp_dim=3072)


VIT_B_16 = {"timm": _timm, "transformers": _transformers, "torchvision": _torchvision}  # by library, of px and depth


def accelerate(provider: str, draw: Draw, library: str, B: int, px: int = 224, depth: int = 12) -> Runner:
    """ViT-B/16 of another library: unchanged (as "sdpa", which the libraries use, or compiled), or accelerated."""
    vit = draw.module(lambda: VIT_B_16[library](px, depth))
    if provider == "fastvit":
        fastvit.accelerate(vit, strict=True)
    images = draw.photographs(B, px)
    return Runner(lambda: output_of(vit(images)), (images,), tuple(vit.parameters()), vit)


# ---- smaller sizes for the check of agreement, where eager in float64 would take too long or not fit ----


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
    providers: tuple[str, ...] = ("eager", "compile", "fastvit")
    check: Callable[[Sizes], Sizes] = lambda sizes: {}
    note: str = ""


OPS = {
    "attention": Op(attention, _OF_ATTENTION, _few_scores),
    "attention_varlen": Op(attention_varlen, _OF_ATTENTION, _few_scores),
    "attention_windows": Op(attention_windows, _OF_ATTENTION, lambda sizes: {"B": min(sizes["B"], 2)}),
    "rotary": Op(rotary),
    "qk_norm": Op(qk_norm),
    "layer_norm": Op(layer_norm),
    "add_layer_norm": Op(add_layer_norm),
    "linear": Op(linear),
    "layer_norm_linear": Op(layer_norm_linear),
    "layer_norm_attention": Op(layer_norm_attention, _OF_ATTENTION, _few_samples),
    "mlp": Op(mlp),
    "layer_norm_mlp": Op(functools.partial(mlp, norm=True)),
    "patch_embed": Op(patch_embed, note=f"on {SOURCE}"),
    "block": Op(block, _OF_MODULES, _few_samples),
    "model": Op(model, _OF_MODULES, _few_images, f"on {SOURCE}"),
    "accelerate": Op(
        accelerate,
        ("sdpa", "compile", "graph", "fastvit", "graphs"),
        lambda sizes: {"B": min(sizes["B"], 2), "depth": min(sizes.get("depth", 12), 2)},
        f"ViT-B/16 at 224 px unless a case says another size, on {SOURCE}; sdpa: the library's own",
    ),
    "memory, attention": Op(attention, _OF_ATTENTION, lambda sizes: {"H": 1}),
    "memory, block": Op(block, _OF_ATTENTION, lambda sizes: {"D": 64, "H": 1}),
}


def _row(name: str) -> Op:
    """Return an op as its row of the table of ops has it. Its workloads say the sizes of named dimensions only."""
    row = _TABLE[name]

    def build(provider: str, draw: Draw, **of: int) -> Runner:
        return _runner(provider, draw, row.op, row.tensors, sizes(**of), **row.options)

    return Op(build)


_TABLE = cases.OF_HEADS | cases.OF_TOKENS
OPS |= {name: _row(name) for name in _TABLE if name not in OPS}
