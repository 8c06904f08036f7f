"""Gradients of every op: each alone and with frozen tensors, against finite differences, under transforms, bit by bit
the same when they are computed again."""

import itertools

import pytest
import torch
from op_cases import ROWS, function, made, not_interpreted, outputs_and_gradients, outputs_of, results, wanted
from torch.utils.checkpoint import checkpoint

from fastvit import ops

every_op = pytest.mark.parametrize("name", ROWS)


def assert_freezing_changes_no_other_gradient(op, tensors, choices):
    """choices: groups of names of tensors, each frozen together."""
    _, everything = outputs_and_gradients(op, tensors)
    for frozen in choices:
        partly = {n: t.detach().requires_grad_(t.requires_grad and n not in frozen) for n, t in tensors.items()}
        _, gradients = outputs_and_gradients(op, partly)
        assert gradients.keys() == everything.keys() - set(frozen)
        for name, got in gradients.items():
            want = everything[name]
            atol = 1e-6 * max(1.0, float(want.abs().max()))  # sums round by their largest terms
            torch.testing.assert_close(got, want, atol=atol, rtol=1e-5, msg=f"{name} with {frozen} frozen")


@every_op
def test_frozen_tensors(name, device):
    """One, two neighbours, either half, all but one. What is computed and saved then is decided in Python, for both
    backends alike."""
    tensors = made(name, 2, 6, device)
    leaves = list(wanted(tensors))
    choices = [[leaf] for leaf in leaves] + [list(pair) for pair in itertools.pairwise(leaves)]
    choices += [leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]]
    choices += [[other for other in leaves if other != leaf] for leaf in leaves]
    assert_freezing_changes_no_other_gradient(
        function(name), tensors, [frozen for frozen in choices if len(frozen) < len(leaves)]
    )


@pytest.mark.parametrize("name", ["add_layer_norm", "attention mask", "layer_norm_mlp gated", "patch_embed"])
def test_one_gradient_alone(name, triton_backend, device):
    """The first tensor's and the last one's: kernels are launched without some of their outputs."""
    tensors = made(name, 1, 6, device)
    leaves = wanted(tensors).keys()
    choices = [leaves - {leaf} for leaf in leaves]
    assert_freezing_changes_no_other_gradient(function(name), tensors, [choices[0], choices[-1]])


@every_op
def test_gradcheck(name, device):
    tensors = made(name, 2, 20, device, torch.float64)
    leaves = wanted(tensors)

    def run(*values):
        torch.manual_seed(4)
        return function(name)(**tensors | dict(zip(leaves, values, strict=True)))

    with ops.use_backend("aten"):
        assert torch.autograd.gradcheck(run, tuple(leaves.values()), fast_mode=True)


@not_interpreted
@every_op
def test_func_and_checkpoint(name, backend, device):
    """torch.func.grad gives autograd's gradients. A checkpointed call, a second backward pass through a retained graph,
    and the same call again give the same bits."""
    tensors = made(name, 2, 18, device)
    leaves = wanted(tensors)

    def loss(*values):
        outputs = function(name)(**tensors | dict(zip(leaves, values, strict=True)))
        return sum(o.square().sum() for o in outputs_of(outputs))

    def twice(*values):
        total = loss(*values)
        first, second = (torch.autograd.grad(total, values, retain_graph=again) for again in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        return first

    runs = []
    for gradients in (
        twice,
        lambda *values: torch.autograd.grad(loss(*values), values),
        lambda *values: torch.autograd.grad(checkpoint(loss, *values, use_reentrant=False), values),
        torch.func.grad(loss, argnums=tuple(range(len(leaves)))),
    ):
        torch.manual_seed(4)
        runs.append(gradients(*leaves.values()))
    want, again, recomputed, functional = runs
    for others in (again, recomputed):
        assert all(torch.equal(a, b) for a, b in zip(others, want, strict=True))
    torch.testing.assert_close(functional, want)


@not_interpreted
@every_op
def test_deterministic(name, backend, device):
    """Over several tiles, partial sums and splits. The interpreter runs programs in order."""
    tensors = made(name, 2, 146, device, torch.bfloat16)
    first, again = (results(function(name), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@every_op
def test_batched_gradients(name, device):
    """Each is taken by itself, on whatever backend."""
    tensors = made(name, 2, 4, device)
    outputs, leaves = outputs_of(function(name)(**tensors)), list(wanted(tensors).values())
    douts = [torch.randn(2, *o.shape, device=device) for o in outputs]
    each = [torch.autograd.grad(outputs, leaves, dout, retain_graph=True) for dout in zip(*douts, strict=True)]
    for more in ({"create_graph": True}, {}):
        got = torch.autograd.grad(outputs, leaves, douts, is_grads_batched=True, **more)
        assert all(torch.equal(a, torch.stack(b)) for a, b in zip(got, zip(*each, strict=True), strict=True))


@pytest.mark.parametrize(
    "name",
    ["layer_norm", "linear residual", "layer_norm_mlp gated", "attention_qkvpacked", "layer_norm_attention"],
)
def test_vmap(name, device):
    """Every sample by itself; without other tensors that have a row or a number for each sample."""
    tensors = made(name, 2, 18, device)
    for per_sample in ("row_scale", "residual"):
        tensors.pop(per_sample, None)
    (key, x), *rest = tensors.items()

    def loss(x):
        return function(name)(**{key: x}, **dict(rest)).square().sum()

    (want,) = torch.autograd.grad(loss(x), x)
    each = torch.func.vmap(torch.func.grad(loss))(x[:, None])
    torch.testing.assert_close(each[:, 0], want)


@every_op
def test_other_kinds_of_differentiation_raise(name, device):
    tensors = made(name, 2, 18, device)
    op, (key, x) = name.split()[0], next(iter(wanted(tensors).items()))
    total = sum(o.square().sum() for o in outputs_of(function(name)(**tensors)))
    (dx,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(NotImplementedError, match=rf"ops\.{op} does not support double backward"):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match=rf"ops\.{op} does not support forward-mode"):
        torch.func.jvp(lambda x: function(name)(**tensors | {key: x}), (x.detach(),), (x.detach(),))
