"""Where numbers lie in memory, and how many there are of a dimension, changes no result."""

import itertools

import pytest
import torch
from layouts import ALIGNED, UNALIGNED, odd_ones
from op_cases import ROWS, function, made, on_both, outputs_and_gradients, outputs_of, wanted
from oracle import inputs

from fastvit.study.accuracy.cases import X

# of a gradient: one number for all elements, as a sum has
ONE_NUMBER = {"one number": lambda t: torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)}
LAID_OUT = [name for name in ROWS if "recompute" not in name and "attention dropout" not in name]
HEADS = ["attention", "attention mask", "attention relative", "attention_varlen cross", "attention_windows"]
HEADS += ["attention_windows relative", "rotary halves", "qk_norm"]
TOKENS = ["layer_norm", "add_layer_norm", "linear residual", "layer_norm_linear", "layer_norm_mlp gated", "dropout"]
TOKENS += ["mlp swiglu", "layer_norm_attention rotary", "patch_embed", "patch_embed video"]
# and every other op with kernels of its own
SEEN = {"attention_qkvpacked", "rotary_qkvpacked", "rms_norm"} | {ROWS[name].op for name in HEADS + TOKENS}
TOKENS += [name for name, row in ROWS.items() if row.op not in SEEN]
# in the interpreter: of rows that read heads by stride also layouts that keep 16 bytes together
INTERPRETED = [(name, "unaligned") for name in HEADS + TOKENS]
INTERPRETED += [(name, "aligned") for name in HEADS if "windows" not in name]


def laid_out(name, turn, layouts, tensors):
    """Give neighbours among the tensors, and the outputs' gradients, different layouts."""
    choices, gradients = list(layouts.values()), list((layouts | ONE_NUMBER).values())
    arranged = {}
    for i, (key, t) in enumerate(tensors.items(), turn):
        arranged[key] = choices[i % len(choices)](t.detach()).requires_grad_(t.requires_grad)
    return arranged, lambda t: gradients[turn % len(gradients)](t)


def assert_layout_does_not_matter(name, tensors, arrange, bitwise):
    """Check that results are those of contiguous tensors. Sums of ATen's matmuls may round differently, and so may a
    GPU's kernels, which move other layouts in other tiles. arrange: of the gradients of the outputs."""
    runs = []
    for contiguous in (True, False):
        leaves = {
            key: (t.contiguous() if contiguous else t).detach().requires_grad_(t.requires_grad)
            for key, t in tensors.items()
        }
        torch.manual_seed(4)
        outputs = outputs_of(function(name)(**leaves))
        assert all(o.is_contiguous() for o in outputs)
        douts = [arrange(inputs("normal", *o.shape, dtype=o.dtype, device=o.device, seed=50)) for o in outputs]
        douts = [dout.contiguous() if contiguous else dout for dout in douts]
        runs.append((*outputs, *torch.autograd.grad(outputs, list(wanted(leaves).values()), douts)))
    for plain, strided in zip(*runs, strict=True):
        assert not bitwise or plain.is_cuda or torch.equal(strided, plain)
        atol = 1e-5 if name.startswith("attention") else 1e-6 * max(2.0, float(plain.detach().abs().max()))
        torch.testing.assert_close(strided, plain, atol=atol, rtol=1e-5)  # a small sum rounds as its large terms do


@on_both("case", [(name, "all") for name in LAID_OUT], INTERPRETED)
def test_layouts(case, backend, device):
    """Every tensor of a call has another layout at once; on ATen in every turn."""
    name, kinds = case
    few = backend == "triton" and "windows" in name  # which are many programs
    tensors = made(name, 1 if few else 2, 6, device, H=1 if few else 2)
    layouts = {"all": ALIGNED | UNALIGNED, "aligned": ALIGNED, "unaligned": UNALIGNED}[kinds]
    bitwise = not any(part in name for part in ("linear", "mlp", "attention", "patch_embed"))
    bitwise |= backend == "triton" and name.startswith(("attention", "patch_embed"))
    for turn in range(len(layouts)) if backend == "aten" else [[*ROWS].index(name)]:
        assert_layout_does_not_matter(name, *laid_out(name, turn, layouts, tensors), bitwise)


