"""Edits in place after a call: a result may be, and whatever the backward pass needs raises, never silently
wrong."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import ROWS, function, made, not_interpreted, outputs_of, wanted


def edited(y):
    """y, edited in place in every way that eager's result may be."""
    y += 1.0
    y[..., 0] = 0.0
    y.mul_(1.5)
    return F.relu(y, inplace=True)


def run_and_edit(name, tensors, i, copy=lambda y: y):
    """The gradients, where the op's output of that number is edited in place, or a copy of it."""
    torch.manual_seed(4)
    outputs = list(outputs_of(function(name)(**tensors)))
    outputs[i] = edited(copy(outputs[i]))
    return torch.autograd.grad(sum(o.float().square().sum() for o in outputs), list(wanted(tensors).values()))


@not_interpreted
@pytest.mark.parametrize("name", ROWS)
def test_outputs_may_be_edited_in_place(name, backend, device):
    """Unless the op saves them, which the backward pass then says. Under autocast they are rounded in other places."""
    tensors = made(name, 2, 18 if backend == "aten" else 4, device)  # of PyTorch's attention, both kinds
    with torch.no_grad():
        outputs = outputs_of(function(name)(**tensors))
    for i, output in enumerate(outputs):
        output.mul_(torch.ones((), device=device, requires_grad=True))  # also in another mode than it was made in
        saved = name.startswith("attention") or (name == "add_layer_norm" and i == 0)
        for autocast in (False, True):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                want = run_and_edit(name, tensors, i, torch.clone)
                if saved:
                    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is output 0"):
                        run_and_edit(name, tensors, i)
                else:
                    got = run_and_edit(name, tensors, i)
                    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["add_layer_norm", "attention"])
def test_outputs_edited_in_place_in_a_compiled_graph(name, device):
    """Those that are saved, too, since no version of a tensor is compared there. With static shapes."""
    torch._dynamo.reset()
    tensors = made(name, 2, 18, device)
    leaves = wanted(tensors)

    def loss(*values):
        first, *rest = outputs_of(function(name)(**tensors | dict(zip(leaves, values, strict=True))))
        return sum(o.square().sum() for o in (edited(first), *rest))

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*leaves.values()), list(leaves.values()))
    torch.testing.assert_close(got, run_and_edit(name, tensors, 0, torch.clone))


@pytest.mark.parametrize("name", ROWS)
def test_inputs_that_are_edited_before_the_backward_pass(name, device):
    """The gradients are those of the values in the forward pass, or an error says what was edited."""
    tensors = made(name, 2, 6, device)
    leaves = list(wanted(tensors).values())

    def backward(edit):
        torch.manual_seed(4)
        copies = {key: t.clone() for key, t in tensors.items()}
        total = sum(o.square().sum() for o in outputs_of(function(name)(**copies)))
        edit(copies)
        return torch.autograd.grad(total, leaves)

    want, raised = backward(lambda copies: None), 0
    for key in wanted(tensors):
        try:
            got = backward(lambda copies, key=key: copies[key].detach().add_(1.0))
        except RuntimeError as error:
            assert "modified" in str(error)  # noqa: PT017
            raised += 1
        else:
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), key
    assert raised or name == "dropout", "a backward pass that reads no input"
