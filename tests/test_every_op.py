"""What every op promises whatever it computes, on both backends. Values, layouts and errors: each op's own file."""

import formulas
import pytest
import torch
from oracle import inputs
from torch.utils.checkpoint import checkpoint

from fastvit import ops
from fastvit.ops import _library

# "B" and "N": the batch, and the tokens of a sample
X = ("B", "N", 16)
BRANCH = {"layer_scale": (16,), "row_scale": ("B",)}
LINEAR = {"weight": (16, 16), "bias": (16,)}
NORM = {"norm_weight": (16,), "norm_bias": (16,)}
FC = {"fc1_weight": (40, 16), "fc1_bias": (40,), "fc2_weight": (16, 40), "fc2_bias": (16,)}
PATCHES = {
    "image": ("B", 3, 8, "2N"),
    "weight": (24, 3, 4, 4),
    "bias": (24,),
    "pos_embed": ("N", 24),
    "prefix": (1, 24),
}
SHAPES = {
    "layer_norm": {"x": X, "weight": (16,), "bias": (16,)},
    "linear": {"x": X, **LINEAR, **BRANCH, "residual": X},
    "linear gelu": {"x": X, **LINEAR},
    "layer_norm_linear": {"x": X, **NORM, **LINEAR},
    "layer_norm_linear residual": {"x": X, **NORM, **LINEAR},
    "mlp": {"x": X, **FC, **BRANCH},
    "layer_norm_mlp": {"x": X, **NORM, **FC, **BRANCH},
    "add_layer_norm": {"residual": X, "branch": X, "weight": (16,), "bias": (16,), **BRANCH},
    "attention": dict.fromkeys("qkv", ("B", "N", 2, 16)),
    "attention_qkvpacked": {"qkv": ("B", "N", 3, 2, 16)},
    "patch_embed": PATCHES,
}
every_op = pytest.mark.parametrize("name", SHAPES)
of_rows = pytest.mark.parametrize(
    "name", ["layer_norm", "linear", "linear gelu", "layer_norm_linear", "mlp", "layer_norm_mlp"]
)


def function(name, module=ops):
    """The op, or its formula, of tensors by name; an MLP's residual is its x."""
    op = getattr(module, name.split()[0])
    if "mlp" in name:
        return lambda x, **tensors: op(x=x, residual=x, **tensors)
    if name == "layer_norm_linear residual":
        if module is formulas:
            return lambda x, **tensors: (op(x=x, **tensors), x * 1)
        return lambda **tensors: op(**tensors, return_residual=True)
    return lambda **tensors: op(**tensors, **({"activation": "gelu"} if name == "linear gelu" else {}))


def made(name, B, N, device, dtype=torch.float32):
    """Tensors by name; all but row_scale require a gradient."""
    tensors = {}
    for seed, (key, shape) in enumerate(SHAPES[name].items()):
        shape = [{"B": B, "N": N, "2N": 2 * N}.get(n, n) for n in shape]
        t = inputs("normal", *shape, dtype=torch.float64, device=device, seed=seed)
        t = t * t[0].numel() ** -0.5 if key.endswith("weight") and t.dim() > 1 else t
        tensors[key] = t.to(dtype).requires_grad_(key != "row_scale")
    return tensors


def outputs_of(result):
    return result if isinstance(result, tuple) else (result,)


def results(op, tensors):
    """Outputs and gradients."""
    outputs = outputs_of(op(**tensors))
    wanted = [t for t in tensors.values() if t.requires_grad]
    return *outputs, *torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs])


