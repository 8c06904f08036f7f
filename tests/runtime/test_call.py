"""fastvit.ops.runtime.call: which calls are alike, and what is kept of them. Launches are recorded and do not run.

Models, refused kernels and modes: test_remembered_calls.py. Tensors at other alignments, and random calls:
test_launches.py.
"""

import weakref

import pytest
import torch
from op_cases import function, made, results
from remembered import NODES, B, D, N, attended, call, counted, uncached, x_of

pytest.importorskip("triton", reason="triton is not installed")

from fastvit import ops
from fastvit.kernels import _tuned
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import launch as runtime_launch


def other(tensors):
    """Return tensors with the same signature and other values, where these are no lengths."""
    numbers = {name: t for name, t in tensors.items() if t.is_floating_point()}
    with torch.no_grad():
        return tensors | {name: (t * 0.75 + 0.125).requires_grad_(t.requires_grad) for name, t in numbers.items()}


def strided(tensors):
    """Return copies with rows further apart, or with a stride of 2."""
    copies = {}
    for name, t in tensors.items():
        room = t.detach().new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
        view = room[..., : t.shape[-1]] if t.dim() > 1 else room[::2]
        copies[name] = view.copy_(t.detach()).requires_grad_(t.requires_grad)
    return copies


@pytest.mark.parametrize("kind", ["plain", "empty", "strided"])
@pytest.mark.parametrize("name", NODES)
def test_a_call_with_the_signature_of_an_earlier_one(name, kind, recorder, device):
    """A strided tensor is copied in every call, or read in place with the strides of the first call."""
    op, tensors = function(name), made(name, 0 if kind == "empty" else B, N, device)
    changed = other(tensors)
    if kind == "strided":
        tensors, changed = strided(tensors), strided(changed)
    with uncached():
        want = recorder.launched(lambda: results(op, changed), changed.values())
    with counted() as count:
        results(op, tensors)
        assert not count
        assert recorder.launched(lambda: results(op, changed), changed.values()) == want
    assert kind == "strided" or len(count) == 2  # forward and backward


