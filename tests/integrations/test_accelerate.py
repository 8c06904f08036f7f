"""The promises of `fastvit.accelerate` for any model: in place, exact classes only, undone without a trace, nothing
dropped silently."""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import outcome
from models import Calls, LoRA, accelerate_as_it_was, close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit.report import FUSED_ALREADY
from fastvit.study.memory.peak import saved_bytes

FUSED = "layer_norm_attention, layer_norm_mlp"


@pytest.fixture
def timm():
    return import_library("timm")


@pytest.fixture
def tiny(timm, device) -> Callable[..., nn.Module]:
    """A ViT of timm for 32 x 32 images."""

    def make(depth: int = 1, **options: Any) -> nn.Module:
        return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=depth, **options).to(device).eval()

    return make


@pytest.fixture
def vit(tiny) -> nn.Module:
    return tiny(depth=2, init_values=0.3)


@pytest.fixture
def image(device) -> Tensor:
    return torch.randn(2, 3, 32, 32, device=device)


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
    assert not close(vit(image), before)
    state = vit.state_dict()
    fastvit.restore(vit)
    assert all(torch.equal(state[key], value) for key, value in vit.state_dict().items())


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


def test_a_hook_inside_is_skipped_at_once_and_its_neighbours_are_not(vit: nn.Module, image: Tensor) -> None:
    seen = []
    want = vit(image)
    vit.blocks[0].attn.qkv.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    report = fastvit.accelerate(vit)
    assert outcome(report, "blocks.0") == ("skipped", "qkv has hooks or a forward of its own")
    assert outcome(report, "blocks.0.attn")[0] == "skipped"
    assert outcome(report, "blocks.0.mlp") == ("accelerated", "mlp")
    assert outcome(report, "blocks.0.norm1") == ("accelerated", "layer_norm")
    assert outcome(report, "blocks.1")[0] == "accelerated"
    assert close(vit(image), want)
    assert len(seen) == 1


def test_a_forward_put_on_before_keeps_running(vit: nn.Module, image: Tensor) -> None:
    block = vit.blocks[0]
    block.forward = lambda x, attn_mask=None, is_causal=False: 2 * x
    report = accelerate_as_it_was(vit, lambda: vit(image))
    assert outcome(report, "blocks.0")[0] == "skipped"


def test_a_hook_added_later_falls_back_with_one_warning(vit: nn.Module, image: Tensor) -> None:
    want = vit(image)
    fastvit.accelerate(vit)
    seen = []
    handle = vit.blocks[0].mlp.act.register_forward_hook(lambda *_: seen.append(1))
    vit.blocks[1].mlp.act.register_forward_pre_hook(lambda *_: None)  # the same class and reason
    warning = "^blocks.0: Block runs its own forward instead of fastvit's: act has hooks"
    with pytest.warns(UserWarning, match=warning) as record:
        outputs = [vit(image) for _ in range(3)]
    assert all(close(out, want) for out in outputs)
    assert len(record) == 1
    assert record[0].filename == __file__  # the line that called the model, not one of timm's or torch's
    assert len(seen) == 3
    handle.remove()
    vit.blocks[1].mlp.act._forward_pre_hooks.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert close(vit(image), want)


def test_hooks_on_the_accelerated_module_itself_run(vit: nn.Module, image: Tensor) -> None:
    fastvit.accelerate(vit)
    shapes = []
    vit.blocks[0].register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    vit.blocks[0].register_forward_hook(lambda module, args, out: shapes.append(out.shape) or out.mul_(2.0))
    vit.blocks[0].register_full_backward_hook(lambda module, into, out: shapes.append(out[0].shape))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vit(image).sum().backward()
    assert shapes == [(2, 5, 192)] * 3


def test_an_adapter_put_in_later_is_honoured(vit: nn.Module, image: Tensor) -> None:
    fastvit.accelerate(vit)
    vit.blocks[1].mlp.fc2 = LoRA(vit.blocks[1].mlp.fc2).to(image.device)
    with pytest.warns(UserWarning, match="blocks.1: Block runs its own forward .*: fc2 is models.LoRA"):
        got = vit(image)
    fastvit.restore(vit)
    assert close(got, vit(image))


def test_causal_attention_falls_back_by_call(vit: nn.Module) -> None:
    x = torch.randn(2, 5, 192, device=vit.pos_embed.device)
    block = vit.blocks[0]
    accelerate_as_it_was(vit, lambda: block(x, is_causal=True), "a causal mask")
    assert not close(block(x), block(x, is_causal=True))


@pytest.mark.parametrize("name", ["attn.q_norm", "attn.k_norm", "attn.norm", "mlp.norm"])
def test_a_hook_where_a_block_has_no_norm(name: str, vit: nn.Module, image: Tensor) -> None:
    """A hook on the nn.Identity in its place runs."""
    vit.blocks[0].get_submodule(name).register_forward_hook(lambda _, __, output: output * 2)
    report = accelerate_as_it_was(vit, lambda: vit(image))
    assert outcome(report, "blocks.0")[0] == "skipped"


