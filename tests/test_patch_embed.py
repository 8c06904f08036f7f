"""ops.patch_embed against float64 and eager PyTorch, on both backends."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from formulas import patch_embed as eager
from oracle import assert_as_accurate, assert_op_as_accurate, assert_op_is_exact, inputs
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.ops import _library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MEAN, STD = (0.485, 0.456, 0.406, 0.5), (0.229, 0.224, 0.225, 0.25)


def fused(image, weight, bias=None, pos_embed=None, prefix=None, **keywords):
    return ops.patch_embed(image, weight, bias, pos_embed=pos_embed, prefix=prefix, **keywords)


def arguments(B, C, grid, patch, D, P, dtype, device, *, kind="normal", bias=True, pos=True):
    """Image, weight, bias, position and prefix by name, all with gradients; prefix None for P = 0."""
    (h, w), (ph, pw) = grid, patch
    shapes = {
        "image": (B, C, h * ph, w * pw),
        "weight": (D, C, ph, pw),
        "bias": (D,) if bias else None,
        "pos_embed": (h * w, D) if pos else None,
        "prefix": (P, D) if P else None,
    }
    return {
        name: None if s is None else inputs(kind, *s, dtype=dtype, device=device, seed=i).requires_grad_()
        for i, (name, s) in enumerate(shapes.items())
    }


# B, C, grid, patch, D, P: every patch size, K with and without a tail, one patch, one channel, many images in a tile
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
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_patch_embed(shape, dtype, backend, device):
    """Outputs and all gradients, the image's included."""
    assert_op_as_accurate(fused, eager, arguments(*shape, dtype, device), what="patch_embed")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("pos", [True, False], ids=["pos", "no_pos"])
@pytest.mark.parametrize("P", [0, 2])
def test_optional_arguments_exactly(P, pos, bias, backend, device):
    """Small integers: every value is exact, so an indexing error cannot hide in a tolerance."""
    tensors = arguments(3, 3, (2, 3), (4, 4), 20, P, torch.float32, device, kind="integer", bias=bias, pos=pos)
    assert_op_is_exact(fused, eager, tensors)


@pytest.mark.parametrize("kind", ["large", "offset"])
def test_input_kinds(kind, backend, device):
    tensors = arguments(2, 3, (2, 2), (4, 4), 24, 1, torch.float32, device)
    shape = tensors["image"].shape
    tensors["image"] = inputs(kind, *shape, dtype=torch.float32, device=device).requires_grad_()
    assert_op_as_accurate(fused, eager, tensors, what=kind)


def test_many_tiles(backend, device):
    """More rows, features and pixels than one tile of any kernel, and several splits of the weight's sum."""
    tensors = arguments(3, 6, (13, 13), (2, 6), 72, 3, torch.float32, device, kind="integer")
    assert_op_is_exact(fused, eager, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_pixels_than_are_gathered_at_once(dtype, device):
    """ATen's matrix of patches: some images after the others."""
    assert_op_as_accurate(fused, eager, arguments(5, 3, (32, 32), (8, 8), 8, 1, dtype, device), what="chunks")


@pytest.mark.parametrize("m", [1, 100, 25216, 10**6])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize(("itemsize", "loaded"), [(2, 2), (2, 4), (4, 4)])
def test_configs_fit_shared_memory(m, arch, itemsize, loaded):
    from fastvit.kernels import _configs

    limit = {"sm_80": 163, "sm_90": 227, "sm_120": 99, "gfx942": 64}[arch] * 1024
    for k in (588, 768):
        for shape, split in (((m, 768, k), False), ((768, k, m), True)):
            cfg = _configs.patch_embed(
                *shape, itemsize=itemsize, loaded=loaded, arch=arch, multiprocessors=132, split=split
            )
            assert (cfg.block_m + cfg.block_n) * cfg.block_k * loaded * cfg.num_stages <= limit
            assert 1 <= cfg.splits <= max(m // 256, 1)
            assert split or cfg.splits == 1


def normalised(image, weight, *rest, **keywords):
    C = image.shape[1]
    mean, std = (torch.tensor(t[:C], dtype=image.dtype, device=image.device)[:, None, None] for t in (MEAN, STD))
    return eager(((image / 255 - mean) / std).to(weight.dtype), weight, *rest, **keywords)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("C", "patch"), [(3, (14, 14)), (4, (4, 4)), (1, (2, 8))], ids=str)
def test_uint8(C, patch, dtype, backend, device):
    tensors = arguments(2, C, (2, 3), patch, 24, 1, dtype, device)
    pixels = torch.randint(0, 256, tensors.pop("image").shape, dtype=torch.uint8, device=device)
    pixels[0, 0, 0, :2] = torch.tensor([0, 255])

    def fused_uint8(**tensors):
        return fused(pixels, **tensors, mean=MEAN[:C], std=STD[:C])

    def eager_float(weight, **tensors):
        # eager normalises in float32, as torchvision's transforms do, and casts for the convolution
        image = pixels.double() if weight.dtype is torch.float64 else pixels.float()
        return normalised(image, weight, **tensors)

    assert_op_as_accurate(fused_uint8, eager_float, tensors, what="uint8")


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
    "column_strided": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=list(LAYOUTS))
