"""Fixtures of the whole suite. Without a GPU the Triton kernels run in Triton's interpreter; with one, on the GPU."""

import os

import torch

HAVE_GPU = torch.cuda.is_available()
if not HAVE_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("helpers")))  # `from oracle import ...`

from fastvit.integrations import forward
from fastvit.ops import use_backend
from fastvit.ops.runtime import call

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores
    os.environ.pop("COLUMNS", None)  # xdist's 80; without xdist output that is captured has no width

HAVE_TRITON = importlib.util.find_spec("triton") is not None

if HAVE_TRITON and not HAVE_GPU:
    import interpreter_shim

    interpreter_shim.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-case", action="store_true", help="of every test one case, and of every backend")
    parser.addoption("--replayed", action="store_true", help="record a call where it is first seen, and replay it")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--replayed"):
        import replaying

        replaying.replay_at_once()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """--one-case keeps the first case of every test with every backend that it has."""
    if not config.getoption("--one-case"):
        return
    first: dict[tuple[str, str], pytest.Item] = {}
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        first.setdefault((item.nodeid.partition("[")[0], str(parameters.get("backend"))), item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = first.values()


@pytest.fixture(params=["aten", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per implementation; a fallback from Triton to ATen raises."""
    if request.param == "triton" and not HAVE_TRITON:
        pytest.skip("triton is not installed")
    with use_backend(request.param, strict=True):
        yield request.param


@pytest.fixture
def triton_backend() -> Iterator[None]:
    if not HAVE_TRITON:
        pytest.skip("triton is not installed")
    with use_backend("triton", strict=True):
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAVE_GPU else "cpu")


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    """Tokens for the modules of graph_models.py."""
    from graph_models import B, D, N

    return torch.randn(B, N, D, device=device)


@pytest.fixture(autouse=True)
def _seeded_and_poisoned() -> Iterator[None]:
    """A fixed seed, and NaN in all fresh memory, so that an output element that is not written is seen."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    forward._warned.clear()  # every test is warned of its own
    with call.forgotten(), use_backend("auto" if HAVE_GPU else "aten", strict=False):
        yield
    torch.use_deterministic_algorithms(False)
