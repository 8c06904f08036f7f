"""The registered ops under the public ones, each with the arguments that the table's rows pass to it."""

import functools

import pytest
import torch
from op_cases import ROWS, function, made, not_interpreted, on_both, outputs_of
from torch.utils._python_dispatch import TorchDispatchMode

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import registry

OPTIONAL = {"bias", "fc1_bias", "fc2_bias", "proj_bias", "layer_scale", "row_scale", "pos_embed", "prefix"}
every_registered_op = pytest.mark.parametrize("op", registry.IMPLEMENTATIONS, ids=str)


class Recorder(TorchDispatchMode):
    """Records one call of each kind: by op, dtypes of tensors, tensors that are missing, and flags."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "fastvit":
            kind = [(a.dtype, a.dim()) if isinstance(a, torch.Tensor) else type(a) for a in args]
            flags = [a for a in args if isinstance(a, str | bool | torch.dtype)]
            copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]  # an op may overwrite
            self.calls.setdefault((op, *kind, *flags), (op, copies))
        return op(*args, **(kwargs or {}))


@functools.cache
def recorded(device):
    """Return (op, arguments) of every kind of call, in inference and in training, with and without autocast and the
    optional tensors."""
    of_a_sum = {"norm": "rms", "bias": None}, {"layer_scale": None}
    runs = [(name, {}) for name in ROWS] + [("add_layer_norm", changes) for changes in of_a_sum]
    with ops.use_backend("aten"), Recorder() as recorder:
        for name, changes in runs:
            tensors = made(name, 2, 6, device) | changes
            fewer = tensors | dict.fromkeys(tensors.keys() & OPTIONAL)
            for given, autocast, training in (
                (tensors, False, False),
                (tensors, False, True),
                (tensors, True, True),
                (fewer, False, True),
            ):
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast), torch.set_grad_enabled(training):
                    outputs = outputs_of(function(name)(**given))
                if training:
                    torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    return list(recorder.calls.values())


def calls_of(op, device):
    calls = [arguments for called, arguments in recorded(device) if called is op]
    assert calls, "no row of the table calls it"
    return calls


# where a launcher's outputs may have other shapes or strides than the fake says
INTERPRETED = ["attention_fwd", "attention_bwd", "linear_dact", "add_layer_norm_bwd", "layer_norm_bwd"]
INTERPRETED += ["qk_norm_bwd", "patch_embed_fwd"]
INTERPRETED = [getattr(torch.ops.fastvit, name).default for name in INTERPRETED]


@on_both("op", registry.IMPLEMENTATIONS, INTERPRETED)
def test_opcheck(op, backend, device):
    """The whole check of one kind of call; of the others, what depends on the arguments. In the interpreter, the shapes
    and strides of one call for each choice of tensors; a gated layer has a matrix of another width."""
    calls, only = calls_of(op, device), ("test_schema", "test_faketensor")
    if backend == "triton" and backends.INTERPRET:
        sizes = lambda a: (a.ndim, a.shape[-1] if a.ndim == 2 else 0) if isinstance(a, torch.Tensor) else None  # noqa: E731
        kinds = {tuple(map(sizes, arguments)): arguments for arguments in reversed(calls)}
        calls, only = [*kinds.values()], only[1:]
    else:
        torch.library.opcheck(op, calls[0])
    for arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=only)


@not_interpreted
@every_registered_op
def test_minds_neither_autocast_nor_autograd(op, backend, device):
    """It has chosen its dtypes, and its gradient is another op's; an exported program calls it with autograd on."""
    for arguments in calls_of(op, device):
        with torch.no_grad():
            want = outputs_of(op(*arguments))
        leaves = [
            a.detach().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in arguments
        ]
        for autocast in (False, True):
            saved = []
            with (
                torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t),
                torch.autocast(device.type, torch.bfloat16, enabled=autocast),
            ):
                got = outputs_of(op(*leaves))
            assert not saved
            for a, b in zip(want, got, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
