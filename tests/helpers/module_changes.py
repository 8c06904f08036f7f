"""Changes of a transformer block with timm's names: what a description of the block has to follow."""

from collections.abc import Callable
from typing import Any

import torch
from library_imports import import_library
from models import D, LoRA, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrize

SUBMODULES = (
    "norm1", "attn", "attn.qkv", "attn.attn_drop", "attn.proj", "attn.proj_drop", "ls1", "drop_path1",
    "norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2", "mlp.drop2", "ls2", "drop_path2",
)  # fmt: skip
EDITED, LAYERS = ("norm1", "attn", "mlp", "mlp.fc2", ""), ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
Change = Callable[[nn.Module], Any]
X, DY = tokens(dtype=torch.float32)


def result(block: nn.Module) -> list[Tensor]:
    """Return the output and the gradients of the input and of the parameters, by name."""
    x = X.clone().requires_grad_()
    torch.manual_seed(3)
    y = block(x)
    parameters = [p for _, p in sorted(block.named_parameters()) if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], DY, allow_unused=True, materialize_grads=True)]


def undo_of(block: nn.Module) -> Callable[[], None]:
    """Return a function that gives the block, and the modules in it now, the state that they have now: attributes,
    hooks, submodules, parameters with their values, and classes with the forward of GELU."""
    classes = [(module, type(module)) for module in block.modules()]
    attributes = [vars(module) for module, _ in classes]
    inside = [held for names in attributes for held in names.values() if isinstance(held, dict)]
    dicts = [(held, held.copy()) for held in (*attributes, *inside)]
    values = [(p, p.requires_grad, p.detach().clone()) for p in block.parameters()]
    forward = nn.GELU.forward

    def undo() -> None:
        for module, kind in classes:
            module.__class__ = kind
        for held, before in dicts:
            held.clear()
            held.update(before)
        for parameter, requires_grad, value in values:
            parameter.requires_grad_(requires_grad).data.copy_(value)
        if nn.GELU.forward is not forward:
            nn.GELU.forward = forward  # type: ignore[method-assign]

    return undo


def attribute(path: str, name: str, value: Any) -> Change:
    def change(block: nn.Module) -> None:
        module = block.get_submodule(path)
        if hasattr(module, name):  # some are of timm's modules alone
            setattr(module, name, value)

    return change


def hook(register: str, path: str, function: Callable[..., Any], **options: Any) -> Change:
    return lambda block: getattr(block.get_submodule(path), register)(function, **options)


def replaced(path: str, make: Callable[[nn.Module], nn.Module]) -> Change:
    def change(block: nn.Module) -> None:
        torch.manual_seed(5)
        block.set_submodule(path, make(block.get_submodule(path)))

    return change


def parameter(path: str, name: str, make: Callable[[nn.Module], nn.Parameter | None]) -> Change:
    def change(block: nn.Module) -> None:
        module = block.get_submodule(path)
        setattr(module, name, make(module))

    return change


def no_parameter(path: str, name: str, set_tensor: Callable[[nn.Module, str, Tensor], None]) -> Change:
    """A tensor instead of a parameter, as FSDP has them."""

    def change(block: nn.Module) -> None:
        module = block.get_submodule(path)
        set_tensor(module, name, module._parameters.pop(name).detach() * 2)

    return change


def own_forward(block: nn.Module) -> None:
    layer = block.mlp.fc2
    layer.forward = lambda x: type(layer).forward(layer, x) * 2


def class_forward(block: nn.Module) -> None:
    forward = nn.GELU.forward
    nn.GELU.forward = lambda self, x: forward(self, x) * 2  # type: ignore[method-assign]


class Doubled(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def another_class(block: nn.Module) -> None:
    block.mlp.act.__class__ = Doubled


def another_block_class(block: nn.Module) -> None:
    """Give it a class that overrides forward, as token merging does."""
    kind: Any = type(block)
    block.__class__ = type("Halved", (kind,), {"forward": lambda self, x: kind.forward(self, x) / 2})


def parametrized(block: nn.Module) -> None:
    parametrize.register_parametrization(block.mlp.fc1, "weight", nn.Softplus(), unsafe=True)


def weight_normed(block: nn.Module) -> None:
    nn.utils.weight_norm(block.mlp.fc2)
    block.mlp.fc2.weight_g.data.mul_(2)


def two_heads(block: nn.Module) -> None:
    block.attn.num_heads, block.attn.head_dim = 2, D // 2


def attention_drop_in_evaluation(block: nn.Module) -> None:
    block.attn.attn_drop = nn.Dropout(0.5).eval()


def adapter(block: nn.Module) -> None:
    """peft's, added to qkv."""
    peft = import_library("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=["attn.qkv"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, nn.Sequential(block))  # which gets its configuration as an attribute


def merged_adapter(block: nn.Module) -> None:
    """Merged after a call with it."""
    adapter(block)
    result(block)
    block.attn.qkv.merge()


def quantised(layer: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(layer).eval(), {nn.Linear})[0]


def doubled_result(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def edited_result(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.mul_(1.5).add_(1.0)


def noise(module: nn.Module) -> nn.Parameter:
    return nn.Parameter(torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(2)) * 0.1)


CHANGES: dict[str, Change] = {
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
    "own forward": own_forward,
    "the class's forward": class_forward,
    "another class": another_class,
    "another class of the block": another_block_class,
    "a parameter": parameter("norm1", "weight", noise),
    "a weight": parameter("mlp.fc1", "weight", noise),
    "a parameter in place": lambda block: block.attn.qkv.weight.data.mul_(2),
    "a sparse weight": parameter("mlp.fc1", "weight", lambda m: nn.Parameter(m.weight.detach().to_sparse_csr())),
    "no bias": parameter("attn.proj", "bias", lambda _: None),
    "a bias": parameter("attn.qkv", "bias", lambda m: nn.Parameter(torch.ones(len(m.weight)))),
    "a plain tensor": no_parameter("norm1", "weight", setattr),
    "a buffer": no_parameter("mlp.fc1", "bias", nn.Module.register_buffer),
    "a norm before fc2": lambda block: block.mlp.add_module("norm", nn.LayerNorm(4 * D)),
    "frozen": lambda block: block.mlp.fc1.requires_grad_(False),
    "parametrized": parametrized,
    "weight norm": weight_normed,
    "evaluation": lambda block: block.eval(),
    "evaluation of attention's dropout": attention_drop_in_evaluation,
    "evaluation of stochastic depth": lambda block: block.drop_path2.eval(),
    "stochastic depth": attribute("drop_path1", "drop_prob", 1.0),
    "kept samples not scaled": attribute("drop_path2", "scale_by_keep", False),
    "dropout": attribute("attn.proj_drop", "p", 1.0),
    "eps": attribute("norm1", "eps", 0.5),
    "approximate": attribute("mlp.act", "approximate", "tanh"),
    "scale": attribute("attn", "scale", 0.5),
    "fused_attn": attribute("attn", "fused_attn", True),
    "heads": two_heads,
    "LoRA": adapter,
    "LoRA merged": merged_adapter,
}
