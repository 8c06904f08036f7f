"""Two block ops whose calls are remembered, what tells a remembered call from the first of its kind, and what calls
launch and cost on the host."""

import contextlib
import sys
from unittest import mock

import torch
from op_cases import ROWS

from fastvit import ops
from fastvit.ops.runtime import backend, registry
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import launch as runtime_launch
from fastvit.ops.runtime.record import record

B, N, D = 2, 16, 16  # a mask's rows are then read in place
NODES = [name for name in ROWS if name.startswith(("layer_norm_attention", "mlp", "layer_norm_mlp"))]


@contextlib.contextmanager
def _beginning(function):
    """Let function(call) replace every call that an op begins, within the context."""
    original = runtime_call.begin

    def begin(*arguments, **options):
        return function(original(*arguments, **options))

    with contextlib.ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("fastvit.ops")]:
            if getattr(module, "begin", None) is original:
                stack.enter_context(mock.patch.object(module, "begin", begin))
        yield


@contextlib.contextmanager
def by_dispatcher():
    """Let ops call their registered ops within the context, as a compiled graph does."""
    begin, dispatched = registry.begin, _beginning(lambda call: runtime_call.UNKEPT[backend.Path.DISPATCHER])
    with dispatched, mock.patch.object(registry, "begin", begin):
        yield


def replay_at_once():
    """From now on record every call where it is first seen, and return what its plan makes."""

    def run(self, function, inputs):
        held = [*inputs]
        outputs, plan = record(function, inputs)
        return outputs if plan is None else plan(held)

    runtime_call.FirstCall.run = run
    runtime_call._was_seen = lambda key: True


def uncached():
    """Remember nothing within the context."""
    return _beginning(lambda call: runtime_call.UNKEPT[call.path])


@contextlib.contextmanager
def counted():
    """Yields a list with an entry for each call that an earlier one was remembered for."""
    count = []

    def counting(call):
        count.extend([1] * isinstance(call, runtime_call.LaterCall))
        return call

    with _beginning(counting):
        yield count


class Recorder:
    """Notes launches, which then do not run."""

    def __init__(self):
        self.launches, self.refused, self._names = [], None, {}

    def __call__(self, kernel, programs, tensors, numbers, constants):
        if kernel.__name__ == self.refused:
            raise runtime_launch.KernelUnsupported(f"{self.refused} does not fit")
        self.launches.append((kernel.__name__, programs, numbers, {**constants}, [*map(self._described, tensors)]))

    def _described(self, t):
        if t is None:
            return None
        strides = [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
        return t.shape, strides, t.dtype, self._names.get(t.data_ptr())

    def launched(self, function, tensors=()):
        """Return what function() launches: kernels, grids, numbers, constants, and for each tensor its layout, and its
        place among the given ones."""
        self._names = {t.data_ptr(): i for i, t in reversed([*enumerate(tensors)]) if t is not None}
        self.launches = []
        function()
        launches, self.launches = self.launches, []
        return launches


@contextlib.contextmanager
def recording():
    """Launch nothing within the context; yields the `Recorder`."""
    recorder = Recorder()
    with runtime_launch.launching(recorder):
        yield recorder


def call(x, weights, **options):
    return ops.layer_norm_mlp(x, *weights, **({"residual": x} | options))


def x_of(device, *shape, dtype=torch.float32):
    return torch.randn(*shape, device=device).to(dtype)


def attended(x, weights, heads, **options):
    return ops.layer_norm_attention(x, *weights[:2], *heads, 1, **options)


def functions_entered(call):
    """Return the Python functions that call() enters, itself excluded, as file:name: a cost without a clock, the same
    on every machine."""
    entered = []

    def note(frame, event, _):
        if event == "call":
            entered.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[1:]
