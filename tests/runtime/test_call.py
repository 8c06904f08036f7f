"""fastvit.ops.runtime.call: which calls are alike, and what is kept of them.

Whole models, refused kernels and modes: test_remembered_calls.py. That remembered calls launch what others launch, on
tensors of other alignments, is in stub_calls.py.
"""

import weakref
from typing import NamedTuple

import pytest
import torch
from op_cases import function, made, results
from remembered import NODES, B, D, N, attended, call, counted, uncached, x_of

pytest.importorskip("triton", reason="triton is not installed")

from fastvit import ops
from fastvit.kernels import _tuned
from fastvit.ops.runtime import autograd
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import launch as runtime_launch


def other(tensors):
    """Return tensors with the same signature and other values, where these are no lengths."""
    numbers = {name: t for name, t in tensors.items() if t.is_floating_point()}
    with torch.no_grad():
        return tensors | {name: (t * 0.75 + 0.125).requires_grad_(t.requires_grad) for name, t in numbers.items()}


def strided(tensors):
    """Return copies with rows further apart, or with a stride of 2."""
    found = {}
    for name, t in tensors.items():
        room = t.detach().new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
        view = room[..., : t.shape[-1]] if t.dim() > 1 else room[::2]
        found[name] = view.copy_(t.detach()).requires_grad_(t.requires_grad)
    return found


@pytest.mark.parametrize("kind", ["plain", "empty", "strided"])
@pytest.mark.parametrize("name", NODES)
def test_a_call_with_the_signature_of_an_earlier_one(name, kind, triton_backend, device):
    """A strided tensor is copied in every call, or read in place with the strides of the first call."""
    op, tensors = function(name), made(name, 0 if kind == "empty" else B, N, device)
    changed = other(tensors)
    if kind == "strided":
        tensors, changed = strided(tensors), strided(changed)
    with uncached():
        want = results(op, changed)
    with counted() as count:
        first = results(op, tensors)
        assert not count
        got = results(op, changed)
    assert kind == "strided" or len(count) == 2  # forward and backward
    assert all(map(torch.equal, got, want))
    assert kind == "empty" or not torch.equal(got[0], first[0])


