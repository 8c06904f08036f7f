"""fastvit.ops.runtime.record and replay.c: a replayed call gives the numbers of a first one, bit by bit. On ATen; what
replayed calls launch: test_launches.py."""

import contextlib
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from op_cases import ROWS, function, made, results
from replaying import CALLS, NODES, by_dispatcher

from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import record

pytestmark = pytest.mark.skipif(record.available() is None, reason="there is no C compiler, or no triton")
B, N = 2, 8
# why a row is not recorded on ATen, forward and backward
OF_MASKS, OF_LENGTHS, OF_SEEDS = "__bool__ returns bool", "tolist returns list", "__int__ returns int"


def refused(name):
    """Return why calls of the row are not recorded, or None."""
    if "varlen" in name or "lengths" in name:
        return OF_LENGTHS
    if "dropout" in name:
        return OF_SEEDS
    masked = ROWS[name].arguments(made(name, B, N, torch.device("cpu"))).get("attn_mask") is not None
    return OF_MASKS if masked else None


def outcomes(op, tensors, seed):
    torch.manual_seed(seed)
    return [t for t in results(op, tensors) if t is not None]


@pytest.mark.parametrize("kind", ["empty", "strided"])
@pytest.mark.parametrize("name", NODES)
def test_replayed_calls_of_other_layouts(name, kind, device, refusals):
    def drawn(seed):
        torch.manual_seed(seed)
        tensors = made(name, 0 if kind == "empty" else B, N, device)
        return strided(tensors) if kind == "strided" else tensors

    later = [outcomes(function(name), drawn(seed), seed) for seed in range(CALLS)]
    if refused(name) is None:
        assert set(refusals) == {None}
    for seed, got in enumerate(later):
        with runtime_call.forgotten():
            assert all(map(torch.equal, got, outcomes(function(name), drawn(seed), seed)))


def strided(tensors):
    """Return copies with rows further apart, or with a stride of 2."""
    copies = {}
    for name, t in tensors.items():
        room = t.detach().new_zeros((*t.shape[:-1], 2 * t.shape[-1]))
        view = room[..., : t.shape[-1]] if t.dim() > 1 else room[::2]
        copies[name] = view.copy_(t.detach()).requires_grad_(t.requires_grad)
    return copies


@pytest.mark.parametrize("within", [contextlib.nullcontext, by_dispatcher], ids=["direct", "dispatcher"])
@pytest.mark.parametrize("name", ROWS)
def test_a_replayed_call_equals_a_first_one(name, within, device, refusals):
    op, draws = function(name), []
    for seed in range(CALLS):
        torch.manual_seed(seed)
        draws.append(made(name, B, N, device))
    with within():
        later = [outcomes(op, tensors, seed) for seed, tensors in enumerate(draws)]
        assert refusals
        reason = refused(name)
        if reason is None:
            assert set(refusals) == {None}
        else:  # other ops of a block are recorded
            assert {re.sub(r"\(.*\)", "{}", refusal) for refusal in refusals if refusal} <= {reason}
        for seed, tensors in enumerate(draws):
            with runtime_call.forgotten():
                for t, want in zip(later[seed], outcomes(op, tensors, seed), strict=True):
                    assert torch.equal(t, want)
                    assert t.stride() == want.stride()


def recorded(function, *inputs):
    recorder = record.Recorder(inputs)
    with recorder:
        outputs = function(*inputs)
    return outputs, recorder.plan(outputs)


def test_what_begins_elsewhere_in_memory():
    """Views of an input are taken from where it begins."""
    x = torch.randn(4, 6)
    _, plan = recorded(lambda x: (x[1:].t() + 1, x[:, 2:].t()[1:] * 2), x)
    for y in (torch.randn(5, 6)[1:], torch.randn(4, 6)):
        got = plan([y])
        assert all(map(torch.equal, got, (y[1:].t() + 1, y[:, 2:].t()[1:] * 2)))


def test_a_view_of_an_input_as_an_output():
    """An edit of the input is an edit of the view, of which autograd then knows."""
    x = torch.randn(1, 6)
    _, plan = recorded(lambda x: (x[None].expand(2, 3, 6),), x)
    x = torch.randn(1, 6)
    (view,) = plan([x])
    assert view._version == x._version
    x.add_(1.0)
    assert torch.equal(view, x[None].expand(2, 3, 6))
    assert view._version == x._version
    assert recorded(lambda x: (x[:, 2:],), x)[1] is None


