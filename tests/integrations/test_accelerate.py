"""The promises of `fastvit.accelerate` for any model: in place, exact classes only, undone without a trace, nothing
dropped silently."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from library_models import outcome
from models import Calls, accelerate_as_it_was, close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit.study.memory.peak import saved_bytes

FUSED = "layer_norm_attention, layer_norm_mlp"


def test_accelerate_and_restore_are_idempotent(vit: nn.Module, image: Tensor) -> None:
    untouched = [dict(m.__dict__) for m in vit.modules()]
    want = vit(image)
    first = fastvit.accelerate(vit)
    assert fastvit.accelerate(vit) == first
    assert close(vit(image), want)
    fastvit.restore(vit)
    fastvit.restore(vit)
    assert [m.__dict__.keys() for m in vit.modules()] == [d.keys() for d in untouched]
    assert torch.equal(vit(image), want)


def test_context_manager_restores_after_an_error(vit: nn.Module, image: Tensor) -> None:
    with fastvit.accelerated(vit) as report:
        assert report.accelerated
        assert "forward" in vit.blocks[0].__dict__
    assert "forward" not in vit.blocks[0].__dict__
    with pytest.raises(RuntimeError, match="mine"), fastvit.accelerated(vit):
        raise RuntimeError("mine")
    assert not any("forward" in m.__dict__ for m in vit.modules())


def test_no_tensor_is_made_or_touched(vit: nn.Module) -> None:
    with Calls() as calls:
        fastvit.accelerate(vit)
    assert calls.names == []


def test_on_the_meta_device(vit: nn.Module, image: Tensor) -> None:
    """Memory is planned there: shapes are right, and nothing falls back."""
    fastvit.accelerate(vit.to("meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vit(image.to("meta")).is_meta


def test_deepcopy_and_pickle_stay_accelerated_and_apart(vit: nn.Module, image: Tensor) -> None:
    fastvit.accelerate(vit)
    want = vit(image)
    for other in (copy.deepcopy(vit), pickle.loads(pickle.dumps(vit))):
        assert torch.equal(other(image), want)
        assert other.blocks[0].forward.args[1] is other.blocks[0]
        with torch.no_grad():
            other.blocks[0].mlp.fc2.weight.mul_(2)
        assert not close(other(image), want)
        fastvit.restore(other)
        assert "forward" not in other.blocks[0].__dict__
    assert torch.equal(vit(image), want)
    assert "forward" in vit.blocks[0].__dict__


def test_an_optimizer_made_before_goes_on(vit: nn.Module, image: Tensor) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    fastvit.accelerate(vit)
    before = vit(image)
    before.square().sum().backward()
    optimizer.step()
    after = vit(image)
    assert not close(after, before)
    state = vit.state_dict()
    fastvit.restore(vit)
    assert all(torch.equal(state[key], value) for key, value in vit.state_dict().items())
    assert close(vit(image), after)


def test_saves_at_most_two_thirds_of_timms_block(timm, device) -> None:
    """The goal is 0.68 of timm's block, which runs scaled_dot_product_attention."""
    make = {"device": device, "dtype": torch.bfloat16}
    block = timm.models.vision_transformer.Block(768, 12, qkv_bias=True, **make).train()
    x = torch.randn(2, 197, 768, requires_grad=True, **make)
    own = saved_bytes(lambda: block(x), list(block.parameters()))
    fastvit.accelerate(block)
    assert saved_bytes(lambda: block(x), list(block.parameters())) <= 0.68 * own


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(vit: nn.Module, image: Tensor, reentrant: bool) -> None:
    image.requires_grad_()
    vit(image).square().sum().backward()
    want, image.grad = image.grad, None
    fastvit.accelerate(vit)
    x = vit._pos_embed(vit.patch_embed(image))
    for block in vit.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    vit.forward_head(vit.norm(x)).square().sum().backward()
    assert close(image.grad, want)


