"""ops.patch_embed against float64 and eager PyTorch, on both backends."""

import functools
import importlib
import math
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from op_cases import assert_layout_does_not_matter, tensors_of
from oracle import assert_op_as_accurate, assert_op_is_exact, inputs
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime.backend import Path
from fastvit.ops.runtime.call import UNKEPT
from fastvit.study.accuracy.formulas import patch_embed as eager

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MEAN, STD = (0.485, 0.456, 0.406, 0.5), (0.229, 0.224, 0.225, 0.25)


def fused(image, weight, bias=None, **keywords):
    return ops.patch_embed(image, weight, bias, **keywords)


def arguments(B, C, grid, patch, D, P, dtype, device, *, kind="normal", bias=True, pos=True):
    """Image or video, weight, bias, position and prefix by name, all with gradients; prefix None for P = 0."""
    shapes = {
        "image": (B, C, *[n * step for n, step in zip(grid, patch, strict=True)]),
        "weight": (D, C, *patch),
        "bias": (D,) if bias else None,
        "pos_embed": (math.prod(grid), D) if pos else None,
        "prefix": (P, D) if P else None,
    }
    return tensors_of(shapes, dtype, device, kind)


# B, C, grid, patch, D, P: every patch size, K with and without a tail, one patch, one channel, many images in a tile;
# then videos: one tubelet, several, tubelets of one frame
SHAPES = [
    (3, 3, (3, 5), (2, 2), 40, 1),
    (2, 4, (3, 2), (4, 4), 72, 0),
    (2, 3, (2, 2), (8, 8), 24, 5),
    (1, 3, (2, 3), (14, 14), 70, 1),
    (2, 3, (2, 1), (16, 16), 16, 0),
    (1, 1, (1, 1), (32, 32), 33, 1),
    (2, 3, (2, 3), (4, 6), 24, 5),
    (2, 2, (3, 2), (1, 7), 8, 1),
    (5, 1, (4, 1), (3, 1), 1, 2),
    (70, 3, (1, 1), (2, 2), 130, 1),
    (2, 3, (1, 2, 3), (2, 4, 4), 24, 0),
    (2, 3, (3, 3, 2), (2, 4, 6), 72, 2),
    (3, 2, (4, 1, 2), (1, 3, 5), 16, 1),
]


@pytest.mark.parametrize(("shape", "dtype"), zip(SHAPES, cycle(DTYPES)), ids=str)
def test_patch_embed(shape, dtype, backend, device):
    """Outputs and all gradients, the image's included."""
    assert_op_as_accurate(fused, eager, arguments(*shape, dtype, device), what="patch_embed")


@pytest.mark.parametrize(
    ("sizes", "bias", "pos"),
    [((3, 3, (2, 3), (4, 4), 20, P), bias, pos) for P in (0, 2) for bias in (True, False) for pos in (True, False)]
    # more rows, features and pixels than one tile of any kernel, and several splits of the weight's sum
    + [((3, 6, (13, 13), (2, 6), 72, 3), True, True), ((2, 3, (5, 4, 7), (3, 2, 4), 72, 1), True, True)],
    ids=str,
)
def test_integers_are_exact(sizes, bias, pos, backend, device):
    """Small integers: every value is exact, so an indexing error cannot hide in a tolerance."""
    tensors = arguments(*sizes, torch.float32, device, kind="integer", bias=bias, pos=pos)
    assert_op_is_exact(fused, eager, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_pixels_than_are_gathered_at_once(dtype, device):
    """ATen's matrix of patches: some images after the others."""
    assert_op_as_accurate(fused, eager, arguments(6, 3, (32, 32), (8, 8), 8, 1, dtype, device), what="chunks")


@pytest.mark.parametrize(
    ("C", "patch", "dtype"),
    [
        (3, (14, 14), torch.bfloat16),
        (4, (4, 4), torch.float32),
        (4, (4, 4), torch.float16),
        (1, (2, 8), torch.float32),
        (3, (2, 4, 4), torch.bfloat16),
    ],
    ids=str,
)
def test_uint8(C, patch, dtype, backend, device):
    tensors = arguments(2, C, (2, 3, 2)[: len(patch)], patch, 24, 1, dtype, device)
    pixels = torch.randint(0, 256, tensors.pop("image").shape, dtype=torch.uint8, device=device)
    pixels.view(-1)[:2] = torch.tensor([0, 255])

    of_pixels = (functools.partial(f, pixels, mean=MEAN[:C], std=STD[:C]) for f in (fused, eager))
    assert_op_as_accurate(*of_pixels, tensors, what="uint8")


def test_statistics_as_tensors_and_defaults(backend, device):
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, device=device)
    weight = inputs("normal", 24, 3, 4, 4, dtype=torch.float32, device=device)
    mean, std = (torch.tensor(t[:3], device=device).view(3, 1, 1) for t in (MEAN, STD))
    want = ops.patch_embed(pixels, weight, None, mean=MEAN[:3], std=STD[:3])
    torch.testing.assert_close(ops.patch_embed(pixels, weight, None, mean=mean, std=std), want)
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


def _gap(x, *pads):
    return F.pad(x, pads, value=torch.nan)


LAYOUTS = {
    "cropped": lambda x: _gap(x, 3, 2, 1, 4)[:, :, 1:-4, 3:-2],
    "row_strided": lambda x: _gap(x, 0, 8)[..., : x.shape[-1]],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "channel_slice": lambda x: _gap(x, 0, 0, 0, 0, 1, 0)[:, 1:],
    "batch_transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "grey": lambda x: x[:, :1].expand_as(x),
    "column_strided": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=list(LAYOUTS))