def test_lists_keywords_and_writes():
    def function(x, y):
        both = torch.cat([x, y], dim=0)
        out = torch.empty_like(both)
        torch.mul(both, 2.0, out=out)
        out[0] = 7.0
        values, _ = out.max(dim=1)
        return out, values, None, x

    x, y = torch.randn(3, 4), torch.randn(2, 4)
    _, plan = recorded(function, x, y)
    for _ in range(2):
        x, y = torch.randn(3, 4), torch.randn(2, 4)
        got, want = plan([x, y]), function(x, y)
        assert all(map(torch.equal, got[:2], want[:2]))
        assert got[2] is None
        assert got[3] is x


@pytest.mark.parametrize("size", [None, 64, 1], ids=["no bias", "a bias", "an expanded bias"])
def test_linear_layers(size):
    """Recorded as products of matrices, where these round alike."""
    x, weight = torch.randn(2, 16, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    bias = None if size is None else torch.randn(size).bfloat16().expand(64)
    want, plan = recorded(lambda *layer: (torch.nn.functional.linear(*layer),), x, weight, bias)
    assert torch.equal(plan([x, weight, bias])[0], want[0])


def test_a_launch_that_reads_a_part_of_an_input():
    """Which may be aligned where the input is not, and the other way round."""
    launch = SimpleNamespace(directly=lambda *tensors: (lambda *_: None, (), lambda: 0, (), ()))
    for start, is_recorded in ((2, False), (4, True)):
        x = torch.randn(12)[start - 4 if start == 4 else start :]
        recorder = record.Recorder([x])
        with recorder:
            recorder.launch(launch, (x[start:],))
        assert (recorder.plan([x]) is not None) == is_recorded


elsewhere = torch.ones(3)
UNRECORDABLE = {
    "a value": lambda x: (x * x.sum().item(),),
    "a decision": lambda x: (x if x.sum() > 0 else -x,),
    "values": lambda x: (x * x.tolist()[0],),
    "an array": lambda x: (x + torch.from_numpy(x.numpy()),),
    "a shape": lambda x: (x.nonzero(),),
    "a shape by a mask": lambda x: (x[x > 0],),
    "a tensor from elsewhere": lambda x: (x + elsewhere,),
    "an output from elsewhere": lambda x: (elsewhere,),
}


@pytest.mark.parametrize("name", UNRECORDABLE)
def test_what_cannot_be_recorded(name):
    x = torch.tensor([1.0, 2.0, 3.0])
    outputs, plan = recorded(UNRECORDABLE[name], x)
    assert plan is None
    assert torch.equal(outputs[0], UNRECORDABLE[name](x)[0])


def test_memory_is_free_as_early_as_it_can_be():
    """While a call is recorded, and while it is replayed: also an input's that nobody else holds."""
    seen = []

    def function(x):
        doubled = x * 2
        seen.append(weakref.ref(doubled))
        out = doubled + 1
        del doubled
        assert seen[0]() is None
        return (out,)

    recorded(function, torch.ones(3))
    plan = record.available().Plan(
        bytes([1]), 2, (
            (2, (1,), (0,), (torch.neg, ((1, 0),), None, False)),
            (2, (), (), (lambda: seen.append(gone()), (), None, False)),
        ), (1,),
    )  # fmt: skip
    inputs = [torch.ones(3)]
    gone = weakref.ref(inputs[0])
    assert torch.equal(plan(inputs)[0], -torch.ones(3))
    assert inputs == []
    assert seen[-1] is None


def test_errors_are_pytorchs_own():
    x = torch.ones(2, 3)
    _, plan = recorded(lambda x: (x @ x.t(),), x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plan([torch.ones(2, 3).bfloat16()[:, :2]])
    assert torch.equal(plan([x])[0], x @ x.t())
    kept = record.available().placement(x), {"dtype": x.dtype, "device": x.device}
    too_much = record.available().Plan(b"", 1, ((0, (0,), (), ((1 << 60,), (1,), *kept)),), (0,))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        too_much([])


def test_what_a_plan_refuses():
    """An address that is not a multiple of 16, where a launch was recorded for others; anything that is no tensor."""
    plan = record.available().Plan(bytes([2, 0]), 2, (), (0,))
    x = torch.ones(8)
    for inputs in ([x[1:], None], [None, None], [torch.nn.Linear(2, 2), 3]):
        before = [*inputs]
        assert plan(inputs) is None
        assert inputs == before or inputs[0] is before[0]
    assert plan([x, "anything"])[0] is x
    for wrong in ([x], (x, None), None):
        with pytest.raises(TypeError, match="a plan is called with a list of 2 inputs"):
            plan(wrong)