@pytest.mark.filterwarnings("ignore:fastvit.ops.attention reads dimension 1")  # of one token and two heads
@on_both("name", ROWS, ["layer_norm", "attention mask", "patch_embed"])
def test_strides_of_dimensions_of_one(name, backend, device):
    """One sample and one token: contiguous to PyTorch, whatever the strides of these dimensions say."""
    several = any(dimension in str(ROWS[name].tensors) for dimension in ("'T'", "'P'", "'2P'"))
    plain, runs = made(name, 1, 2 if several else 1, device), []
    for arrange in (torch.clone, odd_ones):
        tensors = {key: arrange(t.detach()).requires_grad_(t.requires_grad) for key, t in plain.items()}
        runs.append(outputs_and_gradients(function(name), tensors))
    (outputs, gradients), (others, other_gradients) = runs
    assert all(map(torch.equal, outputs, others))
    for key, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[key]), key


OF_SAMPLES = [name for name, row in ROWS.items() if row.tensors.get("x", ()) == X["x"] and "attention" not in name]
OF_SAMPLES += ["add_layer_norm"]


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_any_number_of_dimensions(name, backend, device):
    """A sample (h, w, D) is one of h * w tokens, with one row_scale. Without row_scale, tokens need no batch. An op of
    x alone takes a single number, too."""
    tensors = made(name, 3, 6, device)
    of_tokens = [key for key in tensors if ROWS[name].tensors[key] == X["x"]]

    def check(shape, tensors):
        changed = tensors | {key: tensors[key].detach().reshape(shape).requires_grad_() for key in of_tokens}
        outputs, gradients = outputs_and_gradients(function(name), changed)
        wanted_outputs, wanted_gradients = outputs_and_gradients(function(name), tensors)
        for got, want in zip(outputs, wanted_outputs, strict=True):
            assert got.shape[:-1] == shape[:-1]
            assert torch.equal(got.reshape(want.shape), want)
        for key, want in wanted_gradients.items():
            torch.testing.assert_close(gradients[key].reshape(want.shape), want)

    check((3, 2, 3, 16), tensors)
    if "row_scale" in tensors:
        tensors["row_scale"] = None
    check((3 * 6, 16), tensors)
    one = {key: tensors[key].detach()[:1, :1].requires_grad_() for key in of_tokens}
    check((16,), tensors | one)
    if [*tensors] == ["x"]:
        check((), {"x": tensors["x"].detach()[:1, :1, :1].requires_grad_()})


def empty_inputs(name):
    """Return the row's dimensions that may be 0. A table of rotary positions fixes the others'."""
    refused = {("attention cross", "T"), ("attention cross", "H"), ("attention_varlen cross", "H")}
    tensors = ROWS[name].tensors
    dimensions = ("B",) if "sin" in str(tensors.keys()) else ("B", "BN", "N", "T", "H")
    named = set(itertools.chain(*tensors.values()))
    return [empty for empty in dimensions if empty in named and (name, empty) not in refused]


@pytest.mark.parametrize("name", ROWS)
def test_an_empty_input_runs_no_kernel(name, backend, device, monkeypatch):
    """Its results are empty or zero. Kernels do run for queries without keys (T)."""
    with torch.no_grad():
        one_sample = outputs_of(function(name)(**made(name, 1, 18, device))) if backend == "aten" else ()
    launched = []
    if backend == "triton":
        from fastvit.kernels.linear import linear_fwd_kernel

        monkeypatch.setattr(type(linear_fwd_kernel), "run", lambda kernel, *_, **__: launched.append(kernel.__name__))
    for empty in empty_inputs(name):
        if backend == "triton" and empty == "T":
            continue
        tensors = made(name, 1, 18, device, empty=empty)
        outputs, gradients = outputs_and_gradients(function(name), tensors)
        if empty == "B" and one_sample:
            assert [o.shape for o in outputs] == [(0, *o.shape[1:]) for o in one_sample]
        for key, gradient in gradients.items():
            assert torch.equal(gradient, torch.zeros_like(tensors[key])), (empty, key)
        assert not launched, empty