def test_timms_own_checkpointing(vit: nn.Module, image: Tensor) -> None:
    weight = vit.blocks[0].attn.qkv.weight
    (want,) = torch.autograd.grad(vit(image).square().sum(), weight)
    fastvit.accelerate(vit)
    vit.set_grad_checkpointing(True)
    assert close(torch.autograd.grad(vit(image).square().sum(), weight)[0], want)


def test_frozen_layers_get_no_gradient(vit: nn.Module, image: Tensor) -> None:
    for name, p in vit.named_parameters():
        p.requires_grad_("blocks.1" in name and "norm" not in name)
    vit(image).square().sum().backward()
    want = {name: p.grad for name, p in vit.named_parameters()}
    vit.zero_grad()
    fastvit.accelerate(vit)
    vit(image).square().sum().backward()
    for name, p in vit.named_parameters():
        assert (p.grad is None) == (want[name] is None), name
        assert p.grad is None or close(p.grad, want[name]), name


def test_timms_attention_drops_and_scales_as_its_own_does(timm, vit: nn.Module, image: Tensor) -> None:
    """scaled_dot_product_attention, in it, follows the attention's mode and takes no scale from it."""
    for block in vit.blocks:
        block.attn.qkv.weight.data *= 10
        block.attn.scale *= 4
        block.attn.attn_drop = nn.Dropout(0.5)  # in training, in a model that is not
    for fused in (True, False):
        for block in vit.blocks:
            block.attn.fused_attn = fused
            block.attn.attn_drop.train(fused)
        accelerate_as_it_was(vit, lambda: vit(image))
        fastvit.restore(vit)


@pytest.mark.parametrize("option", ["attn_drop_rate", "proj_drop_rate"])
def test_a_dropout_of_everything(tiny, image: Tensor, option: str) -> None:
    model = tiny(**{option: 1.0}).train()
    report = accelerate_as_it_was(model, lambda: model(image))
    assert outcome(report, "blocks.0") == ("skipped", "a dropout of everything")


def test_a_norm_of_higher_precision_than_the_layer_after_it(vit: nn.Module) -> None:
    """PyTorch allows it on a CPU only."""
    block, x = vit.blocks[0].cpu().bfloat16(), torch.randn(2, 5, 192).bfloat16()
    block.norm2.float()
    warning = r"its input is torch.bfloat16 and its parameters are torch.float32"
    accelerate_as_it_was(block, lambda: block(x), warning)


def test_the_input_by_name(vit: nn.Module, image: Tensor) -> None:
    x = torch.randn(2, 5, 192, device=image.device)
    calls = [
        (vit.patch_embed.proj, {"input": image}), (vit.blocks[0], {"x": x}), (vit.blocks[0].attn, {"x": x}),
        (vit.blocks[0].mlp, {"x": x}), (vit.norm, {"x": x}), (nn.LayerNorm(192, device=x.device), {"input": x}),
    ]  # fmt: skip
    for module, named in calls:
        accelerate_as_it_was(module, functools.partial(module, **named))
        with pytest.raises(TypeError, match="argument"):
            module()


def test_tensor_subclasses_are_left_to_the_module(vit: nn.Module) -> None:
    """They support PyTorch's own functions only. With such a weight, only its layer runs as a module."""
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.randn(2, 5, 192, device=vit.pos_embed.device)
    mlp, block = vit.blocks[0].mlp, vit.blocks[0]
    want, of_block = mlp(x), block(x)
    fastvit.accelerate(mlp)
    with pytest.warns(UserWarning, match="Mlp runs its own forward instead of fastvit's: a TwoTensor"):
        assert close(mlp(TwoTensor(x, x)).a, want)
    weight = mlp.fc2.weight.detach()
    mlp.fc2.weight = nn.Parameter(TwoTensor(weight, weight))
    assert close(mlp(x).a, want)
    expected = "layer_norm_attention, layer_norm, linear; mlp.fc2 as nn.Linear with "
    status, detail = outcome(fastvit.accelerate(block), "")
    assert (status, detail.startswith(expected), "TwoTensor" in detail) == ("accelerated", True, True)
    assert close(block(x).a, of_block)


