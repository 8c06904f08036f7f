"""The modules against the reference: values, gradients, memory saved for backward, and that nothing is skipped."""

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from library_imports import import_timm
from oracle import GRADIENT, assert_as_accurate, inputs, randomised
from torch import Tensor, nn

import fastvit
from fastvit import _fusible, layers, reference

B, N, D, H = 2, 17, 48, 3


def twins(ours: nn.Module, theirs: nn.Module) -> tuple[nn.Module, nn.Module]:
    randomised(ours)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def step(module: nn.Module, x: Tensor, dy: Tensor, seed: int = 3) -> dict[str, Tensor]:
    """The output, and the gradients of x and of every parameter."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = module(x)
    parameters = dict(module.named_parameters())
    grads = torch.autograd.grad(y, [x, *parameters.values()], dy.to(y.dtype))
    return {"output": y.detach(), **{f"d{name}": g for name, g in zip(["x", *parameters], grads, strict=True)}}


def assert_parity(ours: nn.Module, theirs: nn.Module, x: Tensor, dy: Tensor, dtype: torch.dtype) -> None:
    """The oracle rule for the output and every gradient; x, dy: in float64."""
    ours.to(dtype)
    theirs.load_state_dict(ours.state_dict())
    x, dy = x.to(dtype), dy.to(dtype)
    exact = step(copy.deepcopy(theirs).double(), x.double(), dy.double())
    eager = step(theirs.to(dtype), x, dy)
    for name, got in step(ours, x, dy).items():
        assert_as_accurate(got, eager[name], exact[name], factor=2.0 if name == "output" else GRADIENT, what=name)


def blocks(kind: str = "Block", **arguments: Any) -> tuple[nn.Module, nn.Module]:
    arguments = {"mlp_ratio": 2.0, "qkv_bias": True, **arguments}
    theirs = dict(arguments)
    if isinstance(theirs.get("act_layer"), str):
        theirs["act_layer"] = reference.ACTIVATIONS[theirs["act_layer"]]
    return twins(getattr(layers, kind)(D, H, **arguments), getattr(reference, kind)(D, H, **theirs))


BLOCKS = {
    "plain": {},
    "layer_scale_drop_path": {"init_values": 0.1, "drop_path": 0.5},
    "no_biases": {"qkv_bias": False, "proj_bias": False},
    "quick_gelu_drop_path": {"act_layer": "quick_gelu", "drop_path": 0.5},
    "torchs_layer_norm": {"norm_layer": nn.LayerNorm},
    "post_norm": {"kind": "ResPostBlock", "init_values": 0.5, "drop_path": 0.5},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", BLOCKS)
def test_block_is_as_accurate_as_the_reference(
    case: str, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    ours, theirs = blocks(**BLOCKS[case])
    x, dy = (inputs("normal", 4, N, D, dtype=torch.float64, device=device, seed=s) for s in (0, 1))
    assert_parity(ours.to(device), theirs.to(device), x, dy, dtype)


@pytest.mark.parametrize("act", ["gelu_tanh", "relu", "silu", nn.ELU])
def test_every_activation(act: str | type[nn.Module], device: torch.device) -> None:
    """nn.ELU: one that the ops do not know, run as its own module."""
    ours, theirs = blocks(act_layer=act)
    x, dy = (inputs("normal", B, N, D, dtype=torch.float64, device=device, seed=s) for s in (0, 1))
    assert_parity(ours.to(device), theirs.to(device), x, dy, torch.float32)


@pytest.mark.parametrize("tokens", [5, 17])
def test_block_under_autocast(tokens: int, device: torch.device) -> None:
    """With sharp attention: scores that the op itself rounded to bfloat16 once more would show."""
    ours, theirs = blocks(init_values=0.5)
    with torch.no_grad():
        ours.attn.qkv.weight.mul_(4)
    theirs.load_state_dict(ours.state_dict())
    x, dy = (inputs("normal", 16, tokens, D, dtype=torch.float64, device=device, seed=s) for s in (0, 1))
    exact = step(copy.deepcopy(theirs).double().to(device), x, dy)
    results = []
    for module in (theirs, ours):
        module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
        results.append(step(module.to(device), x.float(), dy.float()))
    for name, got in results[1].items():
        assert_as_accurate(got, results[0][name], exact[name], factor=2.0 if name == "output" else GRADIENT, what=name)


def test_activation_names() -> None:
    for name, make in _fusible.ACT_LAYERS.items():
        assert _fusible.activation_name(make()) == name
    assert _fusible.activation_name(nn.ELU()) is None
    with pytest.raises(ValueError, match=r"act_layer .*'gelu_tan'.*gelu_tanh"):
        layers.Mlp(8, act_layer="gelu_tan")


def test_block_without_autograd_is_the_same(backend: str, device: torch.device) -> None:
    block, _ = blocks(init_values=0.1)
    block.to(device)
    x = inputs("normal", B, N, D, dtype=torch.float32, device=device)
    expected = block(x).detach()
    with torch.inference_mode():
        torch.testing.assert_close(block(x), expected, rtol=1e-6, atol=1e-6)
    assert block(x[:0]).shape == (0, N, D)


def double(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 2


# ---- memory ----


def saved_tokens(block: nn.Module, x: Tensor) -> tuple[float, int]:
    """What a training step saves for backward: token tensors, in multiples of x, and the bytes of everything else."""
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in parameters and t.numel():
            saved[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(x)
    sizes = [t.untyped_storage().nbytes() for t in saved.values()]
    assert y.requires_grad
    token = x.untyped_storage().nbytes()
    return sum(s for s in sizes if s >= token) / token, sum(s for s in sizes if s < token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["plain", "layer_scale_drop_path"])
def test_at_most_ten_token_tensors_are_saved(case: str, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    dim, heads = 128, 2
    arguments = BLOCKS[case]
    x = torch.randn(2, 16, dim, device=device, dtype=dtype, requires_grad=True)
    block = layers.Block(dim, heads, qkv_bias=True, device=device, dtype=dtype, **arguments)
    tokens, rest = saved_tokens(block, x)
    assert tokens <= 10
    statistics = 2 * 16 * 4 * (2 * 2 + heads)  # mean and rstd of two norms, LSE of each head, in float32
    assert rest <= 2 * statistics
    eager = reference.Block(dim, heads, qkv_bias=True, device=device, dtype=dtype, **arguments)
    assert saved_tokens(eager, x)[0] > 14


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
    with pytest.raises(ValueError, match="drop_prob"):
        layers.DropPath(1.5)


def test_samples_that_are_kept_may_stay_as_they_are() -> None:
    """scale_by_keep=False inside a fused block: a branch is there or not, and never divided."""
    block, _ = blocks(drop_path=0.5)
    block.drop_path1.scale_by_keep = False
    block.drop_path2 = nn.Identity()
    x = torch.randn(32, N, D)
    y, kept = block(x), block.eval()(x)
    block.attn.proj.weight.data.zero_()
    block.attn.proj.bias.data.zero_()
    dropped = block(x)
    kept_rows, dropped_rows = (
        [torch.allclose(a, b, atol=1e-5) for a, b in zip(y, z, strict=True)] for z in (kept, dropped)
    )
    assert 0 < sum(kept_rows) < 32
    assert all(a != b for a, b in zip(kept_rows, dropped_rows, strict=True))


@pytest.mark.parametrize("module", ["attn", "mlp"])
def test_projection_dropout_in_training(module: str, backend: str, device: torch.device) -> None:
    """Outputs of the branch are either dropped or divided by 1 - p; reproducible under a seed; off in eval."""
    block, _ = blocks(proj_drop=0.5)
    block.to(device)
    block.mlp.drop1.p = block.mlp.drop2.p if module == "mlp" else 0.0
    half = block._attention_half if module == "attn" else block._mlp_half
    x = inputs("normal", B, N, D, dtype=torch.float32, device=device)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return half(x).detach() - x

    dropped = run(0) == 0
    assert abs(dropped.float().mean().item() - 0.5) < 0.05
    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    block.eval()
    full = half(x).detach() - x
    assert not (full == 0).any()
    if module == "attn":
        block.train()
        torch.testing.assert_close(run(0)[~dropped], 2 * full[~dropped], rtol=1e-4, atol=1e-5)


def test_dropout_rates_that_differ_run_one_by_one() -> None:
    block, theirs = blocks(proj_drop=0.5)
    block.mlp.drop1.p = theirs.mlp.drop1.p = 0.0
    block.attn.proj_drop.p = theirs.attn.proj_drop.p = 0.0
    x = torch.randn(B, N, D)
    outputs = []
    for module in (block, theirs):
        torch.manual_seed(0)
        outputs.append(module(x))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_checkpointing_repeats_the_dropout(backend: str, device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    block, _ = blocks(proj_drop=0.3, attn_drop=0.3, drop_path=0.3)
    block.to(device)
    x, dy = (inputs("normal", B, N, D, dtype=torch.float32, device=device, seed=s) for s in (0, 1))
    plain = step(block, x, dy)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    for name, got in step(Checkpointed(), x, dy).items():
        assert torch.equal(got, plain[name.replace("dblock.", "d")]), name


# ---- the other modules ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_patch_embed_and_layer_norm(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    image = inputs("normal", 2, 3, 8, 12, dtype=torch.float64, device=device)
    dy = inputs("normal", 2, 6, 32, dtype=torch.float64, device=device, seed=1)
    ours, theirs = twins(layers.PatchEmbed((8, 12), 4, 3, 32), reference.PatchEmbed((8, 12), 4, 3, 32))
    assert_parity(ours.to(device), theirs.to(device), image, dy, dtype)
    norm, eager = twins(layers.LayerNorm(32), nn.LayerNorm(32, eps=1e-6))
    assert_parity(norm.to(device), eager.to(device), dy * 3, dy.flip(0), dtype)


def test_patch_embed_honours_hooks_and_checks_the_image() -> None:
    embed = layers.PatchEmbed(8, 4, 3, 32)
    x, pos, prefix = torch.randn(2, 3, 8, 8), torch.randn(4, 32), torch.randn(2, 32)
    plain = embed(x, pos, prefix)
    embed.proj.register_forward_hook(double)
    doubled = embed(x, pos, prefix)
    torch.testing.assert_close(doubled[:, :2], plain[:, :2])
    torch.testing.assert_close(doubled[:, 2:], 2 * (plain[:, 2:] - pos) + pos, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"image size \(8, 8\), got \(8, 12\)"):
        embed(torch.randn(2, 3, 8, 12))
    with pytest.raises(ValueError, match="patch_size"):
        layers.PatchEmbed(9, 4)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="num_heads"):
        layers.Block(48, 5)
    with pytest.raises(ValueError, match="num_heads"):
        layers.Attention(48, 0)


def round_trips(module: nn.Module) -> Iterator[nn.Module]:
    yield copy.deepcopy(module)
    yield pickle.loads(pickle.dumps(module))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh = layers.Block(D, H, mlp_ratio=2.0, qkv_bias=True, init_values=1.0, act_layer="gelu_tanh")
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    yield fresh


def test_deepcopy_pickle_and_state_dict() -> None:
    block, _ = blocks(init_values=0.1, act_layer="gelu_tanh")
    x = torch.randn(B, N, D)
    for copied in round_trips(block):
        assert torch.equal(copied(x), block(x))


def test_keys_and_constructor_are_timms() -> None:
    timm = import_timm()
    vit = timm.models.vision_transformer
    shared = {"dim": D, "num_heads": H, "mlp_ratio": 3.0, "qkv_bias": True, "proj_drop": 0.1, "attn_drop": 0.2}
    for ours, theirs in ((layers.Block, vit.Block), (layers.ResPostBlock, vit.ResPostBlock)):
        arguments = {**shared, "init_values": 0.1, "drop_path": 0.1, "dtype": torch.bfloat16, "act_layer": nn.SiLU}
        a, b = ours(**arguments), theirs(**arguments)
        assert {k: (v.shape, v.dtype) for k, v in a.state_dict().items()} == {
            k: (v.shape, v.dtype) for k, v in b.state_dict().items()
        }
        assert (a.attn.attn_drop.p, a.attn.proj_drop.p, a.mlp.drop1.p) == (0.2, 0.1, 0.1)
        torch.testing.assert_close(a.norm1.weight, b.norm1.weight)
        assert a.drop_path1.drop_prob == b.drop_path1.drop_prob


def test_public_names() -> None:
    for name in fastvit.__all__:
        assert getattr(fastvit, name) is not None
    assert fastvit.__version__.count(".") == 2


def test_dropouts_may_be_replaced_by_identities() -> None:
    """As people do to switch them off: such an MLP runs its submodules, in training too."""
    mlp = fastvit.Mlp(16, 32).train()
    x = torch.randn(2, 3, 16)
    want = mlp(x)
    mlp.drop1 = mlp.drop2 = torch.nn.Identity()
    torch.testing.assert_close(mlp(x), want)
