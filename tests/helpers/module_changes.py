"""Changes of a transformer block with timm's names, each with a function that undoes it: what a description of the
block has to follow."""

from collections.abc import Callable
from typing import Any

import torch
from library_imports import import_library
from models import D, H, LoRA, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrize

SUBMODULES = (
    "norm1", "attn", "attn.qkv", "attn.attn_drop", "attn.proj", "attn.proj_drop", "ls1", "drop_path1",
    "norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2", "mlp.drop2", "ls2", "drop_path2",
)  # fmt: skip
EDITED, LAYERS = ("norm1", "attn", "mlp", "mlp.fc2", ""), ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
Undo = Callable[[], Any]
X, DY = tokens(dtype=torch.float32)


def result(block: nn.Module) -> list[Tensor]:
    """Return the output and the gradients of the input and of the parameters, by name."""
    x = X.clone().requires_grad_()
    torch.manual_seed(3)
    y = block(x)
    parameters = [p for _, p in sorted(block.named_parameters()) if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], DY, allow_unused=True, materialize_grads=True)]


def attribute(path: str, name: str, value: Any) -> Callable[[nn.Module], Undo]:
    def change(block: nn.Module) -> Undo:
        module = block.get_submodule(path)
        if not hasattr(module, name):  # of timm's modules alone
            return lambda: None
        before = getattr(module, name)
        setattr(module, name, value)
        return lambda: setattr(module, name, before)

    return change


def new_attribute(path: str, name: str, value: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Undo]:
    def change(block: nn.Module) -> Undo:
        module = block.get_submodule(path)
        setattr(module, name, value(module))
        return lambda: delattr(module, name)

    return change


def hook(register: str, path: str, function: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Undo]:
    return lambda block: getattr(block.get_submodule(path), register)(function, **options).remove


def replaced(path: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Undo]:
    def change(block: nn.Module) -> Undo:
        before = block.get_submodule(path)
        torch.manual_seed(5)
        block.set_submodule(path, make(before))
        return lambda: block.set_submodule(path, before)

    return change


def parameter(path: str, name: str, make: Callable[[nn.Module], nn.Parameter | None]) -> Callable[[nn.Module], Undo]:
    def change(block: nn.Module) -> Undo:
        module = block.get_submodule(path)
        before = module._parameters[name]
        setattr(module, name, make(module))
        return lambda: setattr(module, name, before)

    return change


def no_parameter(path: str, name: str, set_tensor: Callable[[nn.Module, str, Tensor], None]) -> Callable[..., Undo]:
    """A tensor instead of a parameter, as FSDP has them."""

    def change(block: nn.Module) -> Undo:
        module = block.get_submodule(path)
        before = module._parameters.pop(name)
        set_tensor(module, name, before.detach() * 2)

        def undo() -> None:
            delattr(module, name)
            module.register_parameter(name, before)

        return undo

    return change


def norm_added(block: nn.Module) -> Undo:
    """Ours has none before, timm's an identity."""
    before = block.mlp._modules.get("norm")
    block.mlp.norm = nn.LayerNorm(4 * D)
    return lambda: delattr(block.mlp, "norm") if before is None else setattr(block.mlp, "norm", before)


def in_place(path: str, change: Callable[[Tensor], Any], undo: Callable[[Tensor], Any]) -> Callable[[nn.Module], Undo]:
    def run(block: nn.Module) -> Undo:
        change(block.get_parameter(path).data)
        return lambda: undo(block.get_parameter(path).data)

    return run


def mode(path: str) -> Callable[[nn.Module], Undo]:
    return lambda block: block.get_submodule(path).eval().train


def class_forward(block: nn.Module) -> Undo:
    """Replace it once, for both blocks."""
    forward = nn.GELU.forward
    if forward.__name__ != "doubled":

        def doubled(self: nn.GELU, x: Tensor) -> Tensor:
            return forward(self, x) * 2

        nn.GELU.forward = doubled  # type: ignore[method-assign]
        return lambda: setattr(nn.GELU, "forward", forward)
    return lambda: None


