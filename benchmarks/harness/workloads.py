"""The list of workloads: which op at which sizes, and for which use. Benchmarks, tuning, the traffic count, the
sanitizer and ahead-of-time compilation take theirs from it; `Workload.runner` builds the same call for each. Those of
attention: workloads_attention.py.

Uses:

    quick, cpu, gpu     benchmarks: one tiny case an op; the CPU path in minutes; the full grid of a GPU
    long                benchmarks: further cases of the CPU path, which take minutes each
    headline            the first minutes of a GPU
    tune, rehearse      shapes for which launch tables are measured; tiny ones for the interpreter
    traffic             counted in the interpreter with real N, d and D: where the real case has too many rows, one of
                        `parts` equal parts of a GPU and of its rows
    sanitize            small and awkward: tails, odd widths, every option that has code of its own
    compile             every width, head dimension, length, activation and patch, for the first tier of targets
    second              one of each kind of kernel and class of head dimension, for the other targets
    kernels             the few that touch every kernel
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator

from benchmarks.harness.families import VIT_B_16
from benchmarks.harness.providers import OPS
from benchmarks.harness.workload import Workload
from benchmarks.harness.workload import rows as _rows
from benchmarks.harness.workloads_attention import attention

INSTALLED = [name for name in VIT_B_16 if importlib.util.find_spec(name) is not None]  # libraries
BATCH = 256 * 197  # rows of the large batch whose parts are counted


def workloads(*uses: str, ops: tuple[str, ...] = ()) -> list[Workload]:
    """Return the workloads of any of the uses and, if given, of these ops, in the order of the list."""
    if unknown := {*ops} - {*OPS}:
        raise ValueError(f"no op {sorted(unknown)}, the ops are {sorted(OPS)}")
    return [w for w in _all() if w.uses & {*uses} and (not ops or w.op in ops)]


@functools.cache
def _all() -> tuple[Workload, ...]:
    ops = attention(), _rotary(), _qk_norm(), _norms(), _gemms(), _gated(), _patch_embed(), _models(), _memory()
    return tuple(itertools.chain(*ops))


def _rotary() -> Iterator[Workload]:
    rows, spellings = functools.partial(_rows, "rotary"), ["halves", "interleaved"]
    yield from rows("quick", B=1, N=50, H=3, d=64)
    yield from rows("cpu", B=[1, 8], N=197, H=12, d=64, spelling=spellings)
    yield from rows("gpu", B=[1, 32, 256], N=197, H=12, d=64, spelling=spellings)
    yield from rows("gpu", B=[1, 8], N=4097, H=16, d=64)
    yield from rows("traffic", B=2, N=197, H=12, d=64, spelling=spellings)
    yield from rows("traffic", B=26, N=16, H=12, d=64, parts=132)  # of 264 samples of 197 tokens
    yield from rows("sanitize", B=2, N=70, H=3, d=[32, 72], spelling=spellings)
    for d in (16, 32, 64, 72, 80, 88, 96, 104, 128, 256):
        few = {64: "second kernels", 72: "second"}.get(d, "")
        yield from rows(f"compile {few}", B=64, N=197, H=8, d=d, spelling=spellings)
    yield from _of_tables(rows)
    after_norm = functools.partial(_rows, "layer_norm_attention", rotary=spellings)
    yield from after_norm("cpu", B=1, N=197, D=768, H=12)
    yield from after_norm("gpu", B=[1, 32, 256], N=197, D=768, H=12)
    yield from _rows("layer_norm_attention", "headline", B=32, N=197, D=768, H=12, rotary="halves")
    yield from after_norm("compile", B=64, N=197, D=768, H=12)


def _of_tables(rows: Callable[..., Iterator[Workload]]) -> Iterator[Workload]:
    """Yield workloads with tables for each sample and for each head."""
    tables = ["sample", "head"]
    yield from rows("sanitize", B=2, N=70, H=3, d=32, spelling="halves", tables=tables)
    yield from rows("traffic", B=2, N=197, H=12, d=64, spelling="halves", tables=tables)
    yield from rows(
        "compile second", B=64, N=197, H=8, d=[64, 72, 256], spelling=["halves", "interleaved"], tables=tables
    )


def _qk_norm() -> Iterator[Workload]:
    kinds, spellings = ["layer", "rms"], ["halves", "interleaved"]
    rotated = functools.partial(_rows, "qk_norm", spelling="halves", norm=kinds)
    both = functools.partial(_rows, "qk_norm", spelling=spellings, norm=kinds)
    rows = functools.partial(_rows, "qk_norm", norm=kinds)  # without positions
    yield from rows("quick", B=1, N=50, H=3, d=64)
    yield from rows("cpu", B=8, N=197, H=12, d=64)
    yield from rotated("cpu", B=8, N=197, H=12, d=64)
    yield from rows("gpu", B=[1, 32, 256], N=197, H=12, d=64)
    yield from both("gpu", B=[1, 32, 256], N=197, H=12, d=64)
    yield from rotated("gpu", B=[1, 8], N=4097, H=16, d=64)
    yield from rotated("traffic", B=26, N=16, H=12, d=64, parts=132)  # of 264 samples of 197 tokens
    yield from rows("traffic", B=2, N=197, H=12, d=64)
    yield from rows("sanitize", B=2, N=70, H=3, d=72)
    yield from both("sanitize", B=2, N=70, H=5, d=72)
    layer = functools.partial(_rows, "qk_norm", spelling=spellings, norm="layer")
    rms = functools.partial(_rows, "qk_norm", spelling=spellings, norm="rms")  # takes fewer registers
    for d in (16, 32, 64, 72, 80, 88, 96, 104, 128, 256):
        few = {64: "second kernels", 72: "second"}.get(d, "")
        yield from layer(f"compile {few}", B=64, N=197, H=8, d=d)
    yield from _of_tables(layer)
    yield from rms("compile", B=64, N=197, H=8, d=[64, 72, 256])
    yield from rows("compile second", B=64, N=197, H=8, d=72)
    yield from rows("compile", B=64, N=197, H=8, d=[64, 256])
    after_norm = functools.partial(_rows, "layer_norm_attention", qk_norm="layer")
    yield from after_norm("cpu", B=1, N=197, D=768, H=12)
    yield from after_norm("gpu", B=[1, 32, 256], N=197, D=768, H=12)
    after_norm = functools.partial(_rows, "layer_norm_attention", rotary="halves", qk_norm="layer")
    yield from after_norm("gpu headline", B=32, N=197, D=768, H=12)


_RECOMPUTE = ["none", "activation", "all"]
_WIDTHS = [192, 384, 512, 768, 1024, 1152, 1280, 1408, 1664]


def _norms() -> Iterator[Workload]:
    every = [192, 384, 768, 1024, 1152, 1280, 1408, 1536, 1664]
    for op, some in (("layer_norm", [192, 768, 1280]), ("add_layer_norm", [768])):
        yield from _rows(op, "quick", B=1, N=50, D=192)
        yield from _rows(op, "cpu", B=8, N=197, D=some)
        yield from _rows(op, "gpu", B=[1, 256], N=197, D=every)
        yield from _rows(op, "headline", B=[1, 256], N=197, D=768)
    rms = functools.partial(_rows, "layer_norm", norm="rms", N=197)
    yield from rms("cpu", B=8, D=768)
    yield from rms("gpu", B=[1, 256], D=[768, 1024, 3072])
    yield from rms("compile", B=64, D=[768, 1024, 1536, 3072])
    yield from rms("compile second", B=64, D=2048)
    yield from _rows("layer_norm", "sanitize", B=5, N=7, D=200, norm="rms")
    yield from _rows("layer_norm", "tune", B=64, N=197, D=every)
    yield from _rows("layer_norm", "rehearse", B=1, N=8, D=32)
    share = BATCH // 132
    yield from _rows("layer_norm", "traffic", B=1, N=share, D=[384, 768, 1664], parts=132)
    yield from _rows("layer_norm", "traffic", B=1, N=197, D=768)
    yield from _rows("add_layer_norm", "traffic", B=1, N=share, D=768, parts=132)
    yield from _rows("layer_norm", "sanitize", B=5, N=7, D=200)
    yield from _rows("add_layer_norm", "sanitize", B=5, N=7, D=200, row_scale=True)
    for D in _WIDTHS:
        few = {768: "second kernels", 1664: "second"}.get(D, "")
        yield from _rows("layer_norm", f"compile {few}", B=64, N=197, D=D)
        yield from _rows("add_layer_norm", "compile", B=64, N=197, D=D, layer_scale=False)
        yield from _rows("add_layer_norm", f"compile {few}", B=64, N=197, D=D, row_scale=True)
    yield from _rows("dropout", "traffic", B=1, N=197, D=768)
    yield from _rows("dropout", "sanitize", B=1, N=37, D=200)
    yield from _rows("dropout", "compile second kernels", B=64, N=197, D=768)


def _of_a_block(uses: str, B: int, N: int, D: int, fc1: str = "") -> Iterator[Workload]:
    """Yield the ops of a block. fc1: uses of the MLP's first layer, if they differ."""
    yield from _rows("linear", fc1 or uses, B=B, N=N, D=D, out=4 * D, activation="gelu")
    yield from _rows("mlp", uses, B=B, N=N, D=D)
    yield from _rows("layer_norm_linear", uses, B=B, N=N, D=D, out=3 * D)
    yield from _rows("layer_norm_attention", uses, B=B, N=N, D=D, H=D // 64)
    yield from _rows("layer_norm_mlp", uses, B=B, N=N, D=D)


def _gemms() -> Iterator[Workload]:
    yield from _of_a_block("quick", B=1, N=50, D=192)
    yield from _of_a_block("cpu", B=1, N=197, D=768)
    yield from _rows("mlp", "cpu", B=1, N=197, D=384)
    yield from _rows("layer_norm_mlp", "cpu", B=8, N=197, D=384)
    for D, (B, N) in itertools.product((384, 768, 1024, 1280), ((1, 197), (1, 1370), (1, 4097), (32, 197), (256, 197))):
        yield from _of_a_block("gpu", B, N, D, fc1="gpu tune" if N == 197 else "gpu")
    yield from _rows("layer_norm_mlp", "headline", B=[1, 32, 256], N=197, D=768)
    for D in (384, 768, 1024, 1280):
        for B, N in ((1, 197), (1, 1370), (32, 197), (256, 197)):
            yield from _rows("mlp", "tune", B=B, N=N, D=D, residual=True)
        yield from _rows("linear", "tune", B=[1, 32, 256], N=197, D=4 * D, out=D, residual=True)
        yield from _rows("linear", "tune", B=[1, 32, 256], N=197, D=D, out=D, residual=True)
    for D in (192, 384, 768, 1024, 1152, 1280, 1408, 1536, 1664):
        yield from _rows("linear", "tune", B=64, N=197, D=D, out=4 * D, activation="gelu")
    yield from _rows("linear", "rehearse", B=1, N=8, D=32, out=128, activation="gelu")
    yield from _rows("mlp", "rehearse", B=1, N=16, D=32, residual=True)
    yield from _rows("layer_norm_mlp", "traffic", B=1, N=BATCH // 128, D=768, parts=128)
    yield from _rows("linear", "sanitize", B=7, N=10, D=72, out=136, activation="gelu")
    yield from _rows("linear", "sanitize", B=7, N=10, D=72, out=136, scales=True)
    yield from _rows("mlp", "sanitize", B=7, N=10, D=40, recompute=_RECOMPUTE, residual=True)
    yield from _rows("mlp", "sanitize", B=7, N=10, D=40, dropout_p=0.1)
    yield from _rows("layer_norm_mlp", "sanitize", B=7, N=10, D=40)
    large = functools.partial(_rows, B=64, N=197)
    for D in _WIDTHS:
        few = "second kernels" if D == 768 else ""
        yield from large("linear", "compile", D=D, out=D)
        yield from large("linear", f"compile {few}", D=D, out=D, scales=True)
        yield from large("mlp", f"compile {few}", D=D)
        yield from large("layer_norm_linear", f"compile {few}", D=D, out=3 * D)
        yield from large("layer_norm_attention", f"compile {few}", D=D, H=D // 64)
        yield from large("layer_norm_mlp", "compile", D=D, scales=True)
    for activation in ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu"):
        few = "second kernels" if activation == "gelu" else ""
        yield from large("linear", f"compile {few}", D=768, out=768, activation=activation)
        yield from large("mlp", "compile", D=768, activation=activation, recompute=_RECOMPUTE, scales=True)
    yield from large("mlp", "compile second kernels", D=768, dropout_p=0.1, scales=True)
    for option in ("scales", "residual"):  # a residual by TMA
        yield from _rows("linear", "compile second kernels", B=256, N=197, D=768, out=768, **{option: True})
    for activation in ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu"):  # backward ours, on sm_90 for few tiles only
        few = "second kernels" if activation == "gelu" else ""
        yield from _rows("mlp", f"compile {few}", B=[1, 4], N=197, D=768, activation=activation)


def _gated() -> Iterator[Workload]:
    """hidden: 8/3 of D, as EVA-02 and DINOv2 round it. EVA-02 L has 2730: no matmul kernel takes such rows."""
    rows = functools.partial(_rows, "mlp", activation="swiglu")
    yield from rows("quick", B=1, N=50, D=192, hidden=512)
    yield from rows("cpu", B=1, N=197, D=768, hidden=2048)
    for D, hidden in ((384, 1024), (768, 2048), (1024, 2730), (1536, 4096)):
        yield from rows("gpu", B=[1, 32, 256], N=257, D=D, hidden=hidden)
        yield from rows("gpu", B=[1, 32], N=257, D=D, hidden=hidden, inner=True, norm=True)
    yield from rows("traffic", B=1, N=BATCH // 128, D=768, hidden=2048, parts=128)
    yield from rows("sanitize", B=7, N=10, D=40, hidden=[40, 21], residual=True, recompute=_RECOMPUTE)
    yield from rows("sanitize", B=7, N=10, D=40, hidden=40, inner=True, norm=True)
    for D, hidden in ((192, 512), (384, 1024), (768, 2048), (1024, 2730), (1536, 4096)):
        few = "second kernels" if D == 768 else ""
        yield from rows(f"compile {few}", B=64, N=197, D=D, hidden=hidden, norm=True, inner=[False, True])
    yield from rows("compile second kernels", B=[1, 4], N=197, D=768, hidden=2048)
    for activation in ("swiglu", "geglu"):
        large = functools.partial(_rows, "mlp", "compile", activation=activation, B=64, N=197, D=768, hidden=2048)
        yield from large(scales=True, recompute=_RECOMPUTE)


def _patch_embed() -> Iterator[Workload]:
    rows = functools.partial(_rows, "patch_embed")
    yield from rows("quick", B=1, px=64, patch=16, D=192)
    for B, px, patch, D in ((1, 224, 16, 768), (8, 224, 16, 768), (1, 224, 14, 768), (32, 32, 4, 192)):
        yield from rows("cpu", B=B, px=px, patch=patch, D=D)
    yield from rows("cpu", B=1, px=256, patch=16, D=1024, frames=16)
    yield from rows("gpu", B=[1, 8], px=[224, 256], patch=16, D=[768, 1024], frames=16)
    grid = {(224, 16): [1, 32, 256], (224, 14): [1, 32, 256], (518, 14): [1, 16, 64], (1024, 16): [1, 4, 16]}
    for (px, patch), batches in grid.items():
        yield from rows("gpu", B=batches, px=px, patch=patch, D=[384, 768, 1024, 1280])
        yield from rows("tune", B=batches[:2], px=px, patch=patch, D=[384, 768, 1024, 1280])
    yield from rows("tune", B=256, px=224, patch=16, D=[384, 768, 1024, 1280])
    yield from rows("tune", B=128, px=224, patch=14, D=[384, 768, 1024, 1280])
    yield from rows("headline", B=[1, 32, 256], px=224, patch=16, D=768)
    yield from rows("rehearse", B=1, px=8, patch=4, D=32)
    yield from rows("traffic", B=5, px=224, patch=16, D=768, parts=51)  # of a batch of 256
    yield from rows("traffic", B=1, px=224, patch=16, D=768)
    yield from rows("traffic", B=1, px=518, patch=14, D=1024, parts=16)
    yield from rows("sanitize", B=3, px=48, patch=16, D=72, image=["wanted", "uint8"])
    yield from rows("sanitize", B=3, px=42, patch=14, D=72, image="wanted")
    yield from rows("sanitize", B=2, px=32, patch=16, D=72, frames=4, image="wanted")
    for patch, px, D in ((4, 32, 192), (8, 224, 768), (14, 518, 1024), (16, 224, 768), (32, 224, 768)):
        few = {14: "second kernels", 16: "second kernels"}.get(patch, "")
        yield from rows(f"compile {few}", B=64, px=px, patch=patch, D=D, image="wanted")
        few = "second kernels" if patch == 14 else ""
        yield from rows(f"compile {few}", B=64, px=px, patch=patch, D=D, image="uint8")
    yield from rows("compile second", B=8, px=224, patch=16, D=768, frames=16, image="wanted")


def _models() -> Iterator[Workload]:
    yield from _rows("block", "quick", B=1, N=50, D=192, H=3)
    yield from _rows("block", "cpu", B=1, N=[50, 197, 577, 1025], D=768, H=12)
    yield from _rows("block", "cpu", B=8, N=197, D=384, H=6)
    for (D, H), (N, B) in itertools.product(
        ((384, 6), (768, 12), (1024, 16), (1280, 16)),
        {197: [1, 32, 256], 257: [1, 64], 1370: [1, 16], 4097: [1, 4]}.items(),
    ):
        yield from _rows("block", "gpu", B=B, N=N, D=D, H=H)
    yield from _rows("block", "headline", B=[1, 32, 256], N=197, D=768, H=12)
    yield from _rows("block", "cpu", B=1, N=577, D=768, H=12, causal=True)
    yield from _rows("block", "gpu", B=[1, 32], N=1025, D=768, H=12, causal=True)
    names = [f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large")]
    cifar = [f"vit_cifar_{size}" for size in ("small", "base", "large")]
    yield from _rows("model", "quick", name="vit_cifar_small", B=1, px=32, depth=1)
    yield from _rows("model", "cpu", name=names[:2], B=1, px=224)
    yield from _rows("model", "long", name=names[2], B=1, px=224)
    yield from _rows("model", "cpu", name="vit_cifar_small", B=8, px=32)
    yield from _rows("model", "long", name="vit_cifar_base", B=1, px=32)
    yield from _rows("model", "gpu", name=cifar, B=[1, 256], px=32)
    yield from _rows("model", "gpu", name=names, B=[1, 32, 256], px=224)
    yield from _rows("model", "gpu", name="vit_huge_patch14_224", B=[1, 32, 128], px=224)
    yield from _rows("model", "headline", name=names[1:3], B=[1, 32, 256], px=224)
    dinov3 = ["vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3"]
    yield from _rows("model", "cpu", name=dinov3, B=1, px=256)
    yield from _rows("model", "gpu", name=["vit_base_patch16_dinov3", "eva02_base_patch14_224"], B=[1, 32, 256], px=224)
    large = [*names[1:], "vit_huge_patch14_224"]
    yield from _rows("model", "gpu", name=large, B=[1, 16], px=518, patch_size=14)
    yield from _rows("model", "gpu", name=large, B=[1, 4], px=1024, patch_size=16)
    yield from _rows("accelerate", "quick", library=INSTALLED[:1], B=1, px=64, depth=1)
    yield from _rows("accelerate", "cpu", library=INSTALLED[:1], B=1)
    yield from _rows("accelerate", "gpu", library=INSTALLED, B=[1, 32, 256])


def _memory() -> Iterator[Workload]:
    """The largest come first: an exponent fitted to small sizes alone would be that of their linear part."""
    yield from _rows("memory, attention", "quick", B=1, N=50, H=3, d=64, max_rounds=1)
    yield from _rows("memory, block", "quick", B=1, N=50, D=192, H=3, max_rounds=1)
    for N in (4097, 2305, 1025, 577, 197):
        yield from _rows("memory, attention", "cpu gpu", B=1, N=N, H=12, d=64, max_rounds=1)
        yield from _rows("memory, block", "cpu gpu", B=1, N=N, D=768, H=12, max_rounds=1)