def test_image_layouts(layout, backend, device):
    """Whatever the strides of the image, and NaN in the gaps, the results are bitwise those of a contiguous one."""
    tensors = arguments(2, 3, (2, 3), (4, 4), 24, 1, torch.float32, device)
    results = []
    for arrange in (lambda x: x, LAYOUTS[layout]):
        image = arrange(tensors["image"].detach()).requires_grad_()
        out = fused(**tensors | {"image": image})
        results.append((out, *torch.autograd.grad(out, (image, tensors["weight"]), torch.ones_like(out))))
    for plain, strided in zip(*results, strict=True):
        assert torch.equal(plain, strided)


def test_expanded_and_arbitrary_strides(backend, device):
    """A grey image expanded to three channels, and a batch of one whose batch stride means nothing."""
    weight = inputs("normal", 24, 3, 4, 4, dtype=torch.float32, device=device)
    grey = inputs("normal", 2, 1, 8, 8, dtype=torch.float32, device=device)
    assert torch.equal(fused(grey.expand(-1, 3, -1, -1), weight), fused(grey.repeat(1, 3, 1, 1), weight))
    one = inputs("normal", 1, 3, 8, 8, dtype=torch.float32, device=device)
    odd = one.as_strided(one.shape, (99990001, 64, 8, 1))
    assert torch.equal(fused(odd, weight), fused(one, weight))


