"""Capture work as CUDA graphs, whose replays need no host, so that the GPU alone is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fastvit.cuda_graphs.recorder import Recorder, Unfit

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
    recorder = Recorder(torch.device("cuda", torch.cuda.current_device()))
    replays: dict[str, Work] = {}
    remarks: dict[str, str] = {}
    for name, work in works.items():

        def run(_: Work, work: Work = work) -> None:
            work()

        try:
            _, (replay,) = recorder.record(run)
            replay()
            torch.cuda.synchronize()
            replays[name] = replay
        except Unfit as reason:
            remarks[name] = f"no graph: {str(reason)[:200]}; "
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
