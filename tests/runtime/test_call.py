"""fastvit.ops.runtime.call: which calls are alike, and what is kept of them. On ATen; random calls with kernels:
test_launches.py. What a replay computes: test_replay.py."""

import gc
import re
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from replaying import B, D, N, attended, call, functions_entered, in_python, replays, x_of
from torch.utils.flop_counter import FlopCounterMode

import fastvit
from fastvit import ops
from fastvit.ops.block.norm_linear import layer_norm_linears
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import launch as runtime_launch
from fastvit.ops.runtime import record, run
from fastvit.ops.runtime.backend import INTERPRET, KernelUnsupported

pytestmark = pytest.mark.skipif(record.available() is None, reason="there is no C compiler, or no triton")


@pytest.fixture(autouse=True)
def aten():
    with runtime_call.forgotten(), ops.use_backend("aten"):
        yield


@pytest.fixture
def count():
    with replays() as count:
        yield count


def alike(got, want):
    return len(got) == len(want) and all(map(torch.equal, got, want))


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
def test_what_an_option_changes(change, weights, count, device):
    names = ("norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    before, after = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), CHANGES[change])
    x = x_of(device, B, N, D)

    def computed(options):
        arguments = {"residual": x, **dict(zip(names, weights, strict=True)), **options}
        return [ops.layer_norm_mlp(x, **arguments)]

    check_orders(computed, before, after, count)


def check_orders(computed, one, two, count):
    """Check that each of two calls computes what it does in Python, whichever comes first."""
    with in_python():
        want = [computed(given) for given in (one, two)]
    assert not alike(*want)
    for order in ((0, 1) * 4, (1, 0) * 4):
        runtime_call._forget()
        count.clear()
        for i in order:
            assert alike(computed((one, two)[i]), want[i])
        assert sum(count) >= 4


def test_a_tensor_that_is_there_twice(weights, count, device):
    """Then a call with another tensor in one of the places, and the other way round."""
    x, vector = x_of(device, B, N, D), torch.linspace(0.5, 2.0, D, device=device)
    same, apart = [vector, vector, *weights[2:]], [vector, vector.flip(0), *weights[2:]]
    check_orders(lambda given: [call(x, given)], same, apart, count)


def test_what_is_equal_and_may_change(weights, heads, device):
    """Weights in a module, a number in a tensor: known by their identity, they would hide a change, and be kept."""
    x, layers = x_of(device, B, N, D), torch.nn.ParameterList(heads[:1])
    layers[0].requires_grad_(False)
    for wanted in (False, True) * 4:
        layers[0].requires_grad_(wanted)
        out = ops.layer_norm_attention(x, *weights[:2], layers, [heads[1]], *heads[2:], 1)
        assert out.requires_grad == wanted
    scale = torch.tensor(0.1)
    for value in (0.1, 0.5) * 4:
        scale.fill_(value)
        assert torch.equal(attended(x, weights, heads, scale=scale), attended(x, weights, heads, scale=scale.item()))


def test_a_state_that_is_forgotten_during_a_call(device):
    """A call that was recorded meanwhile is not kept."""
    x = x_of(device, B, N, D)
    for _ in range(2):
        recorded, tensors = runtime_call.begin("mlp", (x,), ())
    assert isinstance(recorded, runtime_call.RecordedCall)
    assert tensors[0] is x
    runtime_call._forget()
    recorded.keep(None)
    assert not runtime_call._kept


def test_what_the_signature_is_made_of(weights, count, device):
    """Tokens, samples, dtypes, autocast, who wants a gradient, the mode, and the types of options."""
    x, half = x_of(device, B, N, D), [w.to(torch.bfloat16) for w in weights]
    for _ in range(4):
        call(x, weights)
    count.clear()
    for shape in ((1, N, D), (B, N + 1, D), (B * N, D), (D,), (B, 1, N, D)):
        call(x_of(device, *shape), weights)
    assert call(x.bfloat16(), half).dtype is torch.bfloat16
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, dtype):
            call(x, weights)
    out = call(x.requires_grad_(), weights)
    torch.autograd.grad(out, x, torch.ones_like(out))
    with torch.no_grad():
        assert call(x, weights).grad_fn is None
    assert not count
    for _ in range(3):
        again = call(x, weights)
        torch.autograd.grad(again, x, torch.ones_like(out))
    assert sum(count) >= 2
    q = x_of(device, B, N, 1, D)
    for _ in range(4):
        ops.attention(q, q, q, is_causal=False)
    with pytest.raises(TypeError, match="is_causal must be a bool, got 0"):
        ops.attention(q, q, q, is_causal=0)


def test_tensors_without_memory(weights, device):
    """Also in the wrapper of a functorch transform that has ended, which hides it."""
    zeros, wrapped = torch._efficientzerotensor(B, N, D, device=device), []
    torch.func.grad(lambda t: (wrapped.append(t), (1.0 * t).sum())[1])(zeros)
    for backend in ("aten", "triton") if INTERPRET else ("aten",):
        with ops.use_backend(backend):
            for _ in range(4):
                want = call(torch.zeros_like(zeros), weights)
            for t in (zeros, *wrapped):
                assert torch.equal(call(t, weights), want)


def test_checks_are_made_after_calls_that_passed_them(weights, heads, device):
    x = x_of(device, B, N, D)
    for _ in range(4):
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


