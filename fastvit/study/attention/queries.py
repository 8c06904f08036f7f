"""The tokens whose attention is studied: CLS, or patches by row and column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fastvit.study.attention.recording import AttentionCall, Patches

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

    def misfit(self, call: AttentionCall) -> str:
        """Return why a call has no rows for the queries, or "".

        Raises:
            ValueError: the model has no such query.
        """
        return call.unseen or self.locate(call.q.shape[1], call.patches)

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
