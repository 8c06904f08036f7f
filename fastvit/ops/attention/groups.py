"""Groups: tokens that attend to each other. A group is a sample, a packed sequence, or a window of a grid. Both routes,
the fakes and the counts of FLOPs ask here which groups a call has; `Workload` (workload.py) describes one to a kernel.
"""

# No `annotations` from __future__: pdoc cannot resolve string annotations of a NamedTuple re-exported elsewhere

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Relative(NamedTuple):
    """Decomposed relative positions (Li et al. 2022, arXiv:2112.01526) of keys on a grid of kh rows and kw columns, one
    row after another: the score of a key in row r and column c gets rows[..., r] + columns[..., c].

    Attributes:
        rows, columns: (B, M, H, kh) and (B, M, H, kw) for M queries, read by stride. kh * kw is the number of keys. In
            `attention_windows` they are (B, gh, gw, H, wh) and (B, gh, gw, H, ww): the queries are the tokens of the
            grid, the keys those of the query's window. In SAM and ViTDet they are products of the queries and two
            learnt tables, so both get gradients.
    """

    rows: Tensor
    columns: Tensor


class LastArguments(NamedTuple):
    """The last arguments of the registered ops, in their order. Without any of them a query sees its sample.

    Attributes:
        rows, columns: those of `Relative`.
        ends, ends_k: (B + 1,) where the sequences of q (T, H, d) begin and end, and those of k; None: as q's.
        max_seqlen, max_seqlen_k: the most tokens of a sequence of q, and of k.
        window, shift, shift_bias: of a grid q (B, gh, gw, H, d), see `Windows`. No window with relative positions,
            which have its rows and columns.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    ends: Tensor | None = None
    ends_k: Tensor | None = None
    max_seqlen: int = 0
    max_seqlen_k: int = 0
    window: Sequence[int] = ()
    shift: Sequence[int] = ()
    shift_bias: float = 0.0


class Sequences(NamedTuple):
    """Where the sequences of a batch of one begin and end, and the longest one's length; of the keys too, or None where
    they are those of the queries."""

    ends: Tensor
    longest: int
    ends_k: Tensor | None
    longest_k: int


class Windows(NamedTuple):
    """How grids of tokens are cut into windows: rows and columns of the grid and of a window; how far the grid is
    rolled up and to the left before, less than the grid's size; and what is added to the scores between tokens that
    only the roll has made neighbours."""

    grid: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]
    shift_bias: float

    @property
    def tokens(self) -> int:
        return self.window[0] * self.window[1]

    @property
    def per_sample(self) -> int:
        """Return how many windows a grid has; the last ones may reach beyond it."""
        return _windows_of(self.grid, self.window)

    @property
    def hides(self) -> bool:
        """Return whether windows have tokens that do not exist, or some that the roll has made neighbours."""
        return any(self.shift) or any(size % side for size, side in zip(self.grid, self.window, strict=True))


def _windows_of(grid: Sequence[int], window: Sequence[int]) -> int:
    down, across = (-(-size // side) for size, side in zip(grid, window, strict=True))
    return down * across


Groups = Sequences | Windows | None  # None: samples
Heads = tuple[Tensor, Tensor, Tensor]  # q, k and v, or their gradients


class Gradients(NamedTuple):
    """The results of the registered backward op. k and v are None if q is the gradient of a packed tensor; the others
    are None if the call has no such tensor, or did not ask for the mask's."""

    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    mask: Tensor | None = None


def unpacked(q: Any, k: Any = None, v: Any = None) -> Heads:
    """Return q, k and v. If k is None, q is (..., 3, H, d), all of them."""
    return q.unbind(-3) if k is None else (q, k, v)


def groups_of(q: Tensor, last: LastArguments) -> Groups:
    """Return the groups of the queries q (B, M, H, d), (T, H, d) or (B, gh, gw, H, d)."""
    if last.ends is not None:
        return Sequences(last.ends, last.max_seqlen, last.ends_k, last.max_seqlen_k)
    if q.dim() != 5:
        return None
    window, rows, columns = last.window, last.rows, last.columns
    if rows is not None and columns is not None:
        window = rows.shape[-1], columns.shape[-1]
    (gh, gw), (sh, sw) = q.shape[1:3], last.shift or (0, 0)
    return Windows((gh, gw), (window[0], window[1]), (sh % max(gh, 1), sw % max(gw, 1)), last.shift_bias)


def as_samples(x: Tensor, groups: Groups) -> Tensor:
    """Return x as (B, N, H, d): sequences make one sample, and the rows of a grid follow each other."""
    if groups is None:
        return x
    return x[None] if isinstance(groups, Sequences) else x.flatten(1, 2)


def is_added(mask: Tensor | None) -> bool:
    """Return whether a mask is added to the scores: it is not bool."""
    return mask is not None and mask.dtype is not torch.bool


def lse_shape(q: Tensor, mask: Tensor | None, groups: Groups) -> tuple[int, ...]:
    """Return the shape of the LSE of q, as `groups_of` takes it: (B, H, M), with windows for samples, or with a mask of
    numbers (B, H, 2, M). That of sequences is flat: one after the other (H, M) or (H, 2, M)."""
    numbers = (2,) if is_added(mask) else ()
    if isinstance(groups, Sequences):
        T, H, _ = q.shape
        return (T * H * (numbers or (1,))[0],)
    B, M, H = q.shape[0], q.shape[1], q.shape[-2]
    if groups is not None:
        B, M = B * groups.per_sample, groups.tokens
    return (B, H, *numbers, M)


def tokens_of(
    q: Tensor, k: Any, v: Any, mask: Any, seed: Any, scale: float, dropout_p: float, causal: bool = False,
    *last: Any,
) -> int:  # fmt: skip
    """Return N, the tokens among which a call of the forward op attends: those of all sequences together."""
    q, *_ = unpacked(q, k, v)
    groups = groups_of(q, LastArguments(*last))
    return groups.tokens if isinstance(groups, Windows) else q.shape[0 if groups else 1]


def flops(
    q: Any, k: Any, v: Any = None, mask: Any = None, seed: Any = None, scale: float = 1.0, dropout_p: float = 0.0,
    causal: bool = False, rows: Any = None, columns: Any = None, ends: Any = None, ends_k: Any = None,
    max_seqlen: int = 0, max_seqlen_k: int = 0, window: Any = (), *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Count the forward pass from the shapes of an op's tensors. Causal attention counts in full, as in PyTorch; so do
    windows at the border of a grid; sequences as if all keys' were as long as the longest."""
    *tokens, H, d = q if k is not None else (*q[:-3], *q[-2:])
    if ends is not None:
        return 4 * tokens[0] * H * max_seqlen_k * d
    if len(tokens) == 3:
        window = window if rows is None else (rows[-1], columns[-1])
        n = window[0] * window[1]
        return 4 * tokens[0] * _windows_of(tokens[1:], window) * n * n * H * d
    B, M = tokens
    return 4 * B * M * (M if k is None else k[1]) * H * d