CHANGES = {
    "eps": {"eps": 0.5},
    "activation": {"activation": "relu"},
    "norm": {"norm": "rms"},
    "residual": {"residual": None},
    "another residual": {"residual": torch.ones(B, N, D)},
    "layer scale": {"layer_scale": torch.full((D,), 0.5)},
    "row scale": {"row_scale": torch.tensor([0.0, 2.0])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_option_changes(change, weights, triton_backend, device):
    """A call with it after one without, and the other way round."""
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in CHANGES[change].items()}
    weights = [weights[0], None if change == "norm" else weights[1], *weights[2:]]
    x = x_of(device, B, N, D)
    with uncached():
        want = [call(x, weights, **one) for one in ({}, options)]
    for order in ((0, 1, 0), (1, 0, 1)):
        _tuned.clear_caches()
        for i in order:
            assert torch.equal(call(x, weights, **(options if i else {})), want[i])
    assert not torch.equal(*want)


def test_what_a_norm_among_the_arguments_changes(weights, heads, triton_backend, device):
    x = x_of(device, B, N, D)
    norms = [ops.Norm(*weights[:2]), ops.Norm(*weights[:2], eps=0.5), ops.Norm(weights[0], kind="rms")]
    with uncached():
        want = [attended(x, weights, heads, scale_norm=norm) for norm in norms]
    with counted() as count:
        for _ in range(2):
            for norm, out in zip(norms, want, strict=True):
                assert torch.equal(attended(x, weights, heads, scale_norm=norm), out)
    assert len(count) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted in the interpreter")
def test_precision(weights, triton_backend, device):
    x, found = x_of(device, B, N, D), []
    with runtime_launch.launching(lambda *step: found.append(step[-1].get("PRECISION"))):
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            call(x, weights)
    assert [of for of in found if of] == ["ieee"] * 2 + ["tf32"] * 2 + ["ieee"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are counted in the interpreter")
def test_precision_by_its_newer_setting(weights, triton_backend, device):
    """PyTorch no longer reports the older setting once the newer one is used."""
    x, found = x_of(device, B, N, D), []
    half = [w.to(torch.bfloat16) for w in weights]
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        with runtime_launch.launching(lambda *step: found.append(step[-1].get("PRECISION"))):
            for precision in ("tf32", "ieee"):
                torch.backends.cuda.matmul.fp32_precision = precision
                call(x, weights)
                call(x.bfloat16(), half)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert [of for of in found if of] == ["tf32"] * 2 + ["ieee"] * 6


def test_what_is_equal_and_may_change(weights, heads, triton_backend, device):
    """Weights in a module, a number in a tensor: known by their identity, they would hide a change, and be kept."""
    x, layers = x_of(device, B, N, D), torch.nn.ParameterList(heads[:1])
    layers[0].requires_grad_(False)
    for wanted in (False, True):
        layers[0].requires_grad_(wanted)
        out = ops.layer_norm_attention(x, *weights[:2], layers, [heads[1]], *heads[2:], 1)
        assert out.requires_grad == wanted
    scale, outs = torch.tensor(0.1), []
    for value in (0.1, 0.5):
        outs.append(attended(x, weights, heads, scale=scale.fill_(value)))
    assert not torch.equal(*outs)
    assert not runtime_call._kept


def test_a_state_that_is_forgotten_during_a_call(weights, triton_backend, device):
    """The values of the first call are of no use to others then."""
    x = x_of(device, B, N, D)
    first = runtime_call.begin("mlp", (x,), ())
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


def test_a_gradient_of_no_input():
    class Node(autograd.FusedNode):
        Inputs = autograd.inputs("x")

        @staticmethod
        def compute(t):
            return (t.x + 1,), {}

        @staticmethod
        def gradients(s, douts, o, wants, call):
            return {"y": douts[0]}

    class Options(NamedTuple):
        op: str

    x = torch.ones(3, requires_grad=True)
    y = autograd.run(Node, True, Node.Inputs(x, Options("of_a_test"), runtime_call.begin("of_a_test", (x,))))
    with pytest.raises(KeyError, match=r"Node returns gradients \['y'\] of inputs"):
        y.sum().backward()


def test_a_mask_that_is_copied(weights, heads, triton_backend, device):
    """In every call: of 17 keys, whose rows the kernels could not read in place."""
    x, mask = x_of(device, B, 17, D), torch.zeros(B, 1, 1, 17, device=device)
    mask[..., 3:] = -torch.inf
    other = mask.flip(-1)
    with uncached():
        want = [attended(x, weights, heads, attn_mask=m) for m in (mask, other)]
    for m, out in zip((mask, other), want, strict=True):
        assert torch.equal(attended(x, weights, heads, attn_mask=m), out)
    assert not torch.equal(*want)


def test_what_the_signature_is_made_of(weights, triton_backend, device):
    """Tokens, samples, dtypes, who wants a gradient, the mode."""
    with counted() as count:
        for shape in ((B, N, D), (1, N, D), (B, N + 1, D), (B * N, D), (D,), (B, 1, N, D)):
            x = x_of(device, *shape)
            with uncached():
                want = call(x, weights)
            assert torch.equal(call(x, weights), want)
        half = [w.to(torch.bfloat16) for w in weights]
        x = x_of(device, B, N, D, dtype=torch.bfloat16)
        assert call(x, half).dtype is torch.bfloat16
        assert not count
        x = x_of(device, B, N, D).requires_grad_()
        out = call(x, weights)
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
        with torch.no_grad():
            assert call(x, weights).grad_fn is None
        assert not count
        again = call(x, weights)
        assert torch.equal(torch.autograd.grad(again, x, torch.ones_like(out))[0], gradient)
        assert len(count) == 2


def test_tensors_that_kernels_could_not_read(weights, triton_backend, device):
    """Strided, negated, of a subclass: each is seen after a call that differs in this only."""
    x = x_of(device, B, N, D)
    want = call(x, weights)
    with counted() as count:
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(call(strided, weights), want)
        negated = torch._neg_view(-x)
        assert negated.is_contiguous()
        assert torch.equal(call(negated, weights), want)
        wide = torch.empty(24, 2 * D, device=device)[:, :D].copy_(weights[2])
        assert torch.equal(call(x, [*weights[:2], wide, *weights[3:]]), want)
        assert not count
        seen = []

        class Seen(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                seen.append(func)
                return super().__torch_function__(func, types, args, kwargs or {})

        of_subclass = x.as_subclass(Seen), [*weights[:2], weights[2].as_subclass(Seen), *weights[3:]]
        for arguments in 2 * [(of_subclass[0], weights), (x, of_subclass[1])]:
            seen.clear()
            call(*arguments)
            assert seen
        assert not count


def test_tensors_without_memory(weights, triton_backend, device):
    """Also in the wrapper of a functorch transform that has ended, which hides it."""
    zeros, wrapped = torch._efficientzerotensor(B, N, D, device=device), []
    torch.func.grad(lambda t: (wrapped.append(t), (1.0 * t).sum())[1])(zeros)
    want = call(torch.zeros_like(zeros), weights)
    for t in (zeros, *wrapped):
        assert torch.equal(call(t, weights), want)


def test_checks_are_made_after_calls_that_passed_them(weights, heads, triton_backend, device):
    x = x_of(device, B, N, D)
    scale = torch.ones(B, device=device)
    call(x, weights, row_scale=scale)
    with pytest.raises(ValueError, match="row_scale must not require a gradient"):
        call(x, weights, row_scale=scale.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"fc2_weight must have shape \(out, hidden\)"):
        call(x, [*weights[:4], weights[4][:, 1:], weights[5]])
    with pytest.raises(TypeError, match="x and fc1_weight must have the same dtype"):
        call(x, [*weights[:2], weights[2].double(), *weights[3:]])
    with pytest.raises(TypeError, match="x must be a tensor"):
        call(x.tolist(), weights)
    with pytest.raises(ValueError, match="activation"):
        call(x, weights, activation="gelu_")
    with pytest.raises(TypeError):
        call(x, weights, eps=[1e-6])
    attended(x, weights, heads)
    with pytest.raises(ValueError, match=r"num_heads = 1\.0"):
        ops.layer_norm_attention(x, *weights[:2], *heads, 1.0)


def test_a_tensor_that_is_there_twice(weights, triton_backend, device):
    """Then a call with another tensor in one of the places, and the other way round."""
    x, vector = x_of(device, B, N, D), torch.linspace(0.5, 2.0, D, device=device)
    same = [vector, vector, *weights[2:]]
    apart = [vector, vector.flip(0), *weights[2:]]
    with uncached():
        want = [call(x, w) for w in (same, apart)]
    for order in ((0, 1, 0, 1), (1, 0, 1, 0)):
        _tuned.clear_caches()
        with counted() as count:
            for i in order:
                assert torch.equal(call(x, (same, apart)[i]), want[i])
        assert len(count) == 2
    assert not torch.equal(*want)


def test_what_is_kept(weights, triton_backend, device, monkeypatch):
    """So many calls, until configurations change or launches mean something else; and no tensor, nor one in what
    compares others with it."""
    monkeypatch.setattr(runtime_call, "_MOST", 4)
    for rows in range(1, 12):
        call(x_of(device, rows, D), weights)
        assert 1 <= len(runtime_call._kept) <= 4
    kept = [found for alike in runtime_call._kept.values() for _, found in alike]
    assert kept
    assert not any(isinstance(t, torch.Tensor) for found in kept for t in _flat(found))
    monkeypatch.setattr(runtime_call, "_MOST_ALIKE", 3)
    x = x_of(device, 5, D)
    for hidden in range(1, 12):  # what tells their keys apart is not the first tensor
        call(
            x, [*weights[:2], weights[2][:hidden], weights[3][:hidden], weights[4][:, :hidden].contiguous(), weights[5]]
        )
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