def test_offsets_beyond_int32(triton_backend, device):
    """The third image starts 2.2e9 bytes behind the first; memory that nobody touches is never committed. A wrapped
    offset would read in front of the first image, which the storage covers: the result would be wrong, not a crash."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    stride, front = 1_100_000_001, 2_100_000_000
    storage = torch.empty(front + 2 * stride + 64, dtype=torch.uint8, device=device)
    images = storage.as_strided((3, 1, 8, 8), (stride, 64, 8, 1), front)
    images.copy_(torch.randint(0, 256, images.shape, dtype=torch.uint8))
    weight = inputs("normal", 16, 1, 4, 4, dtype=torch.float32, device=device)
    assert torch.equal(fused(images, weight), fused(images.contiguous(), weight))


def test_weight_layouts(backend, device):
    tensors = {k: v.detach() for k, v in arguments(2, 3, (2, 2), (4, 4), 24, 2, torch.float32, device).items()}
    want = fused(**tensors)
    strided = {k: torch.stack([v, v], -1)[..., 0] for k, v in tensors.items()}
    strided["weight"] = tensors["weight"].contiguous(memory_format=torch.channels_last)
    assert torch.equal(fused(**strided), want)


OUT_GRADIENTS = {
    "expanded": lambda y: torch.full((), 2.0, device=y.device).expand(y.shape),
    "expanded_batch": lambda y: inputs("integer", 1, *y.shape[1:], dtype=y.dtype, device=y.device).expand(y.shape),
    "token_slice": lambda y: inputs("integer", y.shape[0], y.shape[1] + 1, y.shape[2], dtype=y.dtype, device=y.device)[
        :, 1:
    ],
    "column_strided": lambda y: inputs("integer", *y.mT.shape, dtype=y.dtype, device=y.device).mT,
}


@pytest.mark.parametrize("layout", OUT_GRADIENTS, ids=list(OUT_GRADIENTS))
def test_layouts_of_the_output_gradient(layout, backend, device):
    tensors = arguments(3, 3, (2, 3), (4, 4), 24, 2, torch.float32, device, kind="integer")
    assert_op_is_exact(fused, eager, tensors, OUT_GRADIENTS[layout](eager(**tensors).detach()))


@pytest.mark.parametrize("name", ["image", "weight", "bias", "pos_embed", "prefix"])
def test_one_gradient_alone(name, backend, device):
    tensors = arguments(2, 3, (2, 2), (4, 4), 24, 2, torch.float32, device)
    alone = {k: v.detach().requires_grad_(k == name) for k, v in tensors.items()}
    dout = inputs("normal", 2, 6, 24, dtype=torch.float32, device=device, seed=9)
    (got,) = torch.autograd.grad(fused(**alone), alone[name], dout)
    want = torch.autograd.grad(fused(**tensors), tensors[name], dout)[0]
    assert torch.equal(got, want)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_empty_batch(dtype, backend, device):
    tensors = arguments(1, 3, (2, 2), (4, 4), 24, 2, torch.float32, device)
    tensors["image"] = torch.empty(0, 3, 8, 8, dtype=dtype, device=device, requires_grad=dtype is torch.float32)
    out = fused(**tensors)
    assert out.shape == (0, 6, 24)
    wanted = [t for t in tensors.values() if t.requires_grad]
    for gradient, tensor in zip(torch.autograd.grad(out.sum(), wanted), wanted, strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))


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


def test_gradcheck(device):
    with _library.use_backend("aten"):
        tensors = arguments(2, 2, (2, 1), (2, 3), 3, 1, torch.float64, device)
        assert torch.autograd.gradcheck(lambda *a: fused(*a), tuple(tensors.values()))
        del tensors["image"]
        pixels = torch.randint(0, 256, (2, 2, 4, 3), dtype=torch.uint8, device=device)
        assert torch.autograd.gradcheck(lambda *a: fused(pixels, *a), tuple(tensors.values()))


def test_huge_plane_is_refused(triton_backend):
    """Offsets within a patch are 32-bit in the kernels."""
    launch = importlib.import_module("fastvit.ops.launch.patch_embed")
    weight = torch.zeros(8, 2, 1, 1, device="meta")
    image = torch.empty_strided((1, 2, 4, 4), (0, 1 << 31, 4, 1), device="meta")
    with pytest.raises(_library.Unsupported, match=r"2\*\*31"):
        launch.patch_embed_fwd(image, weight, None, None, None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_opcheck(dtype, backend, device):
    tensors = {k: v.detach() for k, v in arguments(2, 3, (2, 3), (4, 2), 24, 2, torch.float32, device).items()}
    image, weight, *rest = tensors.values()
    normalize = None
    if dtype is torch.uint8:
        image, normalize = (image * 50).to(torch.uint8), torch.rand(2, 3, device=device)
    dout = inputs("normal", 2, 8, 24, dtype=torch.float32, device=device, seed=9)
    opcheck = torch.library.opcheck
    opcheck(torch.ops.fastvit.patch_embed_fwd, (image, weight, *rest, normalize))
    opcheck(torch.ops.fastvit.patch_embed_fwd, (image, weight, None, None, None, normalize))
    opcheck(torch.ops.fastvit.patch_embed_bwd_weight, (dout, image, weight, normalize))
    opcheck(torch.ops.fastvit.patch_embed_bwd_image, (dout, weight, 8, 6, torch.bfloat16))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic, backend, device):
    tensors = arguments(1, 3, (2, 2), (4, 4), 24, 1, torch.float32, device)
    parameters = [t for name, t in tensors.items() if name != "image"]

    def step(image, pixels):
        tokens = fused(image, *parameters) + fused(pixels, *parameters, mean=MEAN[:3], std=STD[:3])
        return tokens.square().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for B in (2, 3, 5):
        image = inputs("normal", B, 3, 8, 8, dtype=torch.float32, device=device).requires_grad_()
        pixels = (image.detach() * 40).to(torch.uint8)
        got, want = (torch.autograd.grad(f(image, pixels), (image, *parameters)) for f in (compiled, step))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("added", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_follows_eager(added, backend, device):
    """float32 image and weight in bfloat16; a float32 position or prefix makes the result float32."""
    tensors = arguments(2, 3, (2, 2), (4, 4), 24, 1, torch.float32, device)
    for name in ("pos_embed", "prefix"):
        tensors[name] = tensors[name].detach().to(added).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        got, want = fused(**tensors), eager(**tensors)
    exact = eager(**{k: v.double() for k, v in tensors.items()})
    assert_as_accurate(got, want, exact, what="autocast")
    leaves = list(tensors.values())
    for name, g in zip(tensors, torch.autograd.grad(got.float().sum(), leaves), strict=True):
        assert g.dtype is tensors[name].dtype
    with torch.autocast(device.type, torch.bfloat16):
        assert fused(tensors["image"].bfloat16(), tensors["weight"]).dtype is torch.bfloat16


def test_flops(backend, device):
    tensors = arguments(2, 3, (2, 2), (4, 4), 24, 1, torch.float32, device)
    with FlopCounterMode(display=False) as counter:
        fused(**tensors).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 4) * (3 * 16) * 24


X, W = (2, 3, 8, 8), (24, 3, 4, 4)
BAD = {
    "image must be a tensor": (TypeError, lambda x, w: ops.patch_embed([1.0], w, None)),
    "image must be float32": (TypeError, lambda x, w: ops.patch_embed(x.long(), w, None)),
    "weight must be float32": (TypeError, lambda x, w: ops.patch_embed(x, w.byte(), None)),
    r"image must have shape \(B, C, H, W\), got \(3, 8, 8\)": (ValueError, lambda x, w: ops.patch_embed(x[0], w, None)),
    r"weight must have shape \(D, C, ph, pw\)": (ValueError, lambda x, w: ops.patch_embed(x, w.flatten(1), None)),
    "weight must have image's dtype": (TypeError, lambda x, w: ops.patch_embed(x, w.half(), None)),
    "weight must be on image's device": (ValueError, lambda x, w: ops.patch_embed(x, w.to("meta"), None)),
    "weight must have image's 2 channels, got 3": (ValueError, lambda x, w: ops.patch_embed(x[:, :2], w, None)),
    r"image size \(H, W\) must be a positive multiple of the patch \(4, 4\), got \(8, 7\)": (
        ValueError,
        lambda x, w: ops.patch_embed(x[..., :7], w, None),
    ),
    r"multiple of the patch \(4, 4\), got \(0, 8\)": (ValueError, lambda x, w: ops.patch_embed(x[:, :, :0], w, None)),
    r"bias must have shape \(D,\) = \(24,\)": (ValueError, lambda x, w: ops.patch_embed(x, w, w.new_zeros(23))),
    "bias must have weight's dtype": (TypeError, lambda x, w: ops.patch_embed(x, w, w.new_zeros(24).half())),
    r"pos_embed must have shape \(patches, D\) = \(4, 24\)": (
        ValueError,
        lambda x, w: ops.patch_embed(x, w, None, pos_embed=w.new_zeros(5, 24)),
    ),
    "pos_embed must have weight's dtype": (
        TypeError,
        lambda x, w: ops.patch_embed(x, w, None, pos_embed=w.new_zeros(4, 24).double()),
    ),
    r"prefix must have shape \(P, D\) with D = 24": (
        ValueError,
        lambda x, w: ops.patch_embed(x, w, None, prefix=w.new_zeros(24)),
    ),
    "mean is for uint8 images": (ValueError, lambda x, w: ops.patch_embed(x, w, None, mean=MEAN[:3])),
    "std is for uint8 images": (ValueError, lambda x, w: ops.patch_embed(x, w, None, std=STD[:3])),
    "mean must have one value for each of the 3 channels, got 2": (
        ValueError,
        lambda x, w: ops.patch_embed(x.byte(), w, None, mean=(0.5, 0.5)),
    ),
    "std must be positive and finite": (
        ValueError,
        lambda x, w: ops.patch_embed(x.byte(), w, None, std=(0.2, 0.0, 0.2)),
    ),
    "mean must be finite": (
        ValueError,
        lambda x, w: ops.patch_embed(x.byte(), w, None, mean=(0.2, float("nan"), 0.2)),
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message, device):
    error, call = BAD[message]
    with pytest.raises(error, match=message):
        call(torch.zeros(X, device=device), torch.zeros(W, device=device))