def test_what_is_kept(weights, device, monkeypatch):
    """So many calls, until launches mean something else; and no tensor."""

    def recorded(x, weights):
        for _ in range(2):
            call(x, weights)

    monkeypatch.setattr(runtime_call, "_MOST", 4)
    for rows in range(1, 12):
        recorded(x_of(device, rows, D), weights)
        assert 1 <= len(runtime_call._kept) <= 4
    monkeypatch.setattr(runtime_call, "_MOST_ALIKE", 3)
    x = x_of(device, 5, D)
    for hidden in range(1, 12):  # what tells their keys apart is not the first tensor
        fc1, fc2 = (weights[2][:hidden], weights[3][:hidden]), weights[4][:, :hidden].contiguous()
        recorded(x, [*weights[:2], *fc1, fc2, weights[5]])
    assert max(map(len, runtime_call._kept.values())) == 3
    with mock.patch.object(run, "Recorder") as recorder:  # the others are not recorded again and again
        recorded(x, [*weights[:2], *fc1, fc2, weights[5]])
    assert not recorder.called
    runtime_call._forget()
    x.requires_grad_()
    for _ in range(4):
        call(x, weights).sum().backward()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    runtime_call._forget()
    assert not runtime_call._kept
    recorded(x_of(device, 3, D), weights)
    with runtime_launch.nothing_launched(4):
        assert not runtime_call._kept


def test_a_call_with_more_tensors_than_are_compared(device):
    """65: it runs in Python. One with 63 is kept."""
    x, norm, layer = x_of(device, 5, D), torch.ones(D, device=device), torch.ones(3, D, device=device)
    for count, kept in ((30, 1), (31, 0)):
        runtime_call._forget()
        for _ in range(3):
            layer_norm_linears(x, norm, torch.zeros_like(norm), [layer] * count, [layer[:, 0].contiguous()] * count)
        assert len(runtime_call._kept) == kept


def test_meta_and_fake_tensors(weights):
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [torch.empty(t.shape) for t in (x_of("cpu", B, N, D), *weights)]
    meta = [torch.empty(t.shape, device="meta") for t in fake]
    for _ in range(3):
        assert call(meta[0], meta[1:]).is_meta
        out = call(fake[0], fake[1:])
        assert out.fake_mode is mode
        assert out.shape == (B, N, D)


def test_modes_see_calls_like_earlier_ones(weights, count, device):
    x = x_of(device, B, N, D)
    for _ in range(4):
        call(x, weights)
    assert sum(count) == 2
    with FlopCounterMode(display=False) as counter:
        call(x, weights)
    assert counter.get_total_flops() == 2 * 2 * B * N * D * 24
    torch.compile(lambda x: call(x, weights), backend="eager", fullgraph=True)(x)
    assert sum(count) == 2
    call(x, weights)
    assert sum(count) == 3


def test_a_refused_kernel_is_refused_again(weights, triton_backend, device):
    """ATen takes its place in every call, also in the one that is recorded: a strict caller is told."""
    x, double = x_of(device, B, N, D).double(), [w.double() for w in weights]
    with ops.use_backend("triton", strict=False):
        with pytest.warns(UserWarning, match="float64"):
            call(x, double)
        for _ in range(3):
            out = call(x, double)
    with ops.use_backend("aten"):
        assert torch.equal(out, call(x, double))
    with ops.use_backend("triton", strict=True), pytest.raises(KernelUnsupported, match="float64"):
        call(x, double)


def test_a_kernel_that_is_refused_under_autocast(weights, heads, triton_backend, device):
    """ATen's functions, which take its place, are not autocast's to cast again: scores of few tokens are float32."""
    x = x_of(device, B, 8, D)

    def launch(kernel, *rest):
        raise KernelUnsupported("it does not fit")

    with torch.autocast(device.type, torch.bfloat16):
        with ops.use_backend("aten"):
            want = attended(x, weights, heads)
        refused = pytest.warns(UserWarning, match="it does not fit")
        with runtime_launch.launching(launch), ops.use_backend("triton", strict=False), refused:
            got = attended(x, weights, heads)
    assert torch.equal(got, want)


def test_a_model_in_training(count, device):
    """Steps of a small ViT, replayed from the third on, have the gradients of those that run in Python."""

    def train():
        torch.manual_seed(0)
        model = fastvit.VisionTransformer(
            img_size=8, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=3, drop_path_rate=0.3,
            init_values=0.1, qkv_bias=True,
        ).to(device)  # fmt: skip
        parameters = [*model.parameters()]
        images = torch.randn(4, 3, 8, 8, device=device)
        return [g for _ in range(4) for g in torch.autograd.grad(model(images).sum(), parameters)]

    with in_python():
        want = train()
    assert not count
    assert alike(train(), want)
    # in the last two steps of patch embedding, two halves of two blocks, and a norm; two blocks are like each other
    assert sum(count) >= 2 * 2 * 6


def test_without_replays_every_call_takes_the_documented_route():
    """Up to the launchers, which ATen does not have; so does the backward pass. Nothing is recorded, and nothing
    replayed that was recorded before."""
    contributing = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (sentence,) = re.findall(r"From `Block.forward` to a kernel: (.*?)\.\n", contributing, re.DOTALL)
    route, _, _ = " ".join(re.findall(r"`(.*?)`", sentence)).partition(" ops/<op>/launch.py")
    block, x = fastvit.Block(D, 1), x_of("cpu", B, N, D)
    for replay, last in ((True, "runtime/run.py"), (False, "registry.py"), (True, "runtime/run.py")):
        with ops.use_backend("aten", replay=replay):
            for _ in range(3):
                entered = functions_entered(lambda: block(x).sum().backward())
        files = [file for file in route.split() if any(f"fastvit/{file}:" in function for function in entered)]
        assert files == route[: route.index(last) + len(last)].split()
        assert any("attention_node.py:gradients" in function for function in entered) != replay
        assert not any("runtime/record.py" in function for function in entered)
