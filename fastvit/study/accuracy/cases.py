"""Every public op with small random tensors, and eager PyTorch for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastvit import ops
from fastvit.study.accuracy import formulas

HEAD_DIMS = (32, 64, 72, 80, 96, 128)
WIDTH, HEADS, TOKENS, LONG, PATCH, DROPPED = 192, 2, 197, 577, 16, 0.25
_SEED = 7
_MEAN, _STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        op: of `fastvit.ops`.
        variant: what is special about it, or "".
        head_dim: or None, for an op without heads.
        width: of the embedding; of an op on heads that of all of them.
        tokens: of a sample.
        fused, eager: functions of the tensors.
    """

    op: str
    variant: str
    head_dim: int | None
    width: int
    tokens: int
    fused: Callable[..., Any] = field(repr=False)
    eager: Callable[..., Any] = field(repr=False)
    shapes: Shapes = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant}".strip()

    def tensors(self, dtype: torch.dtype, device: torch.device, draw: int = 0) -> dict[str, Tensor]:
        """The same numbers on every device, rounded to the dtype; other ones in every draw. Tables of positions are
        float32."""
        drawn = {}
        for seed, (name, shape) in enumerate(self.shapes.items(), 100 * draw):
            t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            fixed = name == "row_scale" or name.startswith("fixed")
            if name == "row_scale":
                t = 1.25 * (torch.arange(shape[0], dtype=torch.float64) % 2)
            elif name.endswith(("sin", "cos")):
                t = getattr(torch, name[-3:])(t)
            elif name == "pixels":
                drawn[name] = (t * 50 + 128).clamp(0, 255).to(torch.uint8).to(device)
                continue
            elif name.endswith("weight") and len(shape) > 1:
                t = t / t[0].numel() ** 0.5
            elif name.endswith(("weight", "layer_scale")):
                t = 1 + 0.1 * t
            elif name.endswith("bias"):
                t = 0.1 * t
            t = t.to(torch.float32 if name.endswith(("sin", "cos")) else dtype).to(device)
            drawn[name] = t.requires_grad_(not fixed)
        return drawn


def cases(
    names: Sequence[str] | None = None, head_dims: Sequence[int] = HEAD_DIMS, width: int = WIDTH, heads: int = HEADS
) -> list[Case]:
    """Every op, or those of `names`, at every head dimension where it has heads."""
    return [case for case in _all(head_dims, width, heads) if names is None or case.op in names]


def _all(head_dims: Sequence[int], D: int, H: int) -> Iterator[Case]:
    B, N = 2, TOKENS
    x: Shapes = {"x": (B, N, D)}
    gammas: Shapes = {"layer_scale": (D,), "row_scale": (B,)}
    norm: Shapes = {"norm_weight": (D,), "norm_bias": (D,)}
    for d in head_dims:
        yield from _of_heads(B, N, H, d)
    yield _case("dropout", "", D, _dropout, _masked, x)
    yield _case("layer_norm", "", D, _of("layer_norm"), formulas.layer_norm, {**x, "weight": (D,), "bias": (D,)})
    yield _case("rms_norm", "", D, _of("rms_norm"), _bound(formulas.layer_norm, norm="rms"), {**x, "weight": (D,)})
    both = {"residual": (B, N, D), "branch": (B, N, D), "weight": (D,), "bias": (D,), **gammas}
    yield _case("add_layer_norm", "", D, _of("add_layer_norm"), formulas.add_layer_norm, both)
    layer: Shapes = {**x, "weight": (4 * D, D), "bias": (4 * D,)}
    yield _case(
        "linear", "gelu", D, _of("linear", activation="gelu"), _bound(formulas.linear, activation="gelu"), layer
    )
    layer = {**x, "weight": (D, D), "bias": (D,), **gammas, "residual": (B, N, D)}
    yield _case("linear", "residual", D, _of("linear"), formulas.linear, layer)
    layer = {**x, **norm, "weight": (3 * D, D), "bias": (3 * D,)}
    yield _case("layer_norm_linear", "", D, _of("layer_norm_linear"), formulas.layer_norm_linear, layer)
    mlp: Shapes = {"fc1_weight": (4 * D, D), "fc1_bias": (4 * D,), "fc2_weight": (D, 4 * D), "fc2_bias": (D,), **gammas}
    yield _case("mlp", "gelu", D, _residual("mlp"), _with_residual(formulas.mlp), {**x, **mlp})
    behind = {**x, **norm, **mlp}
    yield _case(
        "layer_norm_mlp", "gelu", D, _residual("layer_norm_mlp"), _with_residual(formulas.layer_norm_mlp), behind
    )
    h = D // 8 * 16  # 2 D, a multiple of 16
    gated: Shapes = {"fc1_weight": (2 * h, D), "fc1_bias": (2 * h,), "fc2_weight": (D, h), "fc2_bias": (D,), **gammas}
    for name, shapes in (("mlp", {**x, **gated}), ("layer_norm_mlp", {**x, **norm, **gated})):
        eager = _with_residual(getattr(formulas, name), activation="swiglu")
        yield _case(name, "swiglu", D, _residual(name, activation="swiglu"), eager, shapes)
    side = 14 * PATCH
    embed: Shapes = {"weight": (D, 3, PATCH, PATCH), "bias": (D,), "pos_embed": (196, D), "prefix": (1, D)}
    yield _case("patch_embed", "", D, _of("patch_embed"), formulas.patch_embed, {"image": (B, 3, side, side), **embed})
    of_pixels = {"pixels": (B, 3, side, side), **embed}
    yield _case("patch_embed", "uint8", D, _pixels(_of("patch_embed")), _pixels(formulas.patch_embed), of_pixels)


