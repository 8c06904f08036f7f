"""torch.export and torch.jit.trace: which ops a program calls, decomposition to ATen, saved programs in another
process. Dynamic shapes of single ops and of our own model: tests/ops, tests/modules."""

import subprocess
import sys
import warnings
from collections import Counter

import pytest
import torch
from library_models import hugging_face
from models import randomised
from op_cases import ROWS, function, made, outputs_of
from torch import nn

import fastvit
from fastvit import ops
from fastvit.integrations.transformers.layers import register_attention

IMAGE = torch.linspace(-1, 1, 2 * 3 * 32 * 32).sin().view(2, 3, 32, 32)


def targets(program):
    return Counter(n.target.name() for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload))


def fused(program):
    return {name: count for name, count in targets(program).items() if name.startswith("fastvit::")}


class Op(nn.Module):
    """A public op by name, as a module of its tensors."""

    def __init__(self, name):
        super().__init__()
        self.function = function(name)

    def forward(self, **tensors):
        return outputs_of(self.function(**tensors))


@pytest.mark.parametrize("name", ROWS)
def test_decomposed(name, device):
    """Every public op becomes ATen ops with the same results, except that dropout draws other numbers."""
    tensors = {key: t.detach() for key, t in made(name, 3, 6, device).items()}
    program = torch.export.export(Op(name), (), tensors)
    assert fused(program)
    plain = program.run_decompositions(fastvit.export.decompositions())
    assert not fused(plain)
    for got, want in zip(plain.module()(**tensors), Op(name)(**tensors), strict=True):
        assert (got.shape, got.dtype, got.is_contiguous()) == (want.shape, want.dtype, True)
        if "dropout" not in name:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_jit_trace_of_three_layers(device):
    """Separate layers for q, k and v, as in models of transformers."""
    tensors = made("layer_norm_attention", 2, 6, device)

    def op(x, norm_weight, norm_bias, proj_weight, *layers):
        return ops.layer_norm_attention(x, norm_weight, norm_bias, layers[:3], layers[3:], proj_weight, None, 2)

    split = [t.detach().clone().requires_grad_() for name in ("qkv_weight", "qkv_bias") for t in tensors[name].chunk(3)]
    arguments = [tensors[name] for name in ("x", "norm_weight", "norm_bias", "proj_weight")] + split
    traced = torch.jit.trace(op, tuple(arguments))
    for got, want in zip(*(gradients([call(*arguments)], arguments) for call in (traced, op)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def gradients(outputs, inputs):
    return [*outputs, *torch.autograd.grad(sum(out.sin().sum() for out in outputs), inputs)]


@pytest.mark.parametrize("name", [name for name in ROWS if "dropout" not in name and "uint8" not in name])
def test_jit_trace(name, device):
    """With gradients on, as TensorBoard traces models: the trace consists of PyTorch's own functions."""
    tensors = made(name, 2, 6, device)

    def op(*values):
        return outputs_of(function(name)(**dict(zip(tensors, values, strict=True))))

    traced = torch.jit.trace(op, tuple(tensors.values()))
    assert "fastvit::" not in str(traced.graph)
    others = [t.detach().sin().requires_grad_() if t.requires_grad else t for t in tensors.values()]
    learnt = [t for t in others if t.requires_grad]
    for got, want in zip(*(gradients(call(*others), learnt) for call in (traced, op)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"])
def test_activations_and_dtypes_decomposed(activation, device):
    """A bfloat16 branch with a float32 residual: dtypes of results and statistics are those of the ops."""
    linear, norm = (getattr(torch.ops.fastvit, n).default for n in ("linear_fwd", "layer_norm_fwd"))
    x, weight = (
        made("linear residual", 3, 6, device)["x"].detach(),
        torch.linspace(-0.2, 0.2, 256, device=device).view(16, 16),
    )
    half, scale = x.bfloat16(), torch.tensor([0.0, 1.25, 2.5], device=device)
    arguments = half, weight.bfloat16(), weight[0].bfloat16(), activation, None, scale.bfloat16(), x
    got, want = fastvit.export.decompositions()[linear](*arguments), linear(*arguments)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert got.dtype is torch.float32
    add = torch.ops.fastvit.add_layer_norm_fwd.default
    arguments = half, half, weight[0].bfloat16(), weight[1].bfloat16(), weight[2], None, 1e-6  # a wider layer_scale
    for a, b in zip(fastvit.export.decompositions()[add](*arguments), add(*arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    for arguments in (half, weight[0], weight[1], 1e-6, None), (x, weight[0], weight[1], 1e-6, torch.bfloat16):
        got, want = fastvit.export.decompositions()[norm](*arguments), norm(*arguments)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_dropout_decomposed(device):
    """The decomposition drops as often and scales what is left."""
    dropout, seed = torch.ops.fastvit.dropout.default, torch.tensor([3], device=device)
    torch.manual_seed(0)
    y = fastvit.export.decompositions()[dropout](torch.ones(64, 1024, device=device), seed, 0.25)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float((y == 0).float().mean()) == pytest.approx(0.25, abs=0.01)


def test_varlen_decomposed(device):
    """LSE is stored sequence by sequence here, too."""
    op = torch.ops.fastvit.attention_varlen_fwd.default
    decomposed = fastvit.export.decompositions()[op]
    ends, ends_k = (torch.tensor(ends, device=device) for ends in ([0, 5, 5, 6, 19], [0, 2, 9, 10, 11]))
    for tokens, of_keys in ((19, None), (11, ends_k)):
        q, k, v = (torch.randn(n, heads, 16, device=device) for n, heads in ((19, 4), (tokens, 2), (tokens, 2)))
        arguments = q, k, v, ends, of_keys, None, 13, 13, 0.3, 0.0
        for got, want in zip(decomposed(*arguments), op(*arguments), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---- transformers: it makes masks of its own while torch.export traces ----

VISION = ("ViTModel", "DeiTModel", "Dinov2Model", "Dinov2WithRegistersModel", "CLIPVisionModel", "SiglipVisionModel")
TWO_BLOCKS = Counter({"fastvit::layer_norm_fwd": 4, "fastvit::attention_qkvpacked_fwd": 2, "fastvit::linear_fwd": 6})


def tower(name):
    return randomised(hugging_face(name, mlp_ratio=2)).eval()


@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in VISION), ("ViTModel", True)])
@torch.no_grad()
def test_transformers_models_keep_the_fused_ops(name, strict):
    model = tower(name)
    want = model(IMAGE).last_hidden_state
    fastvit.accelerate(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*own forward")
        program = torch.export.export(model, (IMAGE,), strict=strict)
    found = targets(program)
    assert found >= TWO_BLOCKS
    assert found["fastvit::attention_qkvpacked_fwd"] == 2
    assert not found["aten::scaled_dot_product_attention"]
    torch.testing.assert_close(program.module()(IMAGE).last_hidden_state, want, rtol=1e-4, atol=1e-5)


def masks():
    """Return masks that a user may pass, over tokens and over pairs of tokens. All allow the first nine keys."""
    tokens = torch.ones(2, 17, dtype=torch.long)
    tokens[0, 9:] = 0
    pairs = tokens.bool()[:, None, None].expand(2, 1, 17, 17)
    added = torch.zeros(2, 1, 17, 17).masked_fill(~pairs, -torch.inf)
    return {"tokens": tokens, "every token": torch.ones_like(tokens), "expanded over queries": pairs, "added": added}


@pytest.mark.parametrize(("kind", "strict"), [*((kind, False) for kind in masks()), ("expanded over queries", True)])
@torch.no_grad()
def test_a_mask_of_the_user_stays_in_the_program(kind, strict):
    model, mask = tower("ViTModel"), masks()[kind]
    other = masks()["tokens" if mask.dim() == 2 else kind].flip(0)  # the program reads the mask that it gets
    want = [model(IMAGE, attention_mask=m).last_hidden_state for m in (mask, other)]
    fastvit.accelerate(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*own forward")
        program = torch.export.export(model, (IMAGE,), {"attention_mask": mask}, strict=strict)
    assert targets(program)["fastvit::attention_qkvpacked_fwd"] == 2
    for m, expected in zip((mask, other), want, strict=True):
        got = program.module()(IMAGE, attention_mask=m).last_hidden_state
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(want[0], want[1], atol=1e-3)


@torch.no_grad()
def test_eager_attention_keeps_the_mask_that_transformers_makes():
    """With eager attention, a mask that transformers made cannot be told from a user's."""
    model = tower("ViTModel")
    want = model(IMAGE).last_hidden_state
    model.set_attn_implementation("eager")
    fastvit.accelerate(model)
    program = torch.export.export(model, (IMAGE,))
    assert targets(program)["fastvit::attention_qkvpacked_fwd"] == 2
    torch.testing.assert_close(program.module()(IMAGE).last_hidden_state, want, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_attention_implementation_is_exported():
    model = tower("ViTModel")
    want = model(IMAGE).last_hidden_state
    register_attention()
    model.set_attn_implementation("fastvit")
    program = torch.export.export(model, (IMAGE,))
    assert fused(program) == {"fastvit::attention_fwd": 2}
    torch.testing.assert_close(program.module()(IMAGE).last_hidden_state, want, rtol=1e-4, atol=1e-5)


# ---- saved programs ----

CHILD = """
import sys, torch

fused, plain, image, out = sys.argv[1:]
image = torch.load(image)
plain = torch.export.load(plain).module()(image)
try:
    torch.export.load(fused)
except Exception as error:
    print("fails:", error)
assert "fastvit" not in sys.modules
import fastvit.ops
torch.save((plain, torch.export.load(fused).module()(image)), out)
"""


def test_saved_programs_in_another_process(tmp_path):
    """A program of fused ops needs `import fastvit.ops` before torch.export.load, which otherwise fails with the op's
    name. A decomposed program needs torch only."""
    model = randomised(fastvit.VisionTransformer(32, 8, embed_dim=48, depth=1, num_heads=3, num_classes=5)).eval()
    program = torch.export.export(model, (IMAGE,))
    paths = [tmp_path / name for name in ("fused.pt2", "plain.pt2", "image.pt", "out.pt")]
    torch.export.save(program, paths[0])
    torch.export.save(program.run_decompositions(fastvit.export.decompositions()), paths[1])
    torch.save(IMAGE, paths[2])
    child = subprocess.run([sys.executable, "-c", CHILD, *map(str, paths)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("fails:")
    assert "torch.ops.fastvit.patch_embed_fwd" in child.stdout + child.stderr
    plain, loaded = torch.load(paths[3])
    torch.testing.assert_close(loaded, model(IMAGE), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain, model(IMAGE), rtol=1e-4, atol=1e-5)