class Doubled(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def another_class(block: nn.Module) -> Undo:
    block.mlp.act.__class__ = Doubled
    return lambda: setattr(block.mlp.act, "__class__", nn.GELU)


def frozen(block: nn.Module) -> Undo:
    block.mlp.fc1.requires_grad_(False)
    return lambda: block.mlp.fc1.requires_grad_()


def parametrized(block: nn.Module) -> Undo:
    layer = block.mlp.fc1
    before = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", nn.Softplus(), unsafe=True)

    def undo() -> None:
        parametrize.remove_parametrizations(layer, "weight")
        layer.weight.data.copy_(before)

    return undo


def weight_normed(block: nn.Module) -> Undo:
    nn.utils.weight_norm(block.mlp.fc2)
    block.mlp.fc2.weight_g.data.mul_(2)

    def undo() -> None:
        block.mlp.fc2.weight_g.data.div_(2)
        nn.utils.remove_weight_norm(block.mlp.fc2)

    return undo


def heads(block: nn.Module) -> Undo:
    def set_heads(number: int) -> None:
        block.attn.num_heads, block.attn.head_dim = number, D // number

    set_heads(2)
    return lambda: set_heads(H)


def adapter(block: nn.Module) -> Undo:
    """peft's, added to qkv."""
    before, peft = block.attn.qkv, import_library("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=["attn.qkv"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, nn.Sequential(block))  # which gets its configuration as an attribute
    return lambda: block.set_submodule("attn.qkv", before)


def with_adapter(change: str, undo: str) -> Callable[[nn.Module], Undo]:
    """Change the adapter after a call with it."""

    def run(block: nn.Module) -> Undo:
        remove = adapter(block)
        result(block)
        getattr(block.attn.qkv, change)()

        def back() -> None:
            getattr(block.attn.qkv, undo)()
            result(block)
            remove()

        return back

    return run


def quantised(layer: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(layer).eval(), {nn.Linear})[0]


def doubled_result(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def edited_result(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.mul_(1.5).add_(1.0)


def noise(module: nn.Module) -> nn.Parameter:
    return nn.Parameter(torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(2)) * 0.1)


CHANGES: dict[str, Callable[[nn.Module], Undo]] = {
    "another layer": replaced("mlp.fc1", lambda old: nn.Linear(old.in_features, old.out_features)),
    "another activation": replaced("mlp.act", lambda _: nn.ReLU()),
    "an activation without an op": replaced("mlp.act", lambda _: nn.Tanh()),
    "no LayerScale": replaced("ls1", lambda _: nn.Identity()),
    "a quantised layer": replaced("mlp.fc1", quantised),
    **{f"forward hook of {path}": hook("register_forward_hook", path, doubled_result) for path in (*SUBMODULES, "")},
    **{f"edit after {path}": hook("register_forward_hook", path, edited_result) for path in EDITED},
    **{f"adapter in {path}": replaced(path, LoRA) for path in LAYERS},
    "forward hook first": hook("register_forward_hook", "attn.proj", doubled_result, prepend=True),
    "forward pre-hook": hook("register_forward_pre_hook", "mlp.fc1", lambda _, args: (args[0] * 2,)),
    "backward hook": hook("register_full_backward_hook", "attn.proj", lambda _, grads, __: (grads[0] * 2,)),
    "backward pre-hook": hook("register_full_backward_pre_hook", "norm2", lambda _, grads: (grads[0] * 2,)),
    "own forward": new_attribute("mlp.fc2", "forward", lambda m: lambda x: type(m).forward(m, x) * 2),
    "the class's forward": class_forward,
    "another class": another_class,
    "a parameter": parameter("norm1", "weight", noise),
    "a weight": parameter("mlp.fc1", "weight", noise),
    "a parameter in place": in_place("attn.qkv.weight", lambda t: t.mul_(2), lambda t: t.div_(2)),
    "no bias": parameter("attn.proj", "bias", lambda _: None),
    "a bias": parameter("attn.qkv", "bias", lambda m: nn.Parameter(torch.ones(len(m.weight)))),
    "a plain tensor": no_parameter("norm1", "weight", setattr),
    "a buffer": no_parameter("mlp.fc1", "bias", nn.Module.register_buffer),
    "a norm before fc2": norm_added,
    "frozen": frozen,
    "parametrized": parametrized,
    "weight norm": weight_normed,
    "evaluation": mode(""),
    "evaluation of stochastic depth": mode("drop_path2"),
    "stochastic depth": attribute("drop_path1", "drop_prob", 1.0),
    "kept samples not scaled": attribute("drop_path2", "scale_by_keep", False),
    "dropout": attribute("attn.proj_drop", "p", 1.0),
    "eps": attribute("norm1", "eps", 0.5),
    "approximate": attribute("mlp.act", "approximate", "tanh"),
    "scale": attribute("attn", "scale", 0.5),
    "fused_attn": attribute("attn", "fused_attn", True),
    "heads": heads,
    "LoRA": adapter,
    "LoRA merged": with_adapter("merge", "unmerge"),
}
