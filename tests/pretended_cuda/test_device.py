"""The pretended device notices what it promises to notice."""

import ctypes
import threading
from contextlib import nullcontext

import pytest
import torch
import triton
from device_trace import problems, recorded
from triton import language as tl

cuda = ctypes.CDLL("libcuda.so.1")
UNSUPPORTED = 900  # cudaErrorStreamCaptureUnsupported


@triton.jit
def store(out):
    tl.store(out, 1.0)


def test_addresses_of_freed_memory():
    x = torch.zeros(32 << 20, device="cuda")  # a segment of its own
    interface = {"shape": (8,), "typestr": "<f4", "version": 2, "data": (x.data_ptr(), False)}
    del x
    torch.cuda.empty_cache()
    stale = torch.as_tensor(type("Freed", (), {"__cuda_array_interface__": interface})(), device="cuda")
    with recorded() as events, pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        stale.sqrt_().cpu()
    assert [e["name"].partition(" ")[0] for e in events if e["e"] == "dangling"] == ["void", "void", "copy"]


@pytest.mark.parametrize(("mode", "own", "another"), [("global", 1, 1), ("thread_local", 1, 0), ("relaxed", 0, 0)])
def test_a_call_that_a_capture_forbids(mode, own, another):
    for is_forbidden, run in ((own, threading.Thread.run), (another, threading.Thread.start)):
        graph, address, errors = torch.cuda.CUDAGraph(), ctypes.c_void_p(), []
        thread = threading.Thread(target=lambda e=errors, a=address: e.append(cuda.cudaMalloc(ctypes.byref(a), 1)))
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode=mode)
            run(thread)
            if run is threading.Thread.start:
                thread.join()
            with pytest.raises(torch.AcceleratorError, match="error during capture") if is_forbidden else nullcontext():
                graph.capture_end()
        assert errors == [UNSUPPORTED if is_forbidden else 0]


def test_a_launch_on_a_destroyed_stream():
    handle, x = ctypes.c_void_p(), torch.zeros(8, device="cuda")
    assert cuda.cudaStreamCreate(ctypes.byref(handle)) == 0 == cuda.cudaStreamDestroy(handle)
    with (
        torch.cuda.stream(torch.cuda.ExternalStream(handle.value)),
        pytest.raises(torch.AcceleratorError, match="handle"),
    ):
        x.sqrt_()


@pytest.mark.parametrize(("grid", "shared"), [((1, 70_000), 0), ((1, 1), 240_000), ((0, 1), 0)])
def test_a_launch_that_the_device_refuses(grid, shared):
    function = ctypes.c_void_p(store[(1,)](torch.zeros(8, device="cuda")).function)
    with recorded() as events:
        assert cuda.cuLaunchKernel(function, *grid, 1, 32, 1, 1, shared, None, None, None)
    assert [event["e"] for event in problems(events)] == ["misuse"]


def test_memory_ends(monkeypatch):
    monkeypatch.setenv("PRETENDED_GIB", "0.25")
    with pytest.raises(torch.OutOfMemoryError, match="total capacity of 256"):
        torch.empty(1 << 28, device="cuda", dtype=torch.uint8)


def test_copies_and_fills_are_done():
    assert torch.full((1000,), 3.0, device="cuda").add_(2).cpu().tolist() == [5.0] * 1000
    assert torch.arange(9).cuda()[2:4].clone().tolist() == [2, 3]


def test_the_device_is_busy():
    event = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)  # 0.1 s
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
