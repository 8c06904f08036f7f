"""Promises of every op, on both backends. Values, layouts and errors are in each op's own file, registered ops in
test_registered_ops.py."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from op_cases import (
    FORMULAS,
    ROWS,
    assert_freezing_changes_no_other_gradient,
    assert_layout_does_not_matter,
    function,
    made,
    not_interpreted,
    outputs_and_gradients,
    outputs_of,
    results,
    wanted,
)
from oracle import GRADIENT, assert_as_accurate, inputs
from torch.utils.checkpoint import checkpoint

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import registry
from fastvit.study.accuracy import formulas

every_op = pytest.mark.parametrize("name", ROWS)
OF_ROWS = [
    "layer_norm",
    "linear residual",
    "linear gelu",
    "layer_norm_linear",
    "mlp gelu",
    "layer_norm_mlp gelu",
    "mlp swiglu",
    "layer_norm_mlp gated",
]
of_rows = pytest.mark.parametrize("name", OF_ROWS)
with_formula = pytest.mark.parametrize("name", FORMULAS)


@not_interpreted
@every_op
def test_deterministic(name, backend, device):
    """Over several tiles, partial sums and splits. The interpreter runs programs in order."""
    tensors = made(name, 2, 146, device, torch.bfloat16)
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


TOKEN_LAYOUTS = [
    lambda t: torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]],
    lambda t: torch.cat([torch.full_like(t[:, :1], torch.nan), t], 1)[:, 1:],
    lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    lambda t: t[:, :1].expand_as(t),
    lambda t: t[:1].expand_as(t),
]
PARAMETER_LAYOUTS = [
    lambda t: torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0],
    lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    lambda t: t[-1:].expand_as(t),
]


@pytest.mark.parametrize(
    "name",
    [name for name in FORMULAS if not (name.startswith("attention") or name.endswith("lengths"))]
    + ["dropout", "mlp dropout"],
)
def test_layouts(name, backend, device):
    """Neighbours among the arguments have different layouts. On ATen every tensor gets every layout."""
    tensors = made(name, 3, 6, device)
    bitwise = not any(part in name for part in ("linear", "mlp", "attention", "patch_embed"))
    count = len(TOKEN_LAYOUTS)
    for turn in range(count) if backend == "aten" else [[*ROWS].index(name) % count]:
        arranged = {}
        for i, (key, t) in enumerate(tensors.items(), turn):
            layouts = TOKEN_LAYOUTS if t.dim() == 3 and key != "weight" else PARAMETER_LAYOUTS
            arranged[key] = layouts[i % len(layouts)](t) if t.is_floating_point() else t
        assert_layout_does_not_matter(name, arranged, TOKEN_LAYOUTS[turn], bitwise)


@with_formula
def test_every_gradient_alone(name, backend, device):
    tensors = made(name, 2, 6, device)
    leaves = wanted(tensors).keys()
    choices = [leaves - {leaf} for leaf in leaves]
    if backend == "triton" and backends.INTERPRET:  # which is slow
        choices = [choices[0], choices[-1]]
    assert_freezing_changes_no_other_gradient(function(name), tensors, choices)


@every_op
def test_frozen_tensors(name, device):
    """One, two neighbours, the first ones, or the last ones. What is computed and saved then is decided in Python, for
    both backends alike."""
    tensors = made(name, 2, 6, device)
    leaves = list(wanted(tensors))
    choices = [[leaf] for leaf in leaves] + [list(pair) for pair in itertools.pairwise(leaves)]
    choices += [part for i in range(2, len(leaves)) for part in (leaves[:i], leaves[-i:])]
    assert_freezing_changes_no_other_gradient(
        function(name), tensors, [frozen for frozen in choices if len(frozen) < len(leaves)]
    )


@of_rows
def test_strides_of_dimensions_of_one(name, backend, device):
    """One token a sample: contiguous to PyTorch, whatever the stride of the token dimension says."""
    tensors = {k: t.detach() for k, t in made(name, 5, 1, device).items()}
    odd = {k: t.as_strided(t.shape, (16, 7, 1)) if t.dim() == 3 else t for k, t in tensors.items()}
    assert odd["x"].is_contiguous()
    assert torch.equal(function(name)(**odd), function(name)(**tensors))


@with_formula
def test_gradients_of_stride_0(name, backend, device):
    tensors = made(name, 3, 6, device)
    leaves = list(wanted(tensors).values())
    got, want = (
        torch.autograd.grad(sum(o.sum() for o in outputs_of(function(name, module)(**tensors))), leaves)
        for module in (ops, formulas)
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@every_op
def test_compile(name, device):
    """With static shapes at first, and dynamic ones from the second batch size on."""
    torch._dynamo.reset()
    compiled = torch.compile(function(name), backend="aot_eager", fullgraph=True)
    for B in (2, 5):
        tensors = made(name, B, 6, device)
        torch.testing.assert_close(results(compiled, tensors), results(function(name), tensors))


@not_interpreted
@every_op
def test_func_and_checkpoint(name, backend, device):
    tensors = made(name, 2, 18, device)
    leaves = wanted(tensors)

    def loss(*values):
        outputs = function(name)(**tensors | dict(zip(leaves, values, strict=True)))
        return sum(o.square().sum() for o in outputs_of(outputs))

    runs = []
    for gradients in (
        lambda *values: torch.autograd.grad(loss(*values), values),
        lambda *values: torch.autograd.grad(checkpoint(loss, *values, use_reentrant=False), values),
        torch.func.grad(loss, argnums=tuple(range(len(leaves)))),
    ):
        torch.manual_seed(4)
        runs.append(gradients(*leaves.values()))
    want, recomputed, functional = runs
    assert all(torch.equal(a, b) for a, b in zip(recomputed, want, strict=True))
    torch.testing.assert_close(functional, want)


@every_op
def test_gradcheck(name, device):
    tensors = made(name, 2, 20, device, torch.float64)
    leaves = wanted(tensors)

    def run(*values):
        torch.manual_seed(4)
        return function(name)(**tensors | dict(zip(leaves, values, strict=True)))

    with ops.use_backend("aten"):
        assert torch.autograd.gradcheck(run, tuple(leaves.values()), fast_mode=True)


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
@pytest.mark.parametrize("autocast", [False, True])
@every_op
def test_outputs_may_be_edited_in_place(name, autocast, backend, device):
    """Unless the op saves them, which the backward pass then says. Under autocast they are rounded in other places."""
    tensors = made(name, 2, 18 if backend == "aten" else 4, device)  # of PyTorch's attention, both kinds
    with torch.no_grad():
        outputs = outputs_of(function(name)(**tensors))
    for i, output in enumerate(outputs):
        output.mul_(torch.ones((), device=device, requires_grad=True))  # also in another mode than it was made in
        saved = name.startswith("attention") or (name == "add_layer_norm" and i == 0)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            want = run_and_edit(name, tensors, i, torch.clone)
            if saved:
                with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is output 0"):
                    run_and_edit(name, tensors, i)
            else:
                got = run_and_edit(name, tensors, i)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "name", ["add_layer_norm", "attention", "attention_qkvpacked", "attention_varlen", "linear residual"]
)
def test_outputs_edited_in_place_in_a_compiled_graph(name, device):
    """Those that are saved, too, since no version of a tensor is compared there."""
    torch._dynamo.reset()
    tensors = made(name, 2, 18, device)
    leaves = wanted(tensors)

    def loss(*values):
        first, *rest = outputs_of(function(name)(**tensors | dict(zip(leaves, values, strict=True))))
        return sum(o.square().sum() for o in (edited(first), *rest))

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*leaves.values()), list(leaves.values()))
    torch.testing.assert_close(got, run_and_edit(name, tensors, 0, torch.clone))


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


@pytest.mark.parametrize("forward", [False, True], ids=["forward_outside", "forward_inside"])
@every_op
def test_autocast_around_the_backward_pass(name, forward, device):
    """It changes nothing: the gradients are those of the dtypes that the forward pass has chosen."""
    tensors, runs = made(name, 2, 4, device), []
    for backward in (False, True):
        torch.manual_seed(4)
        with torch.autocast(device.type, torch.bfloat16, enabled=forward):
            outputs = outputs_of(function(name)(**tensors))
        douts = [inputs("normal", *o.shape, dtype=o.dtype, device=device, seed=50) for o in outputs]
        with torch.autocast(device.type, torch.bfloat16, enabled=backward):
            runs.append(torch.autograd.grad(outputs, list(wanted(tensors).values()), douts))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@with_formula
def test_autocast_follows_eager(name, x_dtype, backend, device):
    """In the dtypes of outputs and gradients, and about as accurate; also where the first tensor is in bfloat16."""
    tensors = made(name, 2, 6, device)
    (key, x), *_ = tensors.items()
    if x.is_floating_point():
        tensors[key] = x.detach().to(x_dtype).requires_grad_()
    double = {n: t.detach().double() if t.is_floating_point() else t for n, t in tensors.items()}
    for leaf in wanted(tensors):
        double[leaf].requires_grad_()
    runs = []
    for module, given, autocast in ((ops, tensors, True), (formulas, tensors, True), (formulas, double, False)):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            outputs = outputs_of(function(name, module)(**given))
        loss = sum(o.double().square().sum() for o in outputs)
        runs.append((outputs, torch.autograd.grad(loss, list(wanted(given).values()))))
    outputs, gradients = (list(zip(*kind, strict=True)) for kind in zip(*runs, strict=True))
    for triple in outputs:
        assert_as_accurate(*triple, what="autocast")
    squares = []  # of relative errors, fused and eager: one gradient has too few elements for the rule
    for leaf, (*computed, exact) in zip(wanted(tensors), gradients, strict=True):
        assert all(g.dtype == tensors[leaf].dtype for g in computed), leaf
        squares.append([((g.double() - exact).norm() / exact.norm()).square() for g in computed])
    fused, eager = (sum(column).sqrt() for column in zip(*squares, strict=True))
    assert fused <= GRADIENT * eager


@pytest.mark.parametrize("name", [*OF_ROWS, "attention_qkvpacked", "layer_norm_attention"])
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


@with_formula
def test_float64_falls_back_with_one_warning(name, triton_backend, device):
    tensors = {key: t.detach() for key, t in made(name, 2, 18, device, torch.float64).items()}
    with pytest.raises(backends.KernelUnsupported, match="float64"):
        function(name)(**tensors)
    with ops.use_backend("triton", strict=False):
        registry._warned.clear()
        with pytest.warns(UserWarning, match=r"runs on ATen instead of Triton: .*float64"):
            got = function(name)(**tensors)
    torch.testing.assert_close(got, function(name, formulas)(**tensors))


@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if "row_scale" in row.tensors and "attention" not in name]
)
def test_scale_of_a_sample_of_rows_and_columns(name, backend, device):
    """A sample (h, w, D) is one of h * w tokens."""
    tensors = {key: t.detach() for key, t in made(name, 3, 6, device).items()}
    images = {key: t.unflatten(1, (2, 3)) if t.dim() == 3 else t for key, t in tensors.items()}
    runs = []
    for arguments in (images, tensors):
        torch.manual_seed(4)
        runs.append(outputs_of(function(name)(**arguments)))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a.flatten(1, 2), b)


def empty_inputs():
    """Yield each row with each of its dimensions that may be 0. A table of rotary positions fixes the others'."""
    refused = {("attention cross", "T"), ("attention cross", "H"), ("attention_varlen cross", "H")}
    for name, row in ROWS.items():
        dimensions = ("B",) if "sin" in str(row.tensors.keys()) else ("B", "BN", "N", "T", "H")
        named = set(itertools.chain(*row.tensors.values()))
        yield from ((name, empty) for empty in dimensions if empty in named and (name, empty) not in refused)