def test_subclasses_and_unknown_classes_are_left_alone(timm, tiny) -> None:
    class MyBlock(timm.models.vision_transformer.Block):
        pass

    model = tiny(block_fn=MyBlock)
    report = fastvit.accelerate(model)
    assert outcome(report, "blocks.0") == ("as it was", "")  # its layers are all accelerated or skipped by themselves
    assert outcome(report, "blocks.0.attn")[0] == "accelerated"
    assert "forward" not in model.blocks[0].__dict__


@pytest.mark.parametrize(
    ("options", "module", "reason"),
    [
        ({"num_heads": 48}, "blocks.0.attn", "head_dim 4 is not a multiple of 8 from 16 to 256"),
        ({"act_layer": "mish"}, "blocks.0.mlp", "act is nn.Mish"),
    ],
)
def test_what_no_op_stands_for_is_skipped_with_the_reason(tiny, image, options, module, reason) -> None:
    model = tiny(**options)
    report = accelerate_as_it_was(model, lambda: model(image))
    assert outcome(report, "blocks.0") == ("skipped", reason)
    assert outcome(report, module) == ("skipped", reason)
    assert len(report.accelerated) >= 4  # the other half of the block, its norms, the patch embedding
    with pytest.raises(ValueError, match="strict: 2 modules cannot be accelerated"):
        fastvit.accelerate(model, strict=True)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_patch_embedding_of_another_size_falls_back(tiny, device) -> None:
    model = tiny(dynamic_img_pad=True, dynamic_img_size=True)
    fastvit.accelerate(model)
    conv, image = model.patch_embed.proj, torch.randn(1, 3, 40, 33, device=device)
    with pytest.warns(UserWarning, match="an image of 40 x 33, which patches of 16 x 16 do not cover"):
        assert torch.equal(conv(image), nn.functional.conv2d(image, conv.weight, conv.bias, stride=16))
    with pytest.warns(UserWarning, match="its input has 3 dimensions, not 4"):
        assert torch.equal(conv(image[0]), nn.functional.conv2d(image[0], conv.weight, conv.bias, stride=16))
    conv.stride = (8, 8)
    with pytest.warns(UserWarning, match="its convolution is not one of disjoint patches"):
        assert conv(image[..., :32, :32]).shape[2:] == (3, 3)


def test_layer_norms_that_round_otherwise_are_left_alone(device) -> None:
    plain, wide = nn.LayerNorm(32), nn.LayerNorm((4, 32))
    model = nn.ModuleList([plain, wide]).to(device)
    report = fastvit.accelerate(model)
    assert [e.status for e in report.entries] == ["as it was", "accelerated", "skipped"]
    x = torch.randn(2, 4, 32, device=device)
    assert close(plain(x), nn.functional.layer_norm(x, (32,), plain.weight, plain.bias))
    with (
        pytest.warns(UserWarning, match=r"its input is torch.float64 and its parameters are torch.float32"),
        pytest.raises(RuntimeError, match="type"),  # PyTorch's own error
    ):
        plain(x.double())


def test_what_does_not_run_modules_forwards_is_refused(vit: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"nn.DataParallel \(the model itself\).*or in DistributedDataParallel"):
        fastvit.accelerate(nn.DataParallel(vit))
    with pytest.raises(ValueError, match=r"nn.DataParallel \(1\)"):
        fastvit.accelerate(nn.Sequential(nn.Identity(), nn.DataParallel(vit)))
    with pytest.raises(ValueError, match=r"ScriptModule \(0\), whose forward cannot be replaced"):
        fastvit.accelerate(nn.Sequential(torch.jit.script(nn.LayerNorm(8)), vit))
    assert not any("forward" in m.__dict__ for m in vit.modules())


def test_misuse_is_an_error(vit: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got str"):
        fastvit.accelerate("vit")
    compiled_inside = copy.deepcopy(vit)
    compiled_inside.blocks[0].compile(backend="eager")
    for compiled in (torch.compile(vit, backend="eager"), compiled_inside):
        with pytest.raises(ValueError, match="compiled already"):
            fastvit.accelerate(compiled)