def test_image_layouts(layout, backend, device):
    """Whatever the strides of the image, and NaN in the gaps, the results are bitwise those of a contiguous one."""
    tensors = arguments(2, 3, (2, 3), (4, 4), 24, 1, torch.float32, device)
    tensors["image"] = LAYOUTS[layout](tensors["image"])
    assert_layout_does_not_matter("patch_embed", tensors, torch.clone, bitwise=True)


VIDEO_LAYOUTS = {
    "frames_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "frame_repeated": lambda x: x[:, :, :1].expand_as(x),
    "cropped": lambda x: _gap(x, 3, 2, 1, 4, 1, 1)[:, :, 1:-1, 1:-4, 3:-2],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
}


@pytest.mark.parametrize("layout", VIDEO_LAYOUTS, ids=list(VIDEO_LAYOUTS))
def test_video_layouts(layout, backend, device):
    tensors = arguments(2, 3, (2, 2, 3), (2, 4, 4), 24, 1, torch.float32, device)
    tensors["image"] = VIDEO_LAYOUTS[layout](tensors["image"])
    assert_layout_does_not_matter("patch_embed", tensors, torch.clone, bitwise=True)


def test_a_video_is_a_3d_convolution(device):
    """The formula that the other tests hold videos against."""
    tensors = arguments(2, 3, (3, 2, 4), (2, 4, 3), 24, 0, torch.float64, device, pos=False)
    want = F.conv3d(tensors["image"], tensors["weight"], tensors["bias"], (2, 4, 3)).flatten(2).transpose(1, 2)
    torch.testing.assert_close(eager(**tensors), want)


def test_a_batch_of_one_whose_stride_means_nothing(backend, device):
    weight = inputs("normal", 24, 3, 4, 4, dtype=torch.float32, device=device)
    one = inputs("normal", 1, 3, 8, 8, dtype=torch.float32, device=device)
    odd = one.as_strided(one.shape, (99990001, 64, 8, 1))
    assert torch.equal(fused(odd, weight), fused(one, weight))


def test_offsets_beyond_int32(triton_backend, device):
    """The third image starts 2.2e9 bytes after the first; untouched memory is never committed. A wrapped
    offset would read in front of the first image, which the storage covers: the result would be wrong, not a crash."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    stride, front = 1_100_000_001, 2_100_000_000
    storage = torch.empty(front + 2 * stride + 64, dtype=torch.uint8, device=device)
    images = storage.as_strided((3, 1, 8, 8), (stride, 64, 8, 1), front)
    images.copy_(torch.randint(0, 256, images.shape, dtype=torch.uint8))
    weight = inputs("normal", 16, 1, 4, 4, dtype=torch.float32, device=device)
    assert torch.equal(fused(images, weight), fused(images.contiguous(), weight))


def test_image_is_kept_only_for_the_weight(backend, device):
    tensors = arguments(2, 3, (2, 2), (4, 4), 24, 2, torch.float32, device)
    for trained in (True, False):
        out = fused(**tensors | {"weight": tensors["weight"].detach().requires_grad_(trained)})
        saved = [t for t in out.grad_fn.saved_tensors if t is not None]
        assert any(t.data_ptr() == tensors["image"].data_ptr() for t in saved) is trained


def test_infinite_prefix_gradient_stays_there(backend, device):
    tensors = arguments(2, 3, (2, 2), (4, 4), 24, 1, torch.float32, device)
    out = fused(**tensors)
    dout = torch.ones_like(out)
    dout[:, 0] = torch.inf
    *others, dprefix = torch.autograd.grad(out, list(tensors.values()), dout)
    assert dprefix.isinf().all()
    assert all(g.isfinite().all() for g in others)


def test_nan_stays_in_its_image(backend, device):
    """Not in the prefix rows of that image either, nor through the tiles that it shares with its neighbours."""
    tensors = {k: v.detach() for k, v in arguments(3, 3, (2, 2), (7, 4), 24, 1, torch.float32, device).items()}
    clean = fused(**tensors)
    for image in range(3):
        dirty_image = tensors["image"].clone()
        dirty_image[image, 1, 0, 0] = torch.nan
        dirty = fused(**tensors | {"image": dirty_image})
        assert dirty[image, 1].isnan().all()
        dirty[image, 1] = clean[image, 1]
        assert torch.equal(dirty, clean)


def test_huge_plane_is_refused(triton_backend):
    """Offsets within a patch are 32-bit in the kernels."""
    launch = importlib.import_module("fastvit.ops.patch_embed.launch")
    weight = torch.zeros(8, 2, 1, 1, device="meta")
    image = torch.empty_strided((1, 2, 4, 4), (0, 1 << 31, 4, 1), device="meta")
    with pytest.raises(backends.KernelUnsupported, match=r"2\*\*31"):
        launch.patch_embed_fwd(image, weight, None, None, None, None, call=UNKEPT[Path.TRITON])


@pytest.mark.parametrize("added", [torch.float32, torch.bfloat16], ids=str)
def test_a_wider_position_or_prefix_makes_a_wider_result(added, backend, device):
    """Under autocast; values and gradients: test_every_op.py."""
    image, weight, _, *rest = arguments(2, 3, (2, 2), (4, 4), 24, 1, torch.float32, device).values()
    pos_embed, prefix = (t.to(added) for t in rest)
    with torch.autocast(device.type, torch.bfloat16):
        assert fused(image, weight).dtype is torch.bfloat16
        for options in ({"pos_embed": pos_embed}, {"prefix": prefix}):
            assert fused(image, weight, **options).dtype is eager(image, weight, None, **options).dtype is added


def test_flops(backend, device):
    tensors = arguments(2, 3, (2, 2), (4, 4), 24, 1, torch.float32, device)
    with FlopCounterMode(display=False) as counter:
        fused(**tensors).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 4) * (3 * 16) * 24
