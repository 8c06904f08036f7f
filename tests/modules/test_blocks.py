"""`Block` and `PostNormBlock` against the reference: values and gradients, what is saved, dropout, hooks, sequences."""

import copy
import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import (
    B,
    Calls,
    D,
    H,
    N,
    assert_module_as_accurate,
    assert_same_step,
    assert_steps_as_accurate,
    blocks,
    randomised,
    step,
    tokens,
)
from oracle import inputs
from torch import Tensor, nn

from fastvit import layers, reference
from fastvit.blocks import read_timm
from fastvit.blocks import run as run_blocks
from fastvit.modules.parts import DropPath
from fastvit.study.memory.peak import saved_bytes

PLAIN, POST = "Block", "PostNormBlock"
NO_AFFINE = functools.partial(nn.LayerNorm, elementwise_affine=False)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "layer_scale_drop_path": (PLAIN, {"init_values": 0.1, "drop_path": 0.5}),
    "quick_gelu_drop_path": (PLAIN, {"act_layer": "quick_gelu", "drop_path": 0.5}),
    "torchs_norm_without_bias": (PLAIN, {"norm_layer": functools.partial(nn.LayerNorm, bias=False)}),
    "qk_norm": (PLAIN, {"qk_norm": True, "norm_layer": nn.RMSNorm, "drop_path": 0.5}),
    "qk_norm_no_affine": (PLAIN, {"qk_norm": True, "norm_layer": NO_AFFINE}),
    "qk_norm_no_weight": (
        PLAIN, {"qk_norm": True, "norm_layer": functools.partial(layers.RMSNorm, elementwise_affine=False)}
    ),
    "an activation that no op knows": (PLAIN, {"act_layer": nn.ELU}),
    "post": (POST, {}),
    "post_layer_scale_drop_path": (POST, {"init_values": 0.5, "drop_path": 0.5}),
    "post_no_affine": (POST, {"proj_bias": False, "norm_layer": NO_AFFINE}),
    "post_qk_norm": (POST, {"qk_norm": True, "norm_layer": nn.RMSNorm, "act_layer": "relu"}),
}  # fmt: skip


def pair(case: str, **more: Any) -> tuple[nn.Module, nn.Module]:
    kind, arguments = CASES[case]
    return blocks(kind, **{**arguments, **more})


def check(case: str, dtype: torch.dtype, device: torch.device, batch: int) -> None:
    ours, theirs = pair(case)
    assert_module_as_accurate(ours.to(device), theirs.to(device), *tokens(batch, N, D, device=device), dtype)


@pytest.mark.parametrize("case", CASES)
def test_as_accurate_as_the_reference(case: str, device: torch.device) -> None:
    check(case, torch.bfloat16, device, 4)
    check(case, torch.float32, device, 4)


@pytest.mark.parametrize("case", ["layer_scale_drop_path", "qk_norm", "post_qk_norm"])
def test_kernels(case: str, triton_backend: None, device: torch.device) -> None:
    check(case, torch.bfloat16, device, 2)


@pytest.mark.parametrize("case", ["layer_scale_drop_path", "post_layer_scale_drop_path"])
def test_autocast(case: str, device: torch.device) -> None:
    """With sharp attention: scores that the op itself rounded to bfloat16 once more would show."""
    ours, theirs = pair(case, drop_path=0.0)
    with torch.no_grad():
        ours.attn.qkv.weight.mul_(4)
    theirs.load_state_dict(ours.state_dict())
    x, dy = tokens(16, N, D, device=device)
    exact = step(copy.deepcopy(theirs).double().to(device), x, dy)
    results = []
    for module in (theirs, ours):
        module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
        results.append(step(module.to(device), x.float(), dy.float()))
    assert {name: t.dtype for name, t in results[0].items()} == {name: t.dtype for name, t in results[1].items()}
    assert_steps_as_accurate(results[1], results[0], exact)


# ---- cost ----


@pytest.mark.parametrize(("case", "most"), [("layer_scale_drop_path", 10), ("post_layer_scale_drop_path", 12)])
def test_token_tensors_that_are_saved(case: str, most: int, backend: str, device: torch.device) -> None:
    """In bfloat16, where a float32 copy of any of them would show. Ten before a norm: x, q, k, v, the output of
    attention, the sum, and the MLP's pre-activation, which counts as four; twelve with norms after the sums."""
    dim, heads = 128, 2
    kind, arguments = CASES[case]
    make: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(2, 16, dim, **make, requires_grad=True)
    make |= {"qkv_bias": True, **arguments}
    ours, eager = (getattr(library, kind)(dim, heads, **make) for library in (layers, reference))
    saved, by_eager = (saved_bytes(lambda m=m: m(x), list(m.parameters())) for m in (ours, eager))
    statistics = 2 * 16 * 4 * (2 * 2 + heads)  # mean and rstd of two norms, LSE of each head, in float32
    assert (most - 1) * x.nbytes < saved <= most * x.nbytes + 2 * statistics
    assert by_eager > 14 * x.nbytes


@pytest.mark.parametrize(("options", "sums"), [({"drop_path": 0.5}, 1), ({"proj_drop": 0.5}, 3)], ids=str)
def test_no_pass_of_its_own_for_a_bias_before_the_residual(options: dict[str, Any], sums: int) -> None:
    """The norm's backward pass reads the residual's gradient too, and has its sum over rows: there is one more sum, for
    the bias of qkv. After a dropout the gradient is not the residual's."""
    block = layers.Block(32, 2, qkv_bias=True, **options)
    out = block(torch.randn(2, 5, 32, requires_grad=True))
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


