"""Two block ops whose calls are replayed, what tells a replayed call from others, and what calls cost on the host."""

import contextlib
import sys
from unittest import mock

import torch
from op_cases import ROWS

from fastvit import ops
from fastvit.ops.runtime import autograd, backend, record, registry
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import run as runtime_run

B, N, D = 2, 16, 16
CALLS = 6  # one that runs in Python, one that is recorded, and others that are replayed
NODES = [name for name in ROWS if name.startswith(("layer_norm_attention", "mlp", "layer_norm_mlp"))]


def by_dispatcher():
    """Let ops call their registered ops within the context, as a compiled graph does."""
    dispatched = runtime_call.UNKEPT[backend.Route.DISPATCHER]
    return _beginning(lambda *_: (dispatched, []), autograd, runtime_run)


def in_python():
    """Replay nothing within the context."""
    begin = runtime_call.begin
    return _beginning(
        lambda *arguments: (runtime_call.UNKEPT[begin(*arguments)[0].route], []), autograd, registry, runtime_run
    )


@contextlib.contextmanager
def _beginning(begin, *modules):
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "begin", begin))
        yield


def replay_at_once():
    """From now on record every call where it is first seen, and return what its replay makes."""
    recorded, gpu = runtime_run._recorded, torch.cuda.is_available()

    def run(self, function, inputs):
        held, recorder = [*inputs], record.Recorder(inputs)
        drawn = gpu and torch.cuda.get_rng_state()
        with recorder:
            outputs = function(inputs)
        plan = recorder.plan(outputs)
        return outputs if plan is None else again(plan, drawn, held)

    def and_replayed(recorder, route, prepared, given):
        drawn = gpu and torch.cuda.get_rng_state()
        results, replay = recorded(recorder, route, prepared, given)
        if replay is not None:
            del results
            results = again(replay, drawn, [*given])
        return results, replay

    def again(plan, drawn, given):
        """Replay with the seeds of the recorded call, which a test draws once."""
        if gpu:
            torch.cuda.set_rng_state(drawn)
        return plan(given)

    runtime_run._recorded = and_replayed
    runtime_call.RecordedCall.run = run
    runtime_call._was_seen = lambda key: True


@contextlib.contextmanager
def replays():
    """Yields a list to which every plan that is called within the context, and made there, appends whether it was
    replayed."""
    count, original = [], record.Recorder.plan

    def counting(self, outputs):
        plan = original(self, outputs)

        def replay(inputs):
            results = plan(inputs)
            count.append(results is not None)
            return results

        return plan and replay

    with mock.patch.object(record.Recorder, "plan", counting):
        yield count


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
