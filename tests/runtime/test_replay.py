"""fastvit.ops.runtime.record and replay.c: a replayed call gives the numbers of a first one, bit by bit. On ATen; what
replayed calls launch: test_launches.py."""

import contextlib
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from op_cases import ROWS, function, made, results
from replaying import NODES, by_dispatcher

from fastvit import ops
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import record

pytestmark = pytest.mark.skipif(record.available() is None, reason="there is no C compiler, or no triton")
B, N = 2, 8
# one that runs in Python, one that is recorded, and others that are replayed
CALLS = 6
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


@pytest.fixture
def refusals(monkeypatch):
    """Yields a list with an entry for every call that was recorded: None, or why it could not be."""
    noted, plan = [], record.Recorder.plan

    def noting(self, outputs):
        made = plan(self, outputs)
        noted.append(self.refusal)
        return made

    monkeypatch.setattr(record.Recorder, "plan", noting)
    with runtime_call.forgotten(), ops.use_backend("aten"):
        yield noted


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


@pytest.mark.parametrize("name", HALVES)
def test_replayed_results_are_ordinary_tensors(name, device, refusals):
    """They may be edited, are no views, and are inference tensors where they should be."""
    op, tensors = replaying(name, device, refusals)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(CALLS):
                out = op(**tensors)
        with torch.inference_mode(mode is torch.inference_mode):
            assert not out._is_view()
            assert out.is_inference() == (mode is torch.inference_mode)
            assert out.requires_grad == (mode is torch.enable_grad)
            out += 1.0
