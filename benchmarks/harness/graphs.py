"""Capture work as CUDA graphs, whose replays need no host, so that the GPU alone is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Work = Callable[[], object]


class Uncapturable(RuntimeError):
    """CUDA or the work refused the capture; the process's context is sound."""


def capture_all(works: Mapping[str, Work]) -> tuple[dict[str, Work], dict[str, str]]:
    """Return the functions that replay the works, and remarks that say why there is no graph of the others. The works
    use tensors that they hold already, and their results are lost.

    The graphs share their memory, so that all of them need no more than the largest: only one may be replayed at a
    time.
    """
    for work in works.values():
        _warm_up(work)
    pool = torch.cuda.graph_pool_handle()
    replays: dict[str, Work] = {}
    remarks: dict[str, str] = {}
    for name, work in works.items():
        try:
            replays[name] = capture(work, pool)
        except Uncapturable as reason:
            remarks[name] = f"no graph: {reason}; "
    return replays, remarks


def _warm_up(work: Work) -> None:
    """Call the work three times on a stream of its own, so that kernels are loaded and libraries choose their
    algorithms."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def capture(work: Work, pool: Any = None) -> Work:
    """Return the function that replays `work`, which has run before.

    Raises:
        Uncapturable: CUDA or the work refused the capture.
        RuntimeError: the error that has ended the context.
    """
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            work()
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        torch.cuda.set_stream(stream)  # a capture that fails at its end leaves its own stream current
        _check_context()
        cause = error.__context__ or error  # ending a capture that has failed fails, too
        raise Uncapturable(f"{type(cause).__name__}: {str(cause)[:200]}") from error
    return graph.replay


def _check_context() -> None:
    """Raise where kernels, or captures, no longer work."""
    torch.cuda.synchronize()
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    if x.item() != 1:
        raise RuntimeError("graphs compute nothing after a failed capture")