def _of_heads(B: int, N: int, H: int, d: int) -> Iterator[Case]:
    D, T = H * d, N - 1
    for tokens in (N, LONG) if d == 64 else (N,):  # one tile of keys, and several
        separate: Shapes = dict.fromkeys("qkv", (B, tokens, H, d))
        yield Case("attention", "", d, D, tokens, _of("attention"), _separate, separate)
        packed: Shapes = {"qkv": (B, tokens, 3, H, d)}
        yield Case("attention_qkvpacked", "", d, D, tokens, _of("attention_qkvpacked"), formulas.attention, packed)
    shared: Shapes = {"q": (B, N, H, d), "k": (B, N, 1, d), "v": (B, N, 1, d)}
    yield Case("attention", "mask", d, D, N, _of("attention"), _separate, {**shared, "attn_mask": (H, N, N)})
    yield Case(
        "attention_varlen", "", d, D, N, _ended(_of("attention_varlen")), _ended(_one_by_one), _images(B * N, H, d)
    )
    tables: Shapes = {"sin": (T, d), "cos": (T, d)}
    for name, interleaved in (("halves", False), ("interleaved", True)):
        fused, eager = _positions("rotary", interleaved), _rotary(formulas.rotary, interleaved)
        yield Case("rotary", name, d, D, N, fused, eager, {"x": (B, N, H, d), **tables})
    fused, eager = _positions("rotary_qkvpacked"), _rotary(_qkv_rotary)
    yield Case("rotary_qkvpacked", "", d, D, N, fused, eager, {"qkv": (B, N, 3, H, d), **tables})
    of_norms: Shapes = {"q_weight": (d,), "k_weight": (d,)}
    normed = {"q": (B, N, H, d), "k": (B, N, H, d), **of_norms, "fixed_sin": (T, d), "fixed_cos": (T, d)}
    for name, interleaved in (("rms", True), ("layer", False)):
        normed |= {"q_bias": (d,), "k_bias": (d,)} if name == "layer" else {}
        fused, eager = (_normed(function, interleaved) for function in (_of("qk_norm"), formulas.qk_norm))
        yield Case("qk_norm", name, d, D, N, fused, eager, normed.copy())
    layers: Shapes = {
        "x": (B, N, D), "norm_weight": (D,), "norm_bias": (D,), "qkv_weight": (3 * D, D), "qkv_bias": (3 * D,),
        "proj_weight": (D, D), "proj_bias": (D,),
    }  # fmt: skip
    eager = _with_residual(formulas.layer_norm_attention, num_heads=H)
    fused = _residual("layer_norm_attention", num_heads=H)
    yield Case("layer_norm_attention", "", d, D, N, fused, eager, layers)
    if d == 64:
        behind, plain = (_of_layers(function) for function in (fused, eager))
        yield Case("layer_norm_attention", "qk_norm", d, D, N, behind, plain, {**layers, **of_norms})


