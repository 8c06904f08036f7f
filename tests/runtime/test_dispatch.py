"""Calls that nothing observes go to an op's implementation without the dispatcher; every observer still sees the op."""

import warnings
from unittest import mock

import pytest
import torch
from models import Calls
from op_cases import ROWS, function, made, more, results
from replaying import NODES, functions_entered
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import run

# those that are replayed on ATen without a gradient
REPLAYED = [name for name in ROWS if not any(word in name for word in ("varlen", "lengths", "dropout", "windows"))]


def call_of(name):
    arguments = ROWS[name].arguments(made(name, 1, 18, torch.device("cpu"), D=32, hidden=64, gated=64), **more(name))
    op = getattr(ops, ROWS[name].op)
    return lambda: op(**arguments)


@pytest.mark.parametrize("name", REPLAYED)
def test_python_functions_per_call(name):
    """A replayed call enters at most eight functions, its own included."""
    call = call_of(name)
    with torch.inference_mode():
        direct = [call() for _ in range(4)][-1]  # after which it is replayed, if it can be
        entered = functions_entered(call)
        with Calls():
            dispatched = call()
    torch.testing.assert_close(direct, dispatched, rtol=0, atol=0)
    assert len(entered) <= 8, "\n".join(entered)


@pytest.mark.parametrize("cast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", NODES)
def test_in_one_step(name, cast, device):
    """The results and saved tensors are those of the variant for transforms and the compiler, in two steps with casts
    outside."""
    op, tensors = function(name), made(name, 2, 18, device)

    def saved_and_results():
        kept = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t)
        with torch.autocast(device.type, torch.bfloat16, enabled=cast), hooks:
            return results(op, tensors), sorted(kept)

    got, saved = saved_and_results()
    with mock.patch.object(run, "unwrap_if_dead", None):
        want, saved_in_two = saved_and_results()
    assert all(map(torch.equal, got, want))
    assert [t.dtype for t in got] == [t.dtype for t in want]
    assert saved == saved_in_two


class FunctionNames(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func).replace(".default", "").replace(".", "::"))
        return func(*args, **kwargs or {})


def by_mode(call):
    with Calls() as mode:
        call()
    return set(mode.names)


def by_function_mode(call):
    with FunctionNames() as mode:
        call()
    return mode.names


def by_profiler(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


def by_selective_checkpoint(call):
    names = set()

    def policy(context, func, *args, **kwargs):
        names.add(func._schema.name)
        return CheckpointPolicy.PREFER_RECOMPUTE

    checkpoint(lambda _: call(), torch.ones(1, requires_grad=True), use_reentrant=False,
               context_fn=lambda: create_selective_checkpoint_contexts(policy))  # fmt: skip
    return names


@pytest.mark.parametrize("observer", [by_mode, by_function_mode, by_profiler, by_selective_checkpoint])
def test_observers_see_the_op(observer):
    for name in REPLAYED:
        with torch.no_grad() if observer is not by_selective_checkpoint else torch.enable_grad():
            seen = observer(call_of(name))
        assert any(op.startswith("fastvit::") for op in seen), (name, seen)


def test_subclasses_see_the_op(device):
    seen = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    x, weight, bias = (torch.randn(*size, device=device) for size in ((5, 16), (8, 16), (8,)))
    out = ops.linear(x, weight, bias.as_subclass(Logged))
    assert isinstance(out, Logged)
    assert "fastvit.linear_fwd.default" in seen


def test_no_autocast_inside():
    """An op chooses its dtypes before it is called: float64 stays so, and LayerNorm after a bfloat16 layer as well."""
    x, weight = torch.randn(5, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)


def test_a_lazy_negation_is_carried_out(backend: str, device: torch.device) -> None:
    """A plain tensor to Python, whose memory holds other values: only the dispatcher knows."""
    x, w, b = torch.randn(4, 16, device=device), torch.randn(16, device=device), torch.randn(16, device=device)
    torch.testing.assert_close(ops.layer_norm(torch._neg_view(x), w, b), ops.layer_norm(-x, w, b))
    fc, last = torch.randn(16, 16, device=device), torch.randn(16, device=device)  # an MLP asks once, for all its ops
    torch.testing.assert_close(ops.mlp(x, fc, b, fc, torch._neg_view(last)), ops.mlp(x, fc, b, fc, -last))
    w.requires_grad_()
    out = ops.layer_norm(x, w, b)
    (want,) = torch.autograd.grad(out, w, -x, retain_graph=True)
    (got,) = torch.autograd.grad(out, w, torch._neg_view(x))
    torch.testing.assert_close(got, want)


LAYOUTS = {
    "csr": torch.Tensor.to_sparse_csr, "csc": torch.Tensor.to_sparse_csc, "coo": torch.Tensor.to_sparse,
    "bsr": lambda t: t.to_sparse_bsr((4, 4)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("observer", [lambda call: call(), by_mode, by_profiler], ids=["plain", "mode", "profiler"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_without_strides(layout, observer, device):
    """PyTorch multiplies them, in every call: none is replayed."""
    x = torch.randn(2, 5, 16, device=device, requires_grad=layout != "bsr")
    fc1, fc2 = (0.2 * torch.randn(16, 16, device=device) for _ in range(2))
    weights = [LAYOUTS[layout](fc) for fc in (fc1, fc2)]
    for _ in range(4):
        outs = []
        observer(lambda outs=outs: outs.append(ops.mlp(x, weights[0], None, weights[1], None)))
        want = ops.mlp(x, fc1, None, fc2, None)
        torch.testing.assert_close(outs[0], want)
        if x.requires_grad:
            got, want = (torch.autograd.grad(out.square().sum(), x)[0] for out in (outs[0], want))
            torch.testing.assert_close(got, want)


def test_kernels_say_that_they_take_no_weights_without_strides(triton_backend, device):
    x, w = torch.randn(4, 16, device=device), torch.randn(16, 16, device=device)
    with pytest.raises(backends.KernelUnsupported, match="linear: a tensor has no strides"):
        ops.linear(x, w.to_sparse())
    with (
        ops.use_backend("triton", strict=False),
        pytest.warns(UserWarning, match="ATen instead of Triton: a tensor has"),
    ):
        torch.testing.assert_close(ops.linear(x, w.to_sparse()), x @ w.t())


def test_an_interpreter_that_multiplies_bfloat16_wrongly_is_warned_of_once(triton_backend, device):
    if device.type == "cuda":
        pytest.skip("kernels run on the GPU")
    from triton.runtime.interpreter import InterpreterBuilder

    from fastvit.ops.runtime.launch import warn_of_bfloat16

    def run(dtype):
        warn_of_bfloat16.cache_clear()
        for _ in range(2):
            x = torch.ones(3, 16, dtype=dtype)
            ops.layer_norm(x, x[0], x[0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(torch.bfloat16)  # as the tests have it
        with mock.patch.object(InterpreterBuilder, "create_dot", lambda self, a, b, total, *rest: total):
            run(torch.float32)
            assert not caught
            run(torch.bfloat16)
    assert ["multiplies bfloat16 wrongly" in str(warning.message) for warning in caught] == [True]
