"""torch.export and torch.jit.trace: which ops a program calls, decomposition to ATen, saved programs in another
process. Dynamic shapes of single ops and of our own model: tests/ops, tests/modules."""

import itertools
import subprocess
import sys
import warnings
from collections import Counter

import pytest
import torch
from library_models import hugging_face
from models import randomised
from op_cases import ROWS, function, made, outputs_of
from torch.utils._python_dispatch import TorchDispatchMode

import fastvit
from fastvit.integrations.transformers.layers import register_attention

IMAGE = torch.linspace(-1, 1, 2 * 3 * 32 * 32).sin().view(2, 3, 32, 32)


def targets(program):
    return Counter(n.target.name() for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload))


class Decompositions(TorchDispatchMode):
    """Compares the results of each registered op that is called with those of its decomposition. Of attention only the
    first: the others, for its backward pass, are LSE in one number or in two."""

    def __init__(self, compare):
        super().__init__()
        self.compare, self.compared, self.table = compare, 0, fastvit.export.decompositions()

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        results = op(*arguments, **options or {})
        if op in self.table:
            self.compared += 1
            pairs = zip(outputs_of(self.table[op](*arguments)), outputs_of(results), strict=True)
            for got, want in itertools.islice(pairs, 1 if "attention" in op.name() else None):
                assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
                self.compare(got, want)
        return results


@pytest.mark.parametrize("name", ROWS)
def test_decomposed(name, device):
    """Every op in functions of ATen has the same results, except that dropout draws other numbers."""
    tensors = {key: t.detach() for key, t in made(name, 3, 6, device).items()}
    half = {key: t.bfloat16() if t.dtype is torch.float32 else t for key, t in tensors.items()}
    mixed = {**half, "residual": tensors["residual"]} if name.startswith("linear") and "residual" in tensors else half
    for arguments, tolerance in ((tensors, 1e-5), (half, 2e-2), (mixed, 2e-2)):

        def compare(got, want, tolerance=tolerance):
            if "dropout" not in name:
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)

        with Decompositions(compare) as mode:
            function(name)(**arguments)
        assert mode.compared


def test_dropout_decomposed(device):
    """The decomposition drops as often and scales what is left."""
    dropout, seed = torch.ops.fastvit.dropout.default, torch.tensor([3], device=device)
    torch.manual_seed(0)
    y = fastvit.export.decompositions()[dropout](torch.ones(64, 1024, device=device), seed, 0.25)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float((y == 0).float().mean()) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_of_a_rotation_decomposed(interleaved, device):
    """It is the same op, transposed; the two partners of a pair have sines of their own."""
    x, sin, cos = (torch.randn(shape, device=device) for shape in ((2, 5, 6, 16), (1, 3, 4, 16), (1, 3, 4, 16)))
    rotary = torch.ops.fastvit.rotary.default
    for heads in (3, 6):  # of 6: the others are copied
        arguments = x, sin, cos, heads, interleaved, True
        torch.testing.assert_close(fastvit.export.decompositions()[rotary](*arguments), rotary(*arguments))


def gradients(outputs, inputs):
    return [*outputs, *torch.autograd.grad(sum(out.sin().sum() for out in outputs), inputs)]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of each shape that is checked, which a trace fixes
@pytest.mark.parametrize("name", [name for name in ROWS if "dropout" not in name and "uint8" not in name])
def test_jit_trace(name, device):
    """With gradients on, as TensorBoard traces models: the trace consists of PyTorch's own functions."""
    tensors = made(name, 2, 6, device)

    def op(*values):
        return outputs_of(function(name)(**dict(zip(tensors, values, strict=True))))

    traced = torch.jit.trace(op, tuple(tensors.values()), check_trace=False)
    assert "fastvit::" not in str(traced.graph)
    others = [t.detach().sin().requires_grad_() if t.requires_grad else t for t in tensors.values()]
    learnt = [t for t in others if t.requires_grad]
    for got, want in zip(*(gradients(call(*others), learnt) for call in (traced, op)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# ---- transformers: it makes masks of its own while torch.export traces ----


def tower(name):
    return randomised(hugging_face(name, mlp_ratio=2)).eval()


def exported(model, strict=False, **arguments):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*own forward")
        return torch.export.export(model, (IMAGE,), arguments, strict=strict)


@pytest.mark.parametrize(
    ("name", "attention", "strict"),
    [
        ("CLIPVisionModel", "sdpa", True),
        ("ViTModel", "eager", False),  # transformers makes a mask, which cannot be told from a user's
        ("ViTModel", "fastvit", False),  # which is registered, and runs without `accelerate`
    ],
)
@torch.no_grad()
def test_transformers_models_keep_the_fused_ops(name, attention, strict):
    model, registered = tower(name), attention == "fastvit"
    want = model(IMAGE).last_hidden_state
    register_attention()
    model.set_attn_implementation(attention)
    if not registered:
        fastvit.accelerate(model)
    program = exported(model, strict)
    called = targets(program)
    blocks = {"fastvit::layer_norm_fwd": 4, "fastvit::attention_fwd": 2, "fastvit::linear_fwd": 6}
    assert called >= Counter({"fastvit::attention_fwd": 2} if registered else blocks)
    assert sum(count for name, count in called.items() if "attention" in name) == 2
    torch.testing.assert_close(program.module()(IMAGE).last_hidden_state, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pairs", [False, True])
@torch.no_grad()
def test_a_mask_of_the_user_stays_in_the_program(pairs):
    model, mask = tower("ViTModel"), torch.ones(2, 17, dtype=torch.long)
    mask[0, 9:] = 0
    if pairs:
        mask = mask.bool()[:, None, None].expand(2, 1, 17, 17)
    other = mask.flip(0)  # the program reads the mask that it gets
    want = [model(IMAGE, attention_mask=m).last_hidden_state for m in (mask, other)]
    fastvit.accelerate(model)
    program = exported(model, strict=pairs, attention_mask=mask)
    assert targets(program)["fastvit::attention_fwd"] == 2
    for m, expected in zip((mask, other), want, strict=True):
        got = program.module()(IMAGE, attention_mask=m).last_hidden_state
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(want[0], want[1], atol=1e-3)


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
    plain = program.run_decompositions(fastvit.export.decompositions())
    assert not any(name.startswith("fastvit::") for name in targets(plain))
    torch.export.save(plain, paths[1])
    torch.save(IMAGE, paths[2])
    child = subprocess.run([sys.executable, "-c", CHILD, *map(str, paths)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("fails:")
    assert "torch.ops.fastvit.patch_embed_fwd" in child.stdout + child.stderr
    plain, loaded = torch.load(paths[3])
    torch.testing.assert_close(loaded, model(IMAGE), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain, model(IMAGE), rtol=1e-4, atol=1e-5)
