"""Work as a CUDA graph: replayed without its host, so that what is timed is the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Work = Callable[[], object]


class Uncapturable(RuntimeError):
    """CUDA or the work refused the capture; the process's context is sound."""


def capture_all(works: Mapping[str, Work]) -> dict[str, Work | str]:
    """For each of the works what replays it, or the reason why there is no graph of it. They compute in tensors that
    they hold already, and what they return is lost.

    The graphs share their memory, so that all of them need no more than the hungriest: one may be replayed at a time.
    """
    for work in works.values():
        _warm_up(work)
    pool = torch.cuda.graph_pool_handle()
    found: dict[str, Work | str] = {}
    for name, work in works.items():
        try:
            found[name] = capture(work, pool)
        except Uncapturable as reason:
            found[name] = str(reason)
    return found


def _warm_up(work: Work) -> None:
    """Three calls on a stream of their own: kernels are compiled and loaded, libraries have chosen their algorithms."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def capture(work: Work, pool: Any = None) -> Work:
    """What replays `work`, which has run before. Raises `Uncapturable`, or the error that has ended the context."""
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            work()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        torch.cuda.set_stream(stream)  # a capture that fails at its end leaves its own stream behind
        _check_context()
        cause = error.__context__ or error  # ending a capture that has failed fails, too
        raise Uncapturable(f"{type(cause).__name__}: {str(cause)[:200]}") from error
    return graph.replay


def _check_context() -> None:
    """Raises where kernels, or captures, no longer work."""
    torch.cuda.synchronize()
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    if x.item() != 1:
        raise RuntimeError("graphs compute nothing after a failed capture")
