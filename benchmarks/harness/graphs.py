"""Capture work as CUDA graphs, whose replays need no host, so that the GPU alone is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]


def capture_all(works: Mapping[str, Work]) -> tuple[dict[str, Work], dict[str, str]]:
    """Return the functions that replay the works, and remarks that say why there is no graph of the others. The works
    use tensors that they hold already, and their results are lost.

    The graphs share their memory, so that all of them need no more than the largest: only one may be replayed at a
    time.

    Raises:
        RuntimeError: the error that has ended the context.
    """
    for work in works.values():
        _warm_up(work)
    stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    replays: dict[str, Work] = {}
    remarks: dict[str, str] = {}
    for name, work in works.items():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                work()
            graph.replay()
            torch.cuda.synchronize()
            replays[name] = graph.replay
        except Exception as error:
            torch.cuda.set_stream(stream)  # a capture that fails at its end leaves its own stream current
            _check_context()
            cause = error.__context__ or error  # ending a capture that has failed fails, too
            remarks[name] = f"no graph: {type(cause).__name__}: {str(cause)[:200]}; "
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


def _check_context() -> None:
    """Raise where kernels, or captures, no longer work."""
    torch.cuda.synchronize()
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    if x.item() != 1:
        raise RuntimeError("graphs compute nothing after a failed capture")