@pytest.mark.parametrize("after", ["proj", "fc2", "act and fc2"])
def test_a_branch_is_scaled_after_its_dropout(after: str, device: torch.device) -> None:
    """By LayerScale and by stochastic depth: an element that neither of the two drops is divided by both rates. The
    dropout repeats under a seed, and is off in evaluation."""
    block, _ = blocks(proj_drop=0.5, init_values=0.1, drop_path=0.25)
    block.to(device)
    if after == "fc2":
        block.mlp.drop1.p = 0.0
    x = inputs("normal", 32, N, D, dtype=torch.float32, device=device)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return branch(block, after, x)

    got = run(0)
    assert torch.equal(run(0), got)
    assert not torch.equal(run(1), got)
    block.eval()
    full = run(0)
    assert torch.equal(run(1), full)
    dropped = got == 0
    kept = ~dropped.flatten(1).all(1)
    assert 0 < kept.sum() < 32
    assert abs(dropped[kept].float().mean().item() - 0.5) < 0.05
    scaled = full[~dropped] / (0.5 * 0.75)
    if after == "act and fc2":
        assert not torch.allclose(got[~dropped], scaled, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(got[~dropped], scaled, rtol=1e-4, atol=1e-5)


def test_dropout_rates_that_differ_run_one_by_one() -> None:
    block, theirs = blocks(proj_drop=0.5)
    block.mlp.drop1.p = theirs.mlp.drop1.p = 0.25
    block.attn.proj_drop.p = theirs.attn.proj_drop.p = 0.0
    assert_same_step(block, theirs, torch.randn(B, N, D))


@pytest.mark.parametrize("names", [("attn.proj_drop",), ("mlp.drop2",), ("mlp.drop1", "mlp.drop2")], ids=str)
def test_dropout_before_the_sum_of_a_post_norm_block(names: tuple[str, ...]) -> None:
    """With a probability of nearly 1, of each half the norm of x is left."""
    block, _ = blocks(POST, init_values=0.5)
    x = tokens(dtype=torch.float32)[0]
    without = block.eval()(x)
    assert torch.equal(block.train()(x), without)
    for name in names:
        block.get_submodule(name).p = 1 - 1e-7
    first = block.norm1(x) if "attn.proj_drop" in names else block.norm1(x + block.ls1(block.attn(x)))
    added = block.ls2(block.mlp(first)) if "attn.proj_drop" in names else 0
    torch.testing.assert_close(block(x), block.norm2(first + added), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(block.eval()(x), without)


# ---- sequences ----

ENDS = (0, 5, 6, 15, 31)
SEQUENCES = {
    PLAIN: lambda: layers.Block(D, H, qkv_bias=True, init_values=0.5),
    POST: lambda: layers.PostNormBlock(D, H, qk_norm=True),
    "EvaBlock": lambda: layers.EvaBlock(D, H, num_prefix_tokens=0, qkv_fused=False),
}


def hook_everything(block: nn.Module) -> None:
    """Let the block call its modules one by one, and attention materialise its probabilities."""
    for module in (block.attn, block.attn.attn_drop, block.mlp):
        module.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("kind", SEQUENCES)
def test_sequences_do_not_see_each_other(kind: str) -> None:
    """Fused, and with the modules one by one; with another scale of attention, too."""
    block = randomised(SEQUENCES[kind]()).double()
    x, dy = torch.randn(2, ENDS[-1], D, dtype=torch.float64)
    x.requires_grad_()
    rope = [torch.randn(ENDS[-1], 2 * D // H)] if kind == "EvaBlock" else []
    ends, parts = torch.tensor(ENDS), [slice(*bounds) for bounds in pairwise(ENDS)]
    alone = torch.cat([block(x[part][None], *[t[part] for t in rope])[0] for part in parts])
    want = alone, *torch.autograd.grad(alone, [x, *block.parameters()], dy)

    def run() -> tuple[Tensor, ...]:
        y = block(x, *rope, cu_seqlens=ends, max_seqlen=16)
        return y, *torch.autograd.grad(y, [x, *block.parameters()], dy)

    torch.testing.assert_close(run(), want)
    block.attn.scale = 1.0
    with_scale = run()
    assert not torch.allclose(with_scale[0], want[0])
    block.attn.proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(run(), with_scale)
    hook_everything(block)
    torch.testing.assert_close(run(), with_scale)
    block.attn.scale = (D // H) ** -0.5
    torch.testing.assert_close(run(), want)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [PLAIN, "EvaBlock"])
def test_stochastic_depth_is_drawn_once_a_sequence(kind: str, fused: bool) -> None:
    torch.manual_seed(0)
    block = SEQUENCES[kind]()
    block.drop_path1, block.drop_path2 = DropPath(0.5), DropPath(0.5)
    for last, value in ((block.attn.proj, 1.0), (block.mlp.fc2, 10.0)):
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, value if kind == "EvaBlock" else 2 * value)  # a LayerScale of 0.5
    if not fused:
        hook_everything(block)
    lengths = torch.randint(1, 5, (40,))
    ends = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    branches = block(torch.zeros(int(ends[-1]), D), cu_seqlens=ends)
    drawn = [branches[a:b].detach().unique() for a, b in pairwise(ends.tolist())]
    assert all(values.numel() == 1 for values in drawn)
    assert {float(values) for values in drawn} == {0.0, 2.0, 20.0, 22.0}
