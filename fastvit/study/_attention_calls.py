"""Which attention a model runs: every call of one forward, with q and k as they are behind projection and rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastvit import ops  # noqa: F401  registers what is caught here

_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


class Call(NamedTuple):
    """Self-attention of one image, q and k as views of what the model has.

    layer: its number in the order of the forward, from 0.
    q, k: (H, N, d); scale: of the scores.
    grid: (h, w) of the patches, or None where no patch embedding ran before.
    unseen: why the above are not what weights could be computed from; q, k are empty then. Otherwise "".
    """

    layer: int
    q: Tensor
    k: Tensor
    scale: float
    grid: tuple[int, int] | None
    unseen: str = ""


class _Catcher(TorchDispatchMode):
    """Every op that a model runs comes by: under a mode fastvit's are registered ops too."""

    def __init__(self, on_call: Callable[[Call], None]) -> None:
        super().__init__()
        self.on_call = on_call
        self.calls = 0
        self.grid: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        caught = name.startswith(("fastvit::", "aten::_scaled_dot_product_")) or name in (
            *_SOFTMAX,
            "aten::convolution",
        )
        if caught and "backward" not in name:
            self._catch(name, _by_name(func, args, kwargs or {}), result)
        return result

    def _catch(self, name: str, given: dict[str, Any], result: Any) -> None:
        if name == "fastvit::patch_embed_fwd":
            self._saw_patches(
                [i // p for i, p in zip(given["image"].shape[2:], given["weight"].shape[2:], strict=True)]
            )
        elif name == "aten::convolution":
            kernel, stride = list(given["weight"].shape[2:]), list(given["stride"])
            if len(kernel) == 2 and kernel == stride and max(kernel) > 1:
                self._saw_patches(list(result.shape[2:]))
        elif name == "fastvit::attention_qkvpacked_fwd":
            q, k, _ = given["qkv"].transpose(1, 3).unbind(2)
            self._attends(q, k, given)
        elif name == "fastvit::attention_fwd":
            self._attends(given["q"].transpose(1, 2), given["k"].transpose(1, 2), given)
        elif name.startswith("aten::_scaled_dot_product_"):
            q, k = given["query"], given["key"]
            if q.shape[-2] == k.shape[-2]:  # else from few tokens to all, as heads pool: no layer
                biased = given.get("attn_mask", given.get("attn_bias")) is not None
                self._attends(q, k, given, "it has a mask, or a bias of its scores" if biased else "")
        elif name in _SOFTMAX and result.dim() > 2 and result.shape[-1] == result.shape[-2] > 1:
            N = result.shape[-1]
            self._attends(
                result, result, {}, f"it computes {N} x {N} weights of its own ({name}), by neither fastvit's ops nor "
                "scaled_dot_product_attention",
            )  # fmt: skip

    def _saw_patches(self, grid: list[int]) -> None:
        if self.grid is None:
            self.grid = grid[0], grid[1]

    def _attends(self, q: Tensor, k: Tensor, given: dict[str, Any], unseen: str = "") -> None:
        if not unseen:
            unseen = _unusable(q, k, given)
        scale = given.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        q, k = (q.new_empty(0), q.new_empty(0)) if unseen else (q[0], k[0])
        self.calls += 1
        self.on_call(Call(self.calls - 1, q, k, scale, self.grid, unseen))


def _unusable(q: Tensor, k: Tensor, given: dict[str, Any]) -> str:
    """Why weights of (B, H, N, d) each are not one image's softmax(q k^T); "" if they are."""
    if given.get("is_causal"):
        return "it is causal"
    if q.dim() != 4 or q.shape[0] != 1:
        return f"it is over {q.shape[0]} sequences of {q.shape[-2]} tokens, as in windows"
    if q.shape != k.shape:
        return f"its keys have {k.shape[1]} heads and its queries {q.shape[1]}"
    return ""


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an op by the names in its schema; those that are left out are absent."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs


def run(model: nn.Module, image: Tensor, on_call: Callable[[Call], None]) -> int:
    """model(image) once, in evaluation mode and without gradients; on_call gets every self-attention in turn.

    Returns:
        how many there were.
    """
    training = {module: module.training for module in model.modules()}
    catcher = _Catcher(on_call)
    fast = torch.backends.mha.get_fastpath_enabled()  # of nn.MultiheadAttention: one op with its projections in it
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), catcher:
            model(image)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, was in training.items():
            module.training = was
    return catcher.calls
