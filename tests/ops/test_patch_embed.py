"""ops.patch_embed: exact sums, bytes and their statistics, a plane beyond 32 bits."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from op_at_sizes import case, patches
from op_cases import function, made, results
from oracle import assert_op_as_accurate, assert_op_is_exact, inputs
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.reference import ops as formulas
from fastvit.reference.ops import patch_embed as eager

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize(
    ("name", "sizes", "without"),
    [
        ("patch_embed", (3, (2, 3), (4, 4), 20, 2), ("bias", "pos_embed")),
        # more rows, features and pixels than one tile of any kernel, and several splits of the weight's sum
        ("patch_embed", (6, (13, 13), (2, 6), 72, 3), ()),
        ("patch_embed video", (3, (5, 4, 7), (3, 2, 4), 72, 1), ()),
    ],
    ids=str,
)
def test_integers_are_exact(name, sizes, without, backend, device):
    """Small integers: every value is exact, so an indexing error cannot hide in a tolerance."""
    tensors = case(name, torch.float32, 3, **patches(*sizes)).draw(device)
    for i, (key, t) in enumerate(tensors.items()):
        exact = inputs("integer", *t.shape, dtype=torch.float32, device=device, seed=i).requires_grad_()
        tensors[key] = None if key in without else exact
    assert_op_is_exact(ops.patch_embed, eager, tensors)


def test_more_pixels_than_are_gathered_at_once(device):
    """ATen's matrix of patches: some images after the others."""
    many = case("patch_embed", torch.bfloat16, 6, **patches(3, (32, 32), (8, 8), 8, 1))
    assert_op_as_accurate(many.function(ops), many.function(formulas), many.draw(device))


def test_statistics_as_tensors_and_defaults(device):
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, device=device)
    weight = inputs("normal", 24, 3, 4, 4, dtype=torch.float32, device=device)
    mean, std = (torch.tensor(t, device=device).view(3, 1, 1) for t in (MEAN, STD))
    want = ops.patch_embed(pixels, weight, None, mean=MEAN, std=STD)
    for _ in range(3):  # not differentiated, replayed or not
        got = ops.patch_embed(pixels, weight, None, mean=mean, std=std.requires_grad_())
        torch.testing.assert_close(got, want)
        assert not got.requires_grad
    torch.testing.assert_close(ops.patch_embed(pixels, weight, None), eager(pixels / 255, weight))


def test_constants_survive_inference_mode(backend, device):
    """The cached scale and shift, first made in inference mode, serve training too."""
    pixels = torch.randint(0, 256, (1, 1, 4, 4), dtype=torch.uint8, device=device)
    weight = inputs("normal", 8, 1, 2, 2, dtype=torch.float32, device=device).requires_grad_()
    statistics = {"mean": (0.123,), "std": (0.321,)}
    with torch.inference_mode():
        want = ops.patch_embed(pixels, weight, None, **statistics)
    got = ops.patch_embed(pixels, weight, None, **statistics)
    assert torch.equal(got, want)
    got.sum().backward()
    assert weight.grad.isfinite().all()


IMAGES = {
    "patch_embed": lambda x: F.pad(x, (3, 2, 1, 4), value=torch.nan)[:, :, 1:-4, 3:-2],
    "patch_embed uint8": lambda x: x.contiguous(memory_format=torch.channels_last),
    "patch_embed video": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("name", IMAGES)
def test_layouts_of_images(name, backend, device):
    """Cropped, with channels last, with frames first: bitwise the results of a contiguous image."""
    tensors = made(name, 2, 6, device)
    key = "pixels" if "pixels" in tensors else "image"
    runs = []
    for arrange in (IMAGES[name], torch.clone):
        given = arrange(tensors[key].detach()).requires_grad_(tensors[key].requires_grad)
        runs.append(results(function(name), tensors | {key: given}))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_video_is_a_3d_convolution(device):
    """The formula that the other tests hold videos against."""
    video = case("patch_embed video", torch.float64, 2, **patches(3, (3, 2, 4), (2, 4, 3), 24, 1)).draw(device)
    image, weight, bias = (video[key] for key in ("image", "weight", "bias"))
    want = F.conv3d(image, weight, bias, (2, 4, 3)).flatten(2).transpose(1, 2)
    torch.testing.assert_close(eager(image, weight, bias), want)


def test_huge_plane_is_refused(triton_backend):
    """Offsets within a patch are 32-bit in the kernels."""
    launch = importlib.import_module("fastvit.ops.patch_embed.launch")
    weight = torch.zeros(8, 2, 1, 1, device="meta")
    image = torch.empty_strided((1, 2, 4, 4), (0, 1 << 31, 4, 1), device="meta")
    with pytest.raises(backends.KernelUnsupported, match=r"2\*\*31"):
        launch.patch_embed_fwd(image, weight, None, None, None, None)


def test_infinite_prefix_gradient_stays_there(backend, device):
    tensors = made("patch_embed", 2, 6, device)
    out = ops.patch_embed(**tensors)
    dout = torch.ones_like(out)
    dout[:, 0] = torch.inf
    *others, dprefix = torch.autograd.grad(out, list(tensors.values()), dout)
    assert dprefix.isinf().all()
    assert all(g.isfinite().all() for g in others)


def test_image_is_kept_only_for_the_weight(device):
    tensors = made("patch_embed", 2, 6, device)
    for trained in (True, False):
        out = ops.patch_embed(**tensors | {"weight": tensors["weight"].detach().requires_grad_(trained)})
        saved = [t for t in out.grad_fn.saved_tensors if t is not None]
        assert any(t.data_ptr() == tensors["image"].data_ptr() for t in saved) is trained


def test_fake_tensors_after_real_ones(device):
    """A mode of fake tensors takes no kept statistics."""
    tensors = [made("patch_embed uint8", 1, 4, device)[name] for name in ("pixels", "weight", "bias")]
    expected = ops.patch_embed(*tensors, mean=MEAN, std=STD)
    with FakeTensorMode() as mode:
        assert ops.patch_embed(*map(mode.from_tensor, tensors), mean=MEAN, std=STD).shape == expected.shape