def _case(op: str, variant: str, D: int, fused: Callable[..., Any], eager: Callable[..., Any], shapes: Shapes) -> Case:
    return Case(op, variant, None, D, TOKENS, fused, eager, shapes)


def _of(name: str, **options: Any) -> Callable[..., Any]:
    """The op as it is when it is called."""
    return lambda *arguments, **tensors: getattr(ops, name)(*arguments, **tensors, **options)


def _bound(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda **tensors: function(**tensors, **options)


def _residual(name: str, **options: Any) -> Callable[..., Any]:
    """The residual is x, as in a block."""
    return lambda x, **tensors: getattr(ops, name)(x, **tensors, residual=x, **options)


def _with_residual(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def call(x: Tensor, **tensors: Any) -> Any:
        names = [name for name in tensors if name not in ("layer_scale", "row_scale", "qk_norm")]  # eager's positional
        ends = {name: t for name, t in tensors.items() if name not in names}
        return function(x, *(tensors[name] for name in names), **ends, residual=x, **options)

    return call


def _separate(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return formulas.heads(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=attn_mask)


def _images(T: int, H: int, d: int) -> Shapes:
    return dict.fromkeys("qkv", (T, H, d))


def _ended(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of three images of other sizes."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        T = q.shape[0]
        return function(q, k, v, torch.tensor([0, T // 7, T // 2, T], device=q.device))

    return call


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    return formulas.attention_varlen(q, k, v, ends.tolist())


def _positions(name: str, interleaved: bool = False) -> Callable[..., Any]:
    def call(sin: Tensor, cos: Tensor, **tensors: Tensor) -> Any:
        return getattr(ops, name)(**tensors, rotary=ops.Rotary(sin, cos, 1, interleaved))

    return call


def _rotary(function: Callable[..., Any], interleaved: bool = False) -> Callable[..., Any]:
    def call(sin: Tensor, cos: Tensor, **tensors: Tensor) -> Any:
        return function(*tensors.values(), ops.Rotary(sin, cos, 1, interleaved))

    return call


def _normed(function: Callable[..., Any], interleaved: bool) -> Callable[..., Any]:
    def call(q: Tensor, k: Tensor, fixed_sin: Tensor, fixed_cos: Tensor, **of_norms: Tensor) -> Any:
        return function(q, k, *_norms(**of_norms), ops.Rotary(fixed_sin, fixed_cos, 1, interleaved))

    return call


def _of_layers(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(q_weight: Tensor, k_weight: Tensor, **tensors: Tensor) -> Any:
        return function(**tensors, qk_norm=_norms(q_weight, k_weight))

    return call


def _norms(
    q_weight: Tensor, k_weight: Tensor, q_bias: Tensor | None = None, k_bias: Tensor | None = None
) -> tuple[ops.Norm, ops.Norm]:
    """RMSNorm without biases."""
    kind = "rms" if q_bias is None else "layer"
    return ops.Norm(q_weight, q_bias, kind=kind), ops.Norm(k_weight, k_bias, kind=kind)


def _qkv_rotary(qkv: Tensor, positions: ops.Rotary) -> Tensor:
    q, k, v = qkv.unbind(2)
    return torch.stack((formulas.rotary(q, positions), formulas.rotary(k, positions), v), 2)


def _pixels(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pixels, **tensors: function(image=pixels, **tensors, mean=_MEAN, std=_STD)


def _dropout(x: Tensor) -> Tensor:
    torch.manual_seed(_SEED)
    return ops.dropout(x, DROPPED)


def _masked(x: Tensor) -> Tensor:
    """x with the mask that the op draws for ones, which has to keep as many as it says."""
    torch.manual_seed(_SEED)
    kept = ops.dropout(torch.ones(x.shape, device=x.device), DROPPED) != 0
    share, spread = float(kept.double().mean()), (DROPPED * (1 - DROPPED) / kept.numel()) ** 0.5
    if abs(share - (1 - DROPPED)) > 5 * spread:
        raise ArithmeticError(f"dropout({DROPPED}) keeps {share:.4f} of all elements")
    return x * kept / (1 - DROPPED)