CHANGES = {  # options before and after
    "eps": ({}, {"eps": 0.5}),
    "activation": ({}, {"activation": "relu"}),
    "residual": ({}, {"residual": None}),
    "another residual": ({}, {"residual": torch.ones(B, N, D)}),
    "layer scale": ({}, {"layer_scale": torch.full((D,), 0.5)}),
    "row scale": ({}, {"row_scale": torch.tensor([0.0, 2.0])}),
    "norm": ({}, {"norm": "rms", "norm_bias": None}),
    "eps of an inner norm": tuple({"inner_norm": ops.Norm(torch.ones(24), None, eps, "rms")} for eps in (1e-6, 0.5)),
    "kind of an inner norm": tuple({"inner_norm": ops.Norm(torch.ones(24), kind=kind)} for kind in ("layer", "rms")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_option_changes(change, weights, recorder, device):
    names = ("norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    before, after = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), CHANGES[change])
    x = x_of(device, B, N, D)
    given = [t for t in (x, *weights, *after.values()) if isinstance(t, torch.Tensor)]

    def launched(options):
        arguments = {"residual": x, **dict(zip(names, weights, strict=True)), **options}
        return recorder.launched(lambda: ops.layer_norm_mlp(x, **arguments), given)

    check_orders(launched, before, after)


def check_orders(launched, one, two):
    """Check that each of two calls launches what it does when nothing is remembered, whichever comes first."""
    with uncached():
        want = [launched(given) for given in (one, two)]
    assert want[0] != want[1]
    for order in ((0, 1, 0, 1), (1, 0, 1, 0)):
        _tuned.clear_caches()
        with counted() as count:
            for i in order:
                assert launched((one, two)[i]) == want[i]
        assert len(count) == 2


def test_a_tensor_that_is_there_twice(weights, recorder, device):
    """Then a call with another tensor in one of the places, and the other way round."""
    x, vector = x_of(device, B, N, D), torch.linspace(0.5, 2.0, D, device=device)
    same, apart = [vector, vector, *weights[2:]], [vector, vector.flip(0), *weights[2:]]
    check_orders(lambda given: recorder.launched(lambda: call(x, given), [x, *apart]), same, apart)


def test_precision(weights, recorder, device):
    """By its older setting, and by its newer one, after which PyTorch no longer reports the older."""
    x, half = x_of(device, B, N, D), [w.to(torch.bfloat16) for w in weights]

    def precisions(*arguments):
        launches = recorder.launched(lambda: call(*arguments))
        return {constants["PRECISION"] for *_, constants, _ in launches if "PRECISION" in constants}

    for older, expected in (("highest", "ieee"), ("high", "tf32"), ("highest", "ieee")):
        torch.set_float32_matmul_precision(older)
        assert precisions(x, weights) == {expected}
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for newer in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = newer
            assert precisions(x, weights) == {newer}
            assert precisions(x.bfloat16(), half) == {"ieee"}
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_what_is_equal_and_may_change(weights, heads, recorder, device):
    """Weights in a module, a number in a tensor: known by their identity, they would hide a change, and be kept."""
    x, layers = x_of(device, B, N, D), torch.nn.ParameterList(heads[:1])
    layers[0].requires_grad_(False)
    for wanted in (False, True):
        layers[0].requires_grad_(wanted)
        out = ops.layer_norm_attention(x, *weights[:2], layers, [heads[1]], *heads[2:], 1)
        assert out.requires_grad == wanted
    scale, launches = torch.tensor(0.1), []
    for value in (0.1, 0.5):
        scale.fill_(value)
        launches.append(recorder.launched(lambda: attended(x, weights, heads, scale=scale)))
    assert launches[0] != launches[1]
    assert all(name.startswith("dispatched ") for name, _ in runtime_call._kept)  # by the ops within


def test_a_state_that_is_forgotten_during_a_call(triton_backend, device):
    """The values of the first call are of no use to others then."""
    first = runtime_call.begin("mlp", (x_of(device, B, N, D),), ())
    assert isinstance(first, runtime_call.FirstCall)
    _tuned.clear_caches()
    first.remember()
    assert not runtime_call._kept


def test_names(triton_backend, device):
    """A name that is given twice is an error in the first call, one that is missing in later ones; a part of a call has
    names of its own."""
    x = x_of(device, B, N, D)
    first = runtime_call.begin("mlp", (x,), ())
    assert first.once("a", lambda: 1) == 1
    assert first.child("part").once("a", lambda: 2) == 2
    with pytest.raises(RuntimeError, match="a call works out 'a' twice"):
        first.once("a", lambda: 3)
    first.remember()
    later = runtime_call.begin("mlp", (x,), ())
    assert (later.once("a", None), later.child("part").once("a", None)) == (1, 2)
    for missing in (lambda: later.once("b", lambda: 4), lambda: later.child("b")):
        with pytest.raises(KeyError, match="b"):
            missing()


def test_what_the_signature_is_made_of(weights, recorder, device):
    """Tokens, samples, dtypes, autocast, who wants a gradient, the mode."""
    x, half = x_of(device, B, N, D), [w.to(torch.bfloat16) for w in weights]
    with counted() as count:
        for shape in ((B, N, D), (1, N, D), (B, N + 1, D), (B * N, D), (D,), (B, 1, N, D)):
            call(x_of(device, *shape), weights)
        assert call(x.bfloat16(), half).dtype is torch.bfloat16
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast(device.type, dtype):
                call(x, weights)
        assert not count
        out = call(x.requires_grad_(), weights)
        torch.autograd.grad(out, x, torch.ones_like(out))
        with torch.no_grad():
            assert call(x, weights).grad_fn is None
        assert not count
        again = call(x, weights)
        torch.autograd.grad(again, x, torch.ones_like(out))
        assert len(count) == 2


def test_tensors_without_memory(weights, triton_backend, device):
    """Also in the wrapper of a functorch transform that has ended, which hides it."""
    zeros, wrapped = torch._efficientzerotensor(B, N, D, device=device), []
    torch.func.grad(lambda t: (wrapped.append(t), (1.0 * t).sum())[1])(zeros)
    want = call(torch.zeros_like(zeros), weights)
    for t in (zeros, *wrapped):
        assert torch.equal(call(t, weights), want)


def test_checks_are_made_after_calls_that_passed_them(weights, heads, recorder, device):
    x = x_of(device, B, N, D)
    call(x, weights)
    attended(x, weights, heads)
    for error, message, wrong in (
        (ValueError, "fc2_weight must have shape", lambda: call(x, [*weights[:4], weights[4][:, 1:], weights[5]])),
        (TypeError, "the same dtype", lambda: call(x, [*weights[:2], weights[2].double(), *weights[3:]])),
        (TypeError, "x must be a tensor", lambda: call(x.tolist(), weights)),
        (TypeError, None, lambda: call(x, weights, eps=[1e-6])),
        (ValueError, r"num_heads = 1\.0", lambda: ops.layer_norm_attention(x, *weights[:2], *heads, 1.0)),
    ):
        with pytest.raises(error, match=message):
            wrong()


def test_what_is_kept(weights, recorder, device, monkeypatch):
    """So many calls, until configurations change or launches mean something else; and no tensor, nor one in what
    compares others with it."""
    monkeypatch.setattr(runtime_call, "_MOST", 4)
    for rows in range(1, 12):
        call(x_of(device, rows, D), weights)
        assert 1 <= len(runtime_call._kept) <= 4
    kept = [later for alike in runtime_call._kept.values() for *_, later in alike]
    assert kept
    assert not any(isinstance(t, torch.Tensor) for later in kept for t in _flat(later))
    monkeypatch.setattr(runtime_call, "_MOST_ALIKE", 3)
    x = x_of(device, 5, D)
    for hidden in range(1, 12):  # what tells their keys apart is not the first tensor
        fc1, fc2 = (weights[2][:hidden], weights[3][:hidden]), weights[4][:, :hidden].contiguous()
        call(x, [*weights[:2], *fc1, fc2, weights[5]])
    assert max(map(len, runtime_call._kept.values())) == 3
    gone = weakref.ref(x)
    del x
    assert gone() is None
    _tuned.clear_caches()
    assert not runtime_call._kept
    call(x_of(device, 3, D), weights)
    with runtime_launch.nothing_launched(4):
        assert not runtime_call._kept


def _flat(value):
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    elif isinstance(value, runtime_launch.Launch):
        yield from (value.numbers, *value.constants.values())
    else:
        yield value