@pytest.mark.parametrize(("name", "empty"), list(empty_inputs()))
def test_an_empty_input_runs_no_kernel(name, empty, backend, device, monkeypatch):
    """Kernels do run for queries without keys (T)."""
    of_one = outputs_of(function(name)(**made(name, 1, 18, device)))
    launched = []
    if backend == "triton" and empty != "T":
        from fastvit.kernels.linear import linear_fwd_kernel

        monkeypatch.setattr(type(linear_fwd_kernel), "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    tensors = made(name, 1, 18, device, empty=empty)
    outputs, gradients = outputs_and_gradients(function(name), tensors)
    if empty == "B":
        assert [o.shape for o in outputs] == [(0, *o.shape[1:]) for o in of_one]
    for key, gradient in gradients.items():
        assert torch.equal(gradient, torch.zeros_like(tensors[key])), key
    assert not launched


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("qk_norm")])
def test_nested_tensors_are_refused(name, layout, device):
    """PyTorch raises internal errors for the shape of a strided one."""
    tensors = made(name, 2, 6, device)
    first = next(iter(tensors))
    tensors[first] = torch.nested.nested_tensor([*tensors[first].detach()], layout=layout)
    with pytest.raises(TypeError, match="must be a dense tensor, got a nested one"):
        function(name)(**tensors)
