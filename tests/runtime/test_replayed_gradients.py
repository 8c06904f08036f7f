"""Gradients of replayed calls, and what a backward pass reads. On ATen."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from op_cases import ROWS, function, made, results
from replaying import CALLS

from fastvit import ops
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import record

pytestmark = pytest.mark.skipif(record.available() is None, reason="there is no C compiler, or no triton")
B, N = 2, 8


def replaying(name, device, refusals):
    """Return an op, after calls of which the next is replayed, forward and backward, and its tensors by name."""
    op, tensors = function(name), made(name, B, N, device)
    for _ in range(CALLS):
        results(op, tensors)
    assert refusals
    assert not any(refusals)
    refusals.clear()
    return op, tensors


def wanted(tensors):
    return [t for t in tensors.values() if t is not None and t.requires_grad]


def checkpointed(op, tensors, use_reentrant=False):
    names, values = zip(*tensors.items(), strict=True)

    def again(*values):
        return op(**dict(zip(names, values, strict=True)))

    return torch.utils.checkpoint.checkpoint(again, *values, use_reentrant=use_reentrant).sum()


def by_checkpoint(op, tensors):
    return torch.autograd.grad(checkpointed(op, tensors), wanted(tensors))


def by_reentrant_checkpoint(op, tensors):
    checkpointed(op, tensors, use_reentrant=True).backward()
    gradients = [t.grad for t in wanted(tensors)]
    for t in wanted(tensors):
        t.grad = None
    return gradients


def twice(op, tensors):
    out = op(**tensors).sum()
    first = torch.autograd.grad(out, wanted(tensors), retain_graph=True)
    again = torch.autograd.grad(out, wanted(tensors))
    assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, wanted(tensors))
    return first


def in_a_thread(op, tensors):
    with ThreadPoolExecutor(4) as pool:
        each = [pool.submit(lambda: torch.autograd.grad(op(**tensors).sum(), wanted(tensors))) for _ in range(8)]
        first, *others = [one.result() for one in each]
    assert all(all(map(torch.equal, first, other)) for other in others)
    return first


def saved_elsewhere(op, tensors):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = op(**tensors).sum()
    return torch.autograd.grad(out, wanted(tensors))


def saved_without_storage(op, tensors):
    """Also while the call is recorded."""
    with runtime_call.forgotten():
        for _ in range(CALLS):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to_sparse(), lambda t: t.to_dense()):
                out = op(**tensors).sum()
            gradients = torch.autograd.grad(out, wanted(tensors))
    return gradients


WAYS = {
    "twice": twice,
    "checkpoint": by_checkpoint,
    "reentrant checkpoint": by_reentrant_checkpoint,
    "threads": in_a_thread,
    "saved elsewhere": saved_elsewhere,
    "saved without storage": saved_without_storage,
}
HALVES = ["layer_norm_attention", "layer_norm_mlp gelu"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HALVES)
def test_gradients_of_replayed_calls(name, way, device, refusals):
    op, tensors = replaying(name, device, refusals)
    got = WAYS[way](op, tensors)
    with runtime_call.forgotten():
        want = torch.autograd.grad(op(**tensors).sum(), wanted(tensors))
    assert all(map(torch.equal, got, want))


def test_a_tensor_that_is_given_twice(device, refusals):
    """Its gradient is the sum, in the call after others in which the two were different tensors, and in later ones."""
    x, fc1, fc2 = (torch.randn(*shape, device=device) for shape in ((B, N, 16), (24, 16), (16, 24)))
    once, again = (torch.randn(16, device=device, requires_grad=True) for _ in range(2))

    def gradient(weight, bias):
        out = ops.layer_norm_mlp(x, weight, bias, fc1, None, fc2, None, residual=x)
        return torch.autograd.grad(out.square().sum(), {weight, bias})

    with runtime_call.forgotten():
        (want,) = gradient(once, once)
    for _ in range(CALLS):
        gradient(once, again)
    for _ in range(CALLS):
        assert torch.equal(gradient(once, once)[0], want)


def test_gradients_of_tensors_that_share_memory_only_in_the_recorded_call(device, refusals):
    """Which of the two a gradient belongs to follows from the tensors themselves, not from where they are."""
    x, qkv, proj = (torch.randn(*shape, device=device) for shape in ((B, N, 16), (48, 16), (16, 16)))
    ones = torch.ones(16, device=device)

    def gradients(scale, q):
        norm, scale_norm = (ops.Norm(w, None, 1e-6, "rms") for w in (q, scale))
        out = ops.layer_norm_attention(
            x,
            ones,
            ones,
            qkv,
            None,
            proj,
            None,
            1,
            scale_norm=scale_norm,
            qk_norm=(norm, ops.Norm(ones, None, 1e-6, "rms")),
        )
        return torch.autograd.grad(out.square().sum(), [t for t in (scale, q) if t.requires_grad])

    def separate():
        return [ones.clone().requires_grad_() for _ in range(2)]

    with runtime_call.forgotten():
        want = gradients(*separate())
    for shared in (True, True, False, False):
        scale, q = separate()
        got = gradients(scale, scale.detach().requires_grad_() if shared else q)
        torch.testing.assert_close(got, want)


def test_what_is_saved_under_another_name(device, refusals):
    """A frozen bias, and a frozen LayerScale of its shape in its place: one calls for another backward pass."""
    x, fc1, fc2 = (torch.randn(*shape, device=device) for shape in ((B, N, 16), (24, 16), (16, 24)))
    vector, x = torch.randn(16, device=device), x.requires_grad_()

    def gradient(**options):
        out = ops.mlp(x, fc1, None, fc2, options.pop("bias", None), **options)
        return torch.autograd.grad(out.square().sum(), x)[0]

    calls = [{"bias": vector}, {"layer_scale": vector}]
    with runtime_call.forgotten():
        want = [gradient(**call) for call in calls]
    for _ in range(CALLS):
        for call, expected in zip(calls, want, strict=True):
            assert torch.equal(gradient(**call), expected)


@pytest.mark.parametrize("name", HALVES)
def test_errors_of_replayed_calls(name, device, refusals):
    """Double backward, forward mode, and an edit of what is saved."""
    op, tensors = replaying(name, device, refusals)
    out = op(**tensors)
    (gradient,) = torch.autograd.grad(out.sum(), tensors["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{ROWS[name].op} does not support double backward"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match="does not support forward-mode AD"):
        torch.func.jvp(lambda x: op(**{**tensors, "x": x}), (tensors["x"].detach(),), (torch.ones_like(out),))
    out = op(**tensors).sum()
    with torch.no_grad():
        tensors["norm_weight"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