@every_op
def test_deterministic(name, backend, device):
    """Over several tiles, partial sums and splits."""
    tensors = made(name, 5, 146, device, torch.bfloat16)
    first, again = (results(function(name), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@of_rows
def test_nan_stays_in_its_row(name, backend, device):
    tensors = {key: t.detach() for key, t in made(name, 2, 5, device).items()}
    clean = function(name)(**tensors)
    tensors["x"][1, 2, 3] = torch.nan
    dirty = function(name)(**tensors)
    assert dirty[1, 2].isnan().all()
    dirty[1, 2] = clean[1, 2]
    assert torch.equal(dirty, clean)


LAYOUTS = {
    "row_strided": lambda t: torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]],
    "token_slice": lambda t: torch.cat([torch.full_like(t[:, :1], torch.nan), t], 1)[:, 1:],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "column_strided": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns_first": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name, shapes in SHAPES.items() if shapes.get("x") == X])
def test_layouts(name, layout, backend, device):
    """Strided tokens and output gradients give what contiguous ones give; bitwise, but for a lone matmul on ATen."""
    tensors = made(name, 3, 5, device)
    runs = []
    for arrange in (torch.clone, LAYOUTS[layout]):
        arranged = {k: arrange(t.detach()).requires_grad_() if t.dim() == 3 else t for k, t in tensors.items()}
        outputs = outputs_of(function(name)(**arranged))
        douts = [arrange(inputs("normal", *o.shape, dtype=o.dtype, device=device, seed=50)) for o in outputs]
        wanted = [t for t in arranged.values() if t.requires_grad]
        runs.append((*outputs, *torch.autograd.grad(outputs, wanted, douts)))
        assert outputs[0].is_contiguous()
    for plain, strided in zip(*runs, strict=True):
        if name.startswith("linear"):
            torch.testing.assert_close(strided, plain, atol=2e-6, rtol=1e-5)
        else:
            assert torch.equal(strided, plain)


@of_rows
def test_strides_of_dimensions_of_one(name, backend, device):
    """One token a sample: contiguous to PyTorch, whatever the stride of the token dimension says."""
    tensors = {k: t.detach() for k, t in made(name, 5, 1, device).items()}
    odd = {k: t.as_strided(t.shape, (16, 7, 1)) if t.dim() == 3 else t for k, t in tensors.items()}
    assert odd["x"].is_contiguous()
    assert torch.equal(function(name)(**odd), function(name)(**tensors))


@every_op
def test_gradients_of_stride_0(name, backend, device):
    tensors = made(name, 3, 6, device)
    wanted = [t for t in tensors.values() if t.requires_grad]
    got, want = (
        torch.autograd.grad(sum(o.sum() for o in outputs_of(function(name, module)(**tensors))), wanted)
        for module in (ops, formulas)
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [name for name in SHAPES if "mlp" not in name and name != "patch_embed"])
def test_compile(name, dynamic, backend, device):
    """Those with options that change what is compiled: test_mlp.py, test_patch_embed.py."""
    torch._dynamo.reset()
    compiled = torch.compile(function(name), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for B in (2, 3, 5):
        tensors = made(name, B, 6, device)
        torch.testing.assert_close(results(compiled, tensors), results(function(name), tensors))


@every_op
def test_func_and_checkpoint(name, backend, device):
    tensors = made(name, 2, 18, device)
    keys = [key for key, t in tensors.items() if t.requires_grad]

    def loss(*values):
        return sum(
            o.square().sum() for o in outputs_of(function(name)(**tensors | dict(zip(keys, values, strict=True))))
        )

    leaves = [tensors[key] for key in keys]
    want = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, argnums=tuple(range(len(keys))))(*leaves), want)
    recomputed = torch.autograd.grad(checkpoint(loss, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(recomputed, want, strict=True))


@pytest.mark.parametrize("name", ["layer_norm", "linear gelu", "layer_norm_linear", "mlp", "attention_qkvpacked"])
def test_vmap(name, backend, device):
    """Every sample by itself; of an MLP without what is drawn for each sample."""
    tensors = made(name, 2, 18, device)
    tensors.pop("row_scale", None)
    (key, x), *rest = tensors.items()

    def loss(x):
        return function(name)(**{key: x}, **dict(rest)).square().sum()

    (want,) = torch.autograd.grad(loss(x), x)
    each = torch.func.vmap(torch.func.grad(loss))(x[:, None])
    torch.testing.assert_close(each[:, 0], want)


@every_op
def test_other_kinds_of_differentiation_raise(name, device):
    tensors = made(name, 2, 18, device)
    (key, x), *rest = tensors.items()
    op = name.split()[0]
    total = sum(o.square().sum() for o in outputs_of(function(name)(**tensors)))
    (dx,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(NotImplementedError, match=rf"ops\.{op} does not support double backward"):
        dx.sum().backward()
    with pytest.raises(NotImplementedError, match=rf"ops\.{op} does not support forward-mode"):
        torch.func.jvp(lambda x: function(name)(**{key: x}, **dict(rest)), (x.detach(),), (x.detach(),))


@every_op
def test_float64_falls_back_with_one_warning(name, triton_backend, device):
    tensors = {key: t.detach() for key, t in made(name, 2, 18, device, torch.float64).items()}
    with pytest.raises(_library.Unsupported, match="float64"):
        function(name)(**tensors)
    with _library.use_backend("triton", strict=False):
        _library._warned.clear()
        with pytest.warns(UserWarning, match=r"runs on ATen instead of Triton: .*float64"):
            got = function(name)(**tensors)
    torch.testing.assert_close(got, function(name, formulas)(**tensors))


@pytest.mark.parametrize("name", [name for name, shapes in SHAPES.items() if "row_scale" in shapes])
def test_scale_of_a_sample_of_rows_and_columns(name, backend, device):
    """A sample (h, w, D) is one of h * w tokens."""
    tensors = {key: t.detach() for key, t in made(name, 3, 6, device).items()}
    images = {key: t.unflatten(1, (2, 3)) if t.dim() == 3 else t for key, t in tensors.items()}
    got, want = (outputs_of(function(name)(**arguments)) for arguments in (images, tensors))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.flatten(1, 2), b)


@every_op
def test_an_empty_batch_runs_no_kernel(name, backend, device, monkeypatch):
    launched = []
    if backend == "triton":
        from fastvit.kernels.linear import linear_fwd_kernel

        monkeypatch.setattr(type(linear_fwd_kernel), "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    tensors = made(name, 0, 18, device)
    for got, want in zip(*(results(function(name, module), tensors) for module in (ops, formulas)), strict=True):
        assert torch.equal(got, want)
    assert not launched


def registered_calls(device):
    """The arguments of registered ops, all of which require a gradient."""
    x, image, weight = (
        inputs("normal", *shape, dtype=torch.float32, device=device).requires_grad_()
        for shape in ((24, 24), (2, 3, 8, 8), (24, 3, 4, 4))
    )
    q, v = x.view(1, 12, 2, 24), x[0]
    return {
        "layer_norm_fwd": (x, v, v, 1e-6, None),
        "layer_norm_bwd": (x, x, x[:, :1], x[:, :1], v, None),
        "add_layer_norm_fwd": (x, x, v, v, None, None, 1e-6),
        "linear_fwd": (x, x, v, "gelu", None, None, None),
        "linear_act_fwd": (x, x, v, "gelu"),
        "linear_dact": (x, x, x, "gelu"),
        "act_bwd": (x, x, "gelu"),
        "attention_fwd": (q, q, q, None, 0.2, 0.0),
        "patch_embed_fwd": (image, weight, v, None, None, None),
        "patch_embed_bwd_weight": (x.view(2, 12, 24)[:, :4], image, weight, None),
    }


@pytest.mark.parametrize("name", registered_calls("cpu"))
def test_a_registered_op_minds_neither_autocast_nor_autograd(name, backend, device):
    """It has chosen its dtypes, and its gradient is another op's; an exported program calls it with autograd on."""
    op, arguments = getattr(torch.ops.fastvit, name), registered_calls(device)[name]
    with torch.no_grad():
        want = outputs_of(op(*arguments))
    for autocast in (False, True):
        saved = []
        with (
            torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t),
            torch.autocast(device.type, torch.bfloat16, enabled=autocast),
        ):
            got = outputs_of(op(*arguments))
        assert not saved
        for a, b in zip(want, got, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
