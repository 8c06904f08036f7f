"""The modules against the reference: values, gradients, memory saved for backward, dropout."""

import copy
import functools
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import (
    B,
    Calls,
    D,
    N,
    assert_module_as_accurate,
    assert_same_step,
    assert_steps_as_accurate,
    blocks,
    randomised,
    step,
    tokens,
    twins,
)
from oracle import inputs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit import layers, reference
from fastvit.blocks import read_timm
from fastvit.blocks import run as run_blocks
from fastvit.eva import Eva
from fastvit.modules.parts import ACT_LAYERS
from fastvit.reference.eva import Eva as ReferenceEva
from fastvit.study.memory.peak import saved_bytes

BLOCKS = {
    "plain": {},
    "layer_scale_drop_path": {"init_values": 0.1, "drop_path": 0.5},
    "no_biases": {"qkv_bias": False, "proj_bias": False},
    "quick_gelu_drop_path": {"act_layer": "quick_gelu", "drop_path": 0.5},
    "torchs_layer_norm": {"norm_layer": nn.LayerNorm},
    "layer_norm_without_bias": {"norm_layer": functools.partial(nn.LayerNorm, bias=False)},
    "qk_norm": {"qk_norm": True, "norm_layer": nn.RMSNorm, "drop_path": 0.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", BLOCKS)
def test_block_is_as_accurate_as_the_reference(case: str, dtype: torch.dtype, device: torch.device) -> None:
    ours, theirs = blocks(**BLOCKS[case])
    assert_module_as_accurate(ours.to(device), theirs.to(device), *tokens(4, N, D, device=device), dtype)


@pytest.mark.parametrize("case", ["layer_scale_drop_path", "qk_norm"])
def test_block_of_kernels(case: str, triton_backend: None, device: torch.device) -> None:
    ours, theirs = blocks(**BLOCKS[case])
    x, dy = tokens(2, N, D, device=device)
    assert_module_as_accurate(ours.to(device), theirs.to(device), x, dy, torch.bfloat16)


@pytest.mark.parametrize("act", ["gelu_tanh", "relu", "silu", nn.ELU])
def test_every_activation(act: str | type[nn.Module], device: torch.device) -> None:
    """nn.ELU: one that the ops do not know, run as its own module."""
    ours, theirs = blocks(act_layer=act)
    assert_module_as_accurate(ours.to(device), theirs.to(device), *tokens(device=device))


def test_activations_as_modules() -> None:
    """Which run where a hook or another layer leaves an MLP to its modules."""
    x = torch.randn(64)
    for name, kind in ACT_LAYERS.items():
        torch.testing.assert_close(kind()(x), reference.ACTIVATIONS[name]()(x))


@pytest.mark.parametrize("n", [5, 17])
def test_block_under_autocast(n: int, device: torch.device) -> None:
    """With sharp attention: scores that the op itself rounded to bfloat16 once more would show."""
    ours, theirs = blocks(init_values=0.5)
    with torch.no_grad():
        ours.attn.qkv.weight.mul_(4)
    theirs.load_state_dict(ours.state_dict())
    x, dy = tokens(16, n, D, device=device)
    exact = step(copy.deepcopy(theirs).double().to(device), x, dy)
    results = []
    for module in (theirs, ours):
        module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
        results.append(step(module.to(device), x.float(), dy.float()))
    assert_steps_as_accurate(results[1], results[0], exact)


def test_block_without_autograd_is_the_same(device: torch.device) -> None:
    block, _ = blocks(init_values=0.1)
    block.to(device)
    x = inputs("normal", B, N, D, dtype=torch.float32, device=device)
    expected = block(x).detach()
    with torch.inference_mode():
        torch.testing.assert_close(block(x), expected, rtol=1e-6, atol=1e-6)
    assert block(x[:0]).shape == (0, N, D)


# ---- cost ----


@pytest.mark.parametrize(("case", "limit"), [("plain", 34), ("layer_scale_drop_path", 38)])
def test_python_functions_around_the_ops(case: str, limit: int) -> None:
    """Entered by a training forward in modules and in what reads and runs them; the frames above a call of an op."""
    block, _ = blocks(**BLOCKS[case])
    x, _ = tokens(dtype=torch.float32)
    package = fastvit.__file__.removesuffix("__init__.py")
    files = tuple(f"{package}{folder}/" for folder in ("modules", "blocks"))
    entered, above_ops = [], set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(package):
            return
        callers, caller = [], frame.f_back
        while caller is not None and caller.f_code.co_filename.startswith(package):
            callers.append(caller.f_code)
            caller = caller.f_back
        if frame.f_code.co_filename.startswith(files):
            entered.append(frame.f_code.co_name)
        elif callers[0].co_filename == run_blocks.__file__:
            above_ops.add(tuple(code.co_name for code in callers))

    block(x)
    sys.setprofile(note)
    block(x)
    sys.setprofile(None)
    assert len(entered) <= limit, entered
    assert above_ops == {("run_attention_half", "forward"), ("run_mlp_half", "forward")}


@pytest.mark.parametrize("case", ["plain", "layer_scale_drop_path"])
def test_at_most_ten_token_tensors_are_saved(case: str, backend: str, device: torch.device) -> None:
    """In bfloat16, where a float32 copy of any of them would show."""
    dim, heads = 128, 2
    arguments = BLOCKS[case]
    make: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(2, 16, dim, **make, requires_grad=True)
    ours, eager = (kind.Block(dim, heads, qkv_bias=True, **make, **arguments) for kind in (layers, reference))
    saved, by_eager = (saved_bytes(lambda m=m: m(x), list(m.parameters())) for m in (ours, eager))
    statistics = 2 * 16 * 4 * (2 * 2 + heads)  # mean and rstd of two norms, LSE of each head, in float32
    assert saved <= 10 * x.nbytes + 2 * statistics
    assert by_eager > 14 * x.nbytes


def test_an_accelerated_parallel_block_saves_nine_token_tensors() -> None:
    """x, q, k, v and the output of attention, and four of fc1's; one norm's statistics, twice, and the LSE."""
    dim, heads = 128, 2
    block = import_timm().models.vision_transformer.ParallelScalingBlock(dim, heads, init_values=0.1, drop_path=0.5)
    fastvit.accelerate(block, strict=True)
    x = torch.randn(2, 16, dim, requires_grad=True)
    saved = saved_bytes(lambda: block(x), list(block.parameters()))
    assert saved <= 9 * x.nbytes + 2 * (2 * 16 * 4 * (2 * 2 + heads))


@pytest.mark.parametrize(
    ("options", "sums"),
    [
        ({}, 1),  # of the gradient of qkv
        ({"drop_path": 0.5}, 1),
        ({"init_values": 0.1}, 3),  # and of LayerScale's two: a product of matrices each, with the bias apart
        ({"proj_drop": 0.5}, 3),  # the gradient before the dropout is not the residual's
    ],
    ids=str,
)
def test_no_pass_of_its_own_for_a_bias_before_the_residual(
    options: dict[str, Any], sums: int, device: torch.device
) -> None:
    """The norm's backward pass reads the residual's gradient too, and has its sum over rows."""
    block = layers.Block(32, 2, qkv_bias=True, **options).to(device)
    out = block(torch.randn(2, 5, 32, device=device, requires_grad=True))
    gradient = torch.randn_like(out)
    with Calls() as calls:
        out.backward(gradient)
    assert calls.names.count("aten::sum") == sums


# ---- dropout and stochastic depth ----


def test_drop_path_statistics() -> None:
    drop = layers.DropPath(0.25)
    x = torch.ones(4000, 3, 2)
    y = drop(x)
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (y.flatten(1).amin(1) == y.flatten(1).amax(1)).all()  # whole samples
    assert abs((y[:, 0, 0] == 0).float().mean().item() - 0.25) < 0.03
    assert set(layers.DropPath(0.25, scale_by_keep=False)(x).unique().tolist()) == {0.0, 1.0}
    assert not layers.DropPath(1.0)(x).any()
    assert drop.eval()(x) is x


def branch(block: nn.Module, after: str, x: Tensor) -> Tensor:
    """Return what the attention or the MLP adds to x."""
    if after == "proj":
        return run_blocks.run_attention_half(x, read_timm.read_attention_half(block)).detach() - x
    return run_blocks.run_mlp_half(x, read_timm.read_mlp_half(block)).detach() - x


@pytest.mark.parametrize("after", ["proj", "act and fc2", "fc2"])
def test_projection_dropout_in_training(after: str, device: torch.device) -> None:
    """Outputs of the branch are either dropped or divided by 1 - p; reproducible under a seed; off in eval."""
    block, _ = blocks(proj_drop=0.5)
    block.to(device)
    if after == "fc2":
        block.mlp.drop1.p = 0.0
    x, _ = tokens(dtype=torch.float32, device=device)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return branch(block, after, x)

    dropped = run(0) == 0
    assert abs(dropped.float().mean().item() - 0.5) < 0.05
    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    block.eval()
    full = run(0)
    assert not (full == 0).any()
    assert torch.equal(full, run(1))
    if after != "act and fc2":
        block.train()
        torch.testing.assert_close(run(0)[~dropped], 2 * full[~dropped], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("after", ["proj", "fc2"])
def test_a_branch_is_scaled_after_its_dropout(after: str, device: torch.device) -> None:
    """By LayerScale and by stochastic depth: an element that neither of the two drops is divided by both rates."""
    block, _ = blocks(proj_drop=0.5, init_values=0.1, drop_path=0.25)
    block.to(device).mlp.drop1.p = 0.0
    x = inputs("normal", 32, N, D, dtype=torch.float32, device=device)
    got = branch(block, after, x)
    full = branch(block.eval(), after, x)
    dropped = got == 0
    assert 0 < dropped.flatten(1).all(1).sum() < 32
    torch.testing.assert_close(got[~dropped], full[~dropped] / (0.5 * 0.75), rtol=1e-4, atol=1e-5)


def test_dropout_rates_that_differ_run_one_by_one() -> None:
    block, theirs = blocks(proj_drop=0.5)
    block.mlp.drop1.p = theirs.mlp.drop1.p = 0.25
    block.attn.proj_drop.p = theirs.attn.proj_drop.p = 0.0
    assert_same_step(block, theirs, torch.randn(B, N, D))


def test_checkpointing_repeats_the_dropout(device: torch.device) -> None:
    block, _ = blocks(proj_drop=0.3, attn_drop=0.3, drop_path=0.3)
    block.to(device)
    x, dy = tokens(dtype=torch.float32, device=device)
    plain = step(block, x, dy)

    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for name, got in step(block, x, dy).items():
        assert torch.equal(got, plain[name]), name


# ---- the other modules ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_patch_embed_and_norms(dtype: torch.dtype, device: torch.device) -> None:
    image = inputs("normal", 2, 3, 8, 12, dtype=torch.float64, device=device)
    dy = inputs("normal", 2, 6, 32, dtype=torch.float64, device=device, seed=1)
    ours, theirs = twins(layers.PatchEmbed((8, 12), 4, 3, 32), reference.PatchEmbed((8, 12), 4, 3, 32))
    assert_module_as_accurate(ours.to(device), theirs.to(device), image, dy, dtype)
    for norm, eager in (
        twins(layers.LayerNorm(32), nn.LayerNorm(32, eps=1e-6)),
        twins(layers.RmsNorm(32, eps=1e-2), reference.RMSNorm(32, eps=1e-2)),
    ):
        assert_module_as_accurate(norm.to(device), eager.to(device), dy * 3, dy.flip(0), dtype)


def test_patch_embed_honours_hooks() -> None:
    embed = layers.PatchEmbed(8, 4, 3, 32)
    x, pos, prefix = torch.randn(2, 3, 8, 8), torch.randn(4, 32), torch.randn(2, 32)
    plain = embed(x, pos, prefix)
    embed.proj.register_forward_hook(lambda _, __, output: output * 2)
    doubled = embed(x, pos, prefix)
    torch.testing.assert_close(doubled[:, :2], plain[:, :2])
    torch.testing.assert_close(doubled[:, 2:], 2 * (plain[:, 2:] - pos) + pos, rtol=1e-4, atol=1e-5)


MODELS = {
    "vit": (fastvit.VisionTransformer, reference.VisionTransformer, {"init_values": 0.3}),
    "eva": (Eva, ReferenceEva, {"use_rot_pos_emb": True, "init_values": 0.3}),
    "eva_swiglu": (Eva, ReferenceEva, {"swiglu_mlp": True, "scale_mlp": True}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_hooks_may_edit_outputs_in_place(kind: str, device: torch.device) -> None:
    """In training, of a model, of a block and of what is in it."""
    own, eager, options = MODELS[kind]
    arguments = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
    ours, theirs = (model.to(device) for model in twins(*(model(**arguments, **options) for model in (own, eager))))
    image = inputs("normal", 2, 3, 8, 8, dtype=torch.float32, device=device)
    for name in ("", "patch_embed", "blocks.0", "blocks.0.norm1", "blocks.0.attn", "blocks.0.mlp", "blocks.0.mlp.fc2"):
        hooks = [
            model.get_submodule(name).register_forward_hook(lambda _, __, output: output.mul_(1.5).add_(1.0))
            for model in (ours, theirs)
        ]
        assert_same_step(ours, theirs, image)
        for hook in hooks:
            hook.remove()


def test_uint8_images_where_the_convolution_runs_by_itself() -> None:
    for statistics in ({}, {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}):
        embed = layers.PatchEmbed(8, 4, 3, 32, **statistics)
        x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
        plain = embed(x)
        seen = []
        embed.proj.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output))
        torch.testing.assert_close(embed(x), plain, rtol=1e-4, atol=1e-5)
        assert len(seen) == 1


def test_a_convolution_of_another_kind_runs_by_itself() -> None:
    """Overlapping patches: the op would take its weight for one whose stride is its kernel."""
    embed = layers.PatchEmbed(8, 4, 3, 32)
    embed.proj = nn.Conv2d(3, 32, 4, stride=2)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(embed(x), embed.proj(x).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("norm_layer", [layers.LayerNorm, layers.RmsNorm])
def test_a_hook_on_a_norm_of_q_and_k(norm_layer: type[nn.Module], device: torch.device) -> None:
    """Then attention calls its modules one by one, to the same effect."""
    attention = randomised(layers.Attention(64, 2, qk_norm=True, norm_layer=norm_layer, device=device))
    x, seen = torch.randn(2, 7, 64, device=device), []
    want = attention(x)
    attention.q_norm.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(attention(x), want, rtol=1e-5, atol=1e-6)
    assert seen
    attention.attn_drop.register_forward_hook(lambda *_: None)  # probabilities are materialised, too
    torch.testing.assert_close(attention(x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_blocks_compiled_under_autocast(frozen: bool, device: torch.device) -> None:
    """Dynamo, which traces a backward pass right after its forward pass, once left autocast off for the next block."""
    torch._dynamo.reset()
    blocks = nn.Sequential(*(fastvit.Block(32, 2, qkv_bias=True) for _ in range(2))).to(device)
    blocks[0].requires_grad_(not frozen)
    x = torch.randn(2, 5, 32, device=device, requires_grad=True)

    def step(model: nn.Module) -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            out = model(x)
        wanted = [x, *(p for p in blocks.parameters() if p.requires_grad)]
        return [out, *torch.autograd.grad(out.sum(), wanted)]

    torch.testing.assert_close(step(torch.compile(blocks, backend="aot_eager", fullgraph=True)), step(blocks))