def test_a_hook_where_a_parallel_block_has_no_qk_norm(timm) -> None:
    """A hook on the nn.Identity in its place runs."""
    block = timm.models.vision_transformer.ParallelScalingBlock(64, 4)
    block.q_norm.register_forward_hook(lambda _, __, output: output * 2)
    x = torch.randn(2, 7, 64)
    report = accelerate_as_it_was(nn.ModuleList([block]), lambda: block(x))
    assert outcome(report, "0") == ("skipped", "q_norm has hooks or a forward of its own")


def test_blocks_of_our_own_are_fused_already() -> None:
    model = fastvit.VisionTransformer(32, 8, embed_dim=32, depth=1, num_heads=2, block_fn="parallel_scaling")
    report = fastvit.accelerate(model)
    assert outcome(report, "blocks.0") == ("as it was", FUSED_ALREADY)
    assert not report.accelerated + report.skipped


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


def test_strict_accepts_a_model_that_is_fused_throughout(vit: nn.Module) -> None:
    assert not fastvit.accelerate(vit, strict=True).skipped


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
    for compiled in (torch.compile(vit, backend="eager"), copy.deepcopy(vit)):
        if compiled is not vit and not hasattr(compiled, "_orig_mod"):
            compiled.blocks[0].compile(backend="eager")
        with pytest.raises(ValueError, match="compiled already"):
            fastvit.accelerate(compiled)


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
def test_symbolic_tracing_sees_the_modules(vit: nn.Module, image: Tensor) -> None:
    """timm's feature extractors trace with torch.fx, whose proxies are no tensors."""
    want = torch.fx.symbolic_trace(vit)
    fastvit.accelerate(vit)
    got = torch.fx.symbolic_trace(vit)
    names = [[node.name for node in traced.graph.nodes] for traced in (got, want)]
    assert names[0] == names[1]
    assert close(got(image), want(image))


REPLACED = ("blocks.0", "blocks.0.attn", "blocks.0.mlp", "blocks.0.attn.qkv", "blocks.0.norm1", "patch_embed.proj")


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("path", REPLACED)
def test_a_forward_replaced_on_the_class(
    vit: nn.Module, image: Tensor, monkeypatch: pytest.MonkeyPatch, path: str, when: str
) -> None:
    plain, kind = copy.deepcopy(vit), type(vit.get_submodule(path))
    forward = kind.forward

    @functools.wraps(forward)
    def doubled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * 2

    if when == "after":
        fastvit.accelerate(vit)
    fused = vit(image)
    monkeypatch.setattr(kind, "forward", doubled)
    report = fastvit.accelerate(vit) if when == "before" else None
    want = plain(image)
    assert close(vit(image), want)
    assert not close(fused, want)
    if report is not None:
        name = path if path == "patch_embed.proj" else "blocks.0"
        assert "was replaced" in outcome(report, name)[1]
    monkeypatch.undo()
    assert close(vit(image), fused)
    if when == "after":
        with Calls() as calls:
            vit(image)
        assert "fastvit::patch_embed_fwd" in calls.names
        assert "aten::native_layer_norm" not in calls.names


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_class_that_was_swapped(vit: nn.Module, image: Tensor, when: str) -> None:
    """Token merging does it with blocks."""

    class Halved(type(vit.blocks[0])):  # type: ignore[misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x, *args, **kwargs) / 2

    plain = copy.deepcopy(vit)
    if when == "after":
        fastvit.accelerate(vit)
    for model in (vit, plain):
        model.blocks[1].__class__ = Halved
    if when == "before":
        fastvit.accelerate(vit)
    assert close(vit(image), plain(image))


def test_a_parametrized_module_stays_accelerated(vit: nn.Module, image: Tensor) -> None:
    """`parametrize` swaps the class for a subclass that only makes the parameter."""
    plain = copy.deepcopy(vit)
    fastvit.accelerate(vit)
    for model in (vit, plain):
        nn.utils.parametrize.register_parametrization(model.norm, "weight", nn.Softplus(), unsafe=True)
    with Calls() as calls:
        got = vit(image)
    assert close(got, plain(image))
    assert "aten::native_layer_norm" not in calls.names


def test_a_reader_that_stumbles_leaves_the_module(vit: nn.Module, image: Tensor) -> None:
    """Other libraries may have changed a module in any way."""
    want = vit(image)
    del vit.blocks[0].attn.num_heads
    type_error = "it is not as its class makes it: TypeError: unsupported operand"
    vit.blocks[1].attn.num_heads = None
    report = fastvit.accelerate(vit)
    assert outcome(report, "blocks.0")[1].startswith("it is not as its class makes it: AttributeError")
    assert outcome(report, "blocks.1")[1].startswith(type_error)
    for block in vit.blocks:
        block.attn.num_heads = 3
    assert close(vit(image), want)
    fastvit.accelerate(vit)
    del vit.blocks[0].attn.num_heads
    with (
        pytest.warns(UserWarning, match="it is not as its class makes it: AttributeError"),
        pytest.raises(AttributeError, match="num_heads"),  # of timm's forward
    ):
        vit(image)
