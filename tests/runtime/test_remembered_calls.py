"""Remembered calls in models, under modes and autocast, and next to kernels that are refused."""

import pytest
import torch
from remembered import B, D, N, attended, call, counted, uncached, x_of
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="triton is not installed")

import fastvit
from fastvit import ops
from fastvit.kernels import _tuned
from fastvit.ops.runtime import launch as runtime_launch
from fastvit.ops.runtime.backend import KernelUnsupported


def test_meta_and_fake_tensors(weights, triton_backend):
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [torch.empty(t.shape) for t in (x_of("cpu", B, N, D), *weights)]
    meta = [torch.empty(t.shape, device="meta") for t in fake]
    assert call(meta[0], meta[1:]).is_meta
    out = call(fake[0], fake[1:])
    assert out.fake_mode is mode
    assert out.shape == (B, N, D)


def test_modes_see_calls_with_the_signature_of_earlier_ones(weights, recorder, device):
    x = x_of(device, B, N, D)
    call(x, weights)
    with counted() as count:
        with FlopCounterMode(display=False) as counter:
            call(x, weights)
        assert counter.get_total_flops() == 2 * 2 * B * N * D * 24
        torch.compile(lambda x: call(x, weights), backend="eager", fullgraph=True)(x)
        with ops.use_backend("aten"):
            call(x, weights)
        assert not count
        call(x, weights)
    assert len(count) == 1


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


def test_a_kernel_that_is_refused_among_remembered_ones(weights, heads, recorder, device):
    """ATen takes its place, and what follows launches what it would otherwise: no plan of another op is read."""
    x = x_of(device, B, N, D).requires_grad_()

    def run():
        out = call(attended(x, weights, heads, residual=x), weights)
        torch.autograd.grad(out, x, torch.ones_like(out))

    def launched():
        return recorder.launched(run, [x, *weights, *heads])

    with ops.use_backend("triton", strict=False):
        want = launched()
        names = sorted({name for name, *_ in want})
        with counted() as count:
            for recorder.refused in names:
                with pytest.warns(
                    UserWarning, match=f"runs on ATen instead of Triton: {recorder.refused} does not fit"
                ):
                    got = launched()
                assert got
                assert all(launch in want and launch[0] != recorder.refused for launch in got)
            recorder.refused = None
            assert launched() == want
        assert len(names) >= 7
        assert len(count) == 4 * len(names) + 3  # strides of one head, in statistics of ATen's, look different once
        # a first call that fails is not kept
        _tuned.clear_caches()
        recorder.refused = "layer_norm_fwd_kernel"
        run()
        recorder.refused = None
        with counted() as count:
            assert launched() == want
        assert len(count) == 2  # of the backward passes


def test_a_model_in_training(recorder, device):
    """Steps of a small ViT, remembered from the second on, launch what those of one do that is never remembered."""

    def train():
        torch.manual_seed(0)
        model = fastvit.VisionTransformer(
            img_size=8, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=3, drop_path_rate=0.3,
            init_values=0.1, attn_drop_rate=0.2, qkv_bias=True,
        ).to(device)  # fmt: skip
        parameters = [*model.parameters()]
        images = torch.randn(4, 3, 8, 8, device=device)
        return [
            recorder.launched(lambda: torch.autograd.grad(model(images).sum(), parameters), parameters)
            for _ in range(3)
        ]

    with uncached():
        want = train()
    with counted() as count:
        assert train() == want
    assert len(count) == 2 * 12  # steps of patch embedding, two halves of two blocks, and a norm, forward and backward
