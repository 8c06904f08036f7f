"""How many bytes the kernels load and store, at small shapes or `nightly`, and that the counter sees bad accesses."""

from typing import Any

import pytest
import torch

from fastvit.ops.runtime import backend as backends

if not (backends.INTERPRET and backends.HAVE_TRITON):
    pytest.skip("traffic is counted in Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from benchmarks.codegen import traffic
from benchmarks.codegen.traffic_counter import Argument, CountedLaunch, Traffic, count
from benchmarks.harness.workloads import Workload


@triton.jit
def shifted_kernel(x_ptr, out_ptr, shift, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Programs store to STRIDE * program_id, and load `shift` elements further on."""
    at = tl.program_id(0) * STRIDE + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at + shift))


@pytest.mark.parametrize(
    ("programs", "shift", "stride", "message"),
    [
        (2, 1, 8, "loads from memory outside"),
        (2, 0, 4, "two programs store one element of out_ptr"),
        (1, 12, 8, "no argument covers"),  # in the storage of a view, after its elements
    ],
)
def test_out_of_bounds_and_races_raise(programs: int, shift: int, stride: int, message: str) -> None:
    x, out = torch.zeros(3, 16), torch.zeros(16)
    x = x[:2, :8] if shift > 8 else x[0].clone()
    with pytest.raises(InterpreterError, match=message), count():
        shifted_kernel[(programs,)](x, out, shift, BLOCK=8, STRIDE=stride)


# ---- goals ----


Row = dict[str, Any]


def passes(op: str, parts: int = 1, **sizes: Any) -> tuple[Traffic, Traffic]:
    counted = traffic.measure(Workload(op, sizes, parts=parts))
    return counted["forward"], counted["backward"]


def launch_of(counted: Traffic, kernel: str) -> CountedLaunch:
    (launch,) = (launch for launch in counted.launches if launch.kernel == kernel)
    return launch


def moved(launch: CountedLaunch, *names: str) -> int:
    """Return the bytes loaded and stored of arguments, those that are not None."""
    arguments: list[Argument] = [launch.arguments[f"{n}_ptr"] for n in names if f"{n}_ptr" in launch.arguments]
    return sum(argument.loaded + argument.stored for argument in arguments)


def tiled(counted: Traffic) -> float:
    return counted.moved / sum(launch.least_tiled for launch in counted.launches)


# What one SM has of a batch of 256 or 264
ROWS: Row = {"parts": traffic.SMS, "B": 1, "N": 382, "D": 192}
HEADS: Row = {"parts": traffic.SMS, "B": 26, "N": 16, "H": 12, "d": 64}
PATCHES: Row = {"parts": traffic.SMS, "B": 1, "px": 224, "patch": 16, "D": 128}


def nightly(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("layer_norm", ROWS),
        nightly("add_layer_norm", ROWS),
        nightly("rotary", HEADS | {"spelling": "halves"}),
        nightly("qk_norm", HEADS | {"norm": "layer", "spelling": "halves"}),
    ],
)
def test_within_five_percent_of_the_least(op: str, sizes: Row) -> None:
    """Rows and heads are moved once; each program loads parameters and tables once."""
    for counted in passes(op, **sizes):
        assert 1.0 <= counted.moved / counted.least <= 1.05
        assert all(a.stored == a.stored_once for launch in counted.launches for a in launch.arguments.values())


@pytest.mark.parametrize(
    ("op", "sizes"), [("patch_embed", PATCHES), nightly("attention", {"B": 1, "N": 197, "H": 1, "d": 80})]
)
def test_a_tile_is_loaded_once_per_program(op: str, sizes: Row) -> None:
    for counted in passes(op, **sizes):
        assert 1.0 <= tiled(counted) <= 1.15


def test_short_attention_loads_queries_once_and_its_backward_pass_moves_the_least() -> None:
    forward, backward = passes("attention", B=1, N=100, H=1, d=64)
    (launch,) = forward.launches
    assert launch.arguments["q_ptr"].readers == 1.0
    assert launch.stored == 100 * 64 * 2 + 100 * 4, "the output and LSE, once"
    assert tiled(forward) <= 1.15
    assert backward.moved == backward.least == 8 * 100 * 64 * 2 + 100 * 4


def test_positions_and_norms_within_attention_are_written_in_place() -> None:
    """With rotary positions alone, q and k move once; gradients of norms replace attention's in the packed tensor."""
    for counted in passes("layer_norm_attention", B=2, N=17, D=64, H=1, rotary="halves"):
        launch = launch_of(counted, "rotary_kernel")
        assert moved(launch, "x", "out") == 2 * (2 * 16 * 2 * 64 * 2), "read once and written once"
        assert moved(launch, "sin", "cos") == 2 * 16 * 64 * 4, "by one program"
    _, backward = passes("layer_norm_attention", B=1, N=20, D=64, H=1, rotary="halves", qk_norm="rms")
    launch = launch_of(backward, "qk_norm_bwd_kernel")
    gradients_and_inputs = moved(launch, "q", "k", "dq", "dk", "dq_out", "dk_out")
    assert gradients_and_inputs == 3 * 2 * 20 * 64 * 2, "q, k and their gradients in, the gradients out"


def test_a_gate_reads_its_rows_once_for_both_layers() -> None:
    """The weights of gate and value are loaded equally often, and x no more often than for one of them."""
    forward, backward = passes("mlp", parts=traffic.SMS, B=1, N=150, D=64, hidden=128, activation="swiglu")
    launch = launch_of(forward, "gated_fwd_kernel")
    tiles = launch.arguments["x_ptr"].readers
    assert launch.arguments["x_ptr"].loaded == tiles * 150 * 64 * 2
    assert launch.arguments["gate_ptr"].loaded == launch.arguments["value_ptr"].loaded
    assert launch.stored == 3 * 150 * 128 * 2, "h, gate and value, once"
    assert tiled(forward) == tiled(backward) == 1.0


@pytest.mark.parametrize("mask", ["padding", "positions"])
def test_a_mask_is_loaded_once_for_each_tile(mask: str) -> None:
    """Rows of 16 elements are loaded by the programs of every head; the gradient is stored as two sums in float32."""
    forward, backward = passes("attention", B=2, N=40, H=1, d=16, mask=mask)
    assert tiled(forward) == 1.0
    assert tiled(backward) < 1.08
    gradients = [launch for launch in backward.launches if launch.kernel == "attention_bwd_mask_kernel"]
    assert [launch.stored for launch in gradients] == ([2 * 40 * 48 * 4] if mask == "positions" else [])
