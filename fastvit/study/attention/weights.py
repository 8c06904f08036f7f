"""Computes the weights of recorded attention: layer by layer, for some queries, heads and keys. Queries are CLS, or
patches by row and column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fastvit.ops.runtime.checks import check_tensor
from fastvit.reference.ops import visible_softmax
from fastvit.study.attention import recording
from fastvit.study.attention.recording import AttentionCall, Patches

T = TypeVar("T")

CHUNK = 1 << 22  # weights at a time: 16 MiB in float32
Query = str | tuple[int, int]
Queries = Query | Sequence[Query] | None
_CLS = ("cls_token", "class_token", "class_embedding")  # the libraries' names of the parameter
_ALLOWED = '"cls", (row, column) of a patch, or several of these'


class QueryTokens:
    """Finds the queries among the tokens of a model, from the first attention that runs.

    Attributes:
        queries: as given, or by default CLS, or the central patch of a model without CLS.
        numbers: the indices of their tokens.
        has_cls: whether the first token is CLS.
        prefix: how many tokens come before the patches.
        grid: (h, w) of the patches.
        patch_size: (height, width) in pixels.
    """

    def __init__(self, model: nn.Module, queries: Queries) -> None:
        self.kind = type(model).__name__
        self.has_cls = any(name.rpartition(".")[2] in _CLS for name, _ in model.named_parameters())
        self.queries = _parsed(queries)
        self.numbers: list[int] = []
        self.prefix = 0
        self.grid = self.patch_size = (0, 0)
        self._count = 0

    def locate(self, N: int, patches: Patches | None) -> str:
        """Find the queries among N tokens, or return why these are not the tokens seen before, or of the patches.

        Raises:
            ValueError: the model has no such query, or no patches.
        """
        if self._count:
            return "" if self._count == N else f"it is over {N} tokens, where others are over {self._count}"
        if patches is None:
            raise ValueError(f"{self.kind} has no grid of patches: no convolution strides as wide as its kernel")
        h, w = patches.grid
        if h * w > N:
            return f"it is over {N} tokens, of an image of {h} x {w} patches"
        self._count, self.prefix, (self.grid, self.patch_size) = N, N - h * w, patches
        self.has_cls = self.has_cls and self.prefix > 0
        if not self.queries:
            self.queries = ("cls",) if self.has_cls else ((h // 2, w // 2),)
        self.numbers = [self._number(query) for query in self.queries]
        return ""

    def _number(self, query: Query) -> int:
        h, w = self.grid
        if isinstance(query, str):
            if not self.has_cls:
                raise ValueError(f'queries must be (row, column) of a patch, got "cls": {self.kind} has no CLS')
            return 0
        row, column = query
        if not (0 <= row < h and 0 <= column < w):
            raise ValueError(f"queries must have rows in 0..{h - 1} and columns in 0..{w - 1}, got ({row}, {column})")
        return self.prefix + row * w + column


def _parsed(queries: Any) -> tuple[Query, ...]:
    """Return one query or several as a tuple; () for None."""
    if queries is None:
        return ()
    if _is_query(queries):
        queries = (queries,)
    if isinstance(queries, str) or not isinstance(queries, Sequence) or not queries:
        raise ValueError(f"queries must be {_ALLOWED}, got {queries!r}")
    for query in queries:
        if not _is_query(query):
            raise ValueError(f"queries must be {_ALLOWED}, got {query!r}")
    return tuple(query if isinstance(query, str) else (query[0], query[1]) for query in queries)


def _is_query(query: Any) -> bool:
    if isinstance(query, str):
        return query == "cls"
    return isinstance(query, Sequence) and len(query) == 2 and all(type(i) is int for i in query)


def by_layer(
    model: nn.Module,
    image: Tensor,
    tokens: QueryTokens,
    layers: Sequence[int] | None,
    compute: Callable[[AttentionCall], T],
) -> tuple[tuple[int, ...], list[T], int]:
    """Run the model once and compute something from the attention of every layer asked for, while its q and k exist.

    Args:
        image: (1, C, H, W).
        tokens: those of the model.
        layers: numbers in the order of the forward pass, negative ones from the last. None for all.

    Returns:
        The layers' numbers from 0, a result for each, and how many layers the model has.

    Raises:
        ValueError: the model has no such layer, or its attention is not seen.
    """
    back = max((-layer for layer in layers or () if layer < 0), default=0)
    kept: dict[int, T] = {}
    reasons: dict[int, str] = {}  # why a layer has no result

    def on_call(call: AttentionCall) -> None:
        if layers is None or back or call.layer in layers:
            if reason := call.unseen or tokens.locate(call.q.shape[1], call.patches):
                reasons[call.layer] = reason
            else:
                kept[call.layer] = compute(call)
        if layers is not None and call.layer - back not in layers:  # now known not to be the `back`-th from the last
            kept.pop(call.layer - back, None)

    depth = recording.run(model, image, on_call)
    numbers = resolved("layers", layers, depth)
    for layer in numbers:
        if layer in reasons:
            raise ValueError(f"layer {layer}'s attention is not seen: {reasons[layer]}")
    return numbers, [kept[layer] for layer in numbers], depth


def softmax(
    call: AttentionCall,
    rows: slice | list[int],
    heads: slice | list[int] = slice(None),
    keys: slice = slice(None),
) -> Tensor:
    """Return the weights (heads, rows, keys) of some rows and heads. The weights of a row add up to 1 over these keys.

    They are in float32, or float64 if q is, under autocast too.
    """
    q, k, dtype = call.q, call.k, wide(call.q)
    with torch.autocast(q.device.type, enabled=False):
        scores = call.scale * q[:, rows][heads].to(dtype) @ k[heads][:, keys].to(dtype).transpose(-2, -1)
        return visible_softmax(scores, None if call.bias is None else call.bias[:, rows][heads][..., keys])


def chunks(call: AttentionCall, first: int = 0) -> Iterator[slice]:
    """Cut the queries from `first` on into slices of at most CHUNK weights in all heads, and of at least one query."""
    H, N, _ = call.q.shape
    step = max(1, CHUNK // (H * N))
    return (slice(start, min(N, start + step)) for start in range(first, N, step))


def wide(q: Tensor) -> torch.dtype:
    """Return the dtype of weights."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def one_image(image: Tensor, name: str = "image") -> Tensor:
    """Return an image (C, H, W) or (1, C, H, W) as (1, C, H, W)."""
    check_tensor(name, image, is_image=True)
    if image.dim() not in (3, 4) or (image.dim() == 4 and image.shape[0] != 1):
        raise ValueError(f"{name} must have shape (C, H, W) or (1, C, H, W), got {tuple(image.shape)}")
    return image if image.dim() == 4 else image[None]


