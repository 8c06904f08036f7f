"""Names of torch that are not public, each looked up once at import; None if this torch lacks it. Every user of one has
a slower way without it."""

from __future__ import annotations

from typing import Any

import torch

PATHS: list[str] = []  # all names looked up here


def _find(path: str) -> Any:
    PATHS.append(path)
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


# what tells whether a call is observed
len_torch_dispatch_stack = _find("_C._len_torch_dispatch_stack")
is_torch_function_mode_enabled = _find("_C._is_torch_function_mode_enabled")
are_functorch_transforms_active = _find("_C._are_functorch_transforms_active")
is_any_autocast_enabled = _find("_C._is_any_autocast_enabled")
is_tracing = _find("_C._is_tracing")
profiler_enabled = _find("autograd._profiler_enabled")
is_zerotensor = _find("Tensor._is_zerotensor")

TensorGuards = _find("_C._dynamo.guards.TensorGuards")  # compares tensors with a signature in C++
clear_saved_tensors = _find("autograd.function.BackwardCFunction.maybe_clear_saved_tensors")
unwrap_if_dead = _find("_C._functorch.unwrap_if_dead")
has_forward_level = _find("autograd.forward_ad._current_level") is not None
# batched gradients: what torch.autograd.grad(is_grads_batched=True) maps over a backward pass
is_batched_gradient = _find("_C._functorch.is_legacy_batchedtensor")
add_batch_dim = _find("_add_batch_dim")
remove_batch_dim = _find("_remove_batch_dim")
set_dispatch_key_included = _find("_C._dispatch_tls_set_dispatch_key_included")
# what captures graphs
top_saved_tensors_hooks = _find("_C._autograd._top_saved_tensors_default_hooks")
after_backward = _find("autograd.Variable._execution_engine.queue_callback")  # runs a function after a backward pass
foreach_clone = _find("_foreach_clone")
StorageWeakRef = _find("multiprocessing.reductions.StorageWeakRef")  # tells whether memory was freed
storage_expired = _find("UntypedStorage._expired")  # its method, in a tenth of the time
# what records and replays calls
current_function_mode = _find("overrides._get_current_function_mode")
DisableTorchFunction = _find("_C.DisableTorchFunction")
FakeTensor = _find("_subclasses.fake_tensor.FakeTensor")  # studies plan with it
select_conv_backend = _find("_C._select_conv_backend")  # whose scratch memory they plan
gelu_ = _find("_C._nn.gelu_")  # F.gelu has no in-place form
flash_attention = _find("ops.aten._scaled_dot_product_flash_attention_for_cpu.default")
flash_attention_backward = _find("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
fused_sdp_choice = _find("_fused_sdp_choice")
softmax_backward = _find("_softmax_backward_data")
