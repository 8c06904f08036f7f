"""Records every self-attention of one forward pass, with q and k after projection, norm and rotation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastvit.ops.attention.groups import unpacked

_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
_CAUGHT = "fastvit::patch_embed_fwd", "fastvit::attention_fwd", "aten::convolution"


class Patches(NamedTuple):
    """The patches that the first patch embedding made: (h, w) of them, and (height, width) of one in pixels."""

    grid: tuple[int, int]
    size: tuple[int, int]


class AttentionCall(NamedTuple):
    """One call of self-attention on one image.

    Attributes:
        layer: its number in the order of the forward pass, from 0.
        q, k: (H, N, d), views of the model's tensors.
        scale: of the scores.
        bias: (H, N, N) added to the scores, such as relative positions and masks, or None.
        patches: of the image, or None if no patch embedding ran before.
        unseen: why weights cannot be computed from this call, with empty q and k. Otherwise "".
    """

    layer: int
    q: Tensor
    k: Tensor
    scale: float
    bias: Tensor | None
    patches: Patches | None
    unseen: str = ""


class _Catches:
    """The methods of `_Catcher`. They are in a base class, because torch imports its compiler, which takes seconds, to
    wrap a `__torch_dispatch__` that the mode's own class defines."""

    on_call: Callable[[AttentionCall], None]
    calls = 0
    patches: Patches | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in (*_CAUGHT, *_SOFTMAX) or name.startswith("aten::_scaled_dot_product_"):
            self._catch(name, _by_name(func, args, kwargs or {}), result)
        return result

    def _catch(self, name: str, given: dict[str, Any], result: Any) -> None:
        if name == "fastvit::patch_embed_fwd":
            (*_, H, W), (*_, ph, pw) = given["image"].shape, given["weight"].shape
            if given["weight"].dim() == 4:  # maps are drawn on images
                self._saw_patches((H // ph, W // pw), (ph, pw))
        elif name == "aten::convolution":
            kernel, stride = list(given["weight"].shape[2:]), list(given["stride"])
            if len(kernel) == 2 and kernel == stride and max(kernel) > 1:
                self._saw_patches(result.shape[2:], kernel)
        elif name == "fastvit::attention_fwd":
            self._attention(given, result[0])
        elif name.startswith("aten::_scaled_dot_product_"):
            self._attends(given["query"], given["key"], given)
        elif name in _SOFTMAX and result.dim() > 2 and result.shape[-1] == result.shape[-2] > 1:
            N = result.shape[-1]
            seen = "only fastvit's ops and PyTorch's fused scaled_dot_product_attention are"
            self._attends(result, result, {}, f"it computes {N} x {N} weights ({name}), and {seen}")

    def _attention(self, given: dict[str, Any], o: Tensor) -> None:
        q, k, _ = unpacked(given["q"], given["k"], given["v"])
        if given.get("ends") is not None:
            unseen = "it is within sequences of several lengths"
        elif given.get("rows") is not None:
            unseen = "it has relative positions"
        elif given.get("window"):
            unseen = "it is within windows"
        else:
            self._attends(q.transpose(1, 2), k.transpose(1, 2), given)
            return
        if given.get("ends_k") is None:  # else pooling
            self._attends(o, o, {}, unseen)

    def _saw_patches(self, grid: Sequence[int], size: Sequence[int]) -> None:
        if self.patches is None:
            self.patches = Patches((grid[0], grid[1]), (size[0], size[1]))

    def _attends(self, q: Tensor, k: Tensor, given: dict[str, Any], unseen: str = "") -> None:
        if q.shape[-2] != k.shape[-2]:
            return  # a pooling head, which attends from few tokens to all
        if not unseen and (given.get("is_causal") or given.get("causal")):
            unseen = "it is causal"
        elif not unseen and (q.dim() != 4 or q.shape[0] != 1):
            unseen = f"it is over {q.shape[0]} sequences of {q.shape[-2]} tokens, as in windows"
        scale, bias = given.get("scale"), given.get("attn_mask", given.get("attn_bias", given.get("mask")))
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        if unseen:
            q = k = q.new_empty(0)
            bias = None
        else:
            q, k = q[0], k[0].repeat_interleave(q.shape[1] // k.shape[1], 0)
            if bias is not None and bias.dtype is torch.bool:
                bias = q.new_zeros(bias.shape).masked_fill(~bias, -torch.inf)
            bias = None if bias is None else bias.expand(1, *q.shape[:2], q.shape[1])[0]
        self.calls += 1
        self.on_call(AttentionCall(self.calls - 1, q, k, scale, bias, self.patches, unseen))


class _Catcher(_Catches, TorchDispatchMode):
    """Sees every op that a model runs. Under a mode fastvit's ops go through the dispatcher too."""

    def __init__(self, on_call: Callable[[AttentionCall], None]) -> None:
        super().__init__()
        self.on_call = on_call


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments of an op by their names in the schema."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs


def run(model: nn.Module, image: Tensor, on_call: Callable[[AttentionCall], None]) -> int:
    """Run model(image) once, in evaluation mode and without gradients, and call on_call for every self-attention.
    Compiled parts of the model run uncompiled.

    Returns:
        The number of calls.
    """
    training = {module: module.training for module in model.modules()}
    catcher = _Catcher(on_call)
    fast = torch.backends.mha.get_fastpath_enabled()  # nn.MultiheadAttention in one op, projections included
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), _without_compiler(), catcher:
            model(image)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, was in training.items():
            module.training = was
    return catcher.calls


def _without_compiler() -> contextlib.AbstractContextManager[Any]:
    """Keep torch.compile from compiling. Skip if torch._dynamo is not imported: importing it takes seconds."""
    compiler = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiler else contextlib.nullcontext()