def several_images(images: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the images of a tensor (B, C, H, W) or (C, H, W), or of a sequence, as (1, C, H, W) each.

    Raises:
        ValueError: no image, one of another shape, or images of several sizes.
        TypeError: something else.
    """
    if isinstance(images, Tensor):
        if images.dim() not in (3, 4) or not len(images):
            raise ValueError(f"images must have shape (B, C, H, W) or (C, H, W), got {tuple(images.shape)}")
        return list(images.split(1)) if images.dim() == 4 else [images[None]]
    if not isinstance(images, Sequence) or isinstance(images, str):
        raise TypeError(f"images must be a tensor or a sequence of tensors, got {type(images).__name__}")
    found = [one_image(image, f"images[{i}]") for i, image in enumerate(images)]
    if len(shapes := {tuple(image.shape[1:]) for image in found}) != 1:
        raise ValueError(f"images must be one or more of one shape, got {sorted(shapes)}")
    return found


def checked(name: str, value: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return one number or several as a tuple; None for all."""
    if value is None:
        return None
    numbers = tuple(value) if isinstance(value, Sequence) else (value,)
    if not numbers or any(type(number) is not int for number in numbers):
        raise ValueError(f"{name} must be an integer, some integers, or None for all, got {value!r}")
    return numbers


def resolved(name: str, numbers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return indices below `count`, with negative ones resolved; all of them for None."""
    if not count:
        raise ValueError("the model has no self-attention that is seen: neither fastvit's nor PyTorch's")
    for number in numbers or ():
        if not -count <= number < count:
            raise ValueError(f"{name} must be in {-count}..{count - 1}, got {number}")
    return tuple(range(count)) if numbers is None else tuple(number % count for number in numbers)
