"""Answer what reads numbers of the pretended GPU as if all were right: a plugin of pytest, or an import.

Kernels compute nothing there. Tests of values that have to differ, and of shapes that values decide, are skipped.
"""

import math

import pytest
import torch

from fastvit.study.accuracy import rule

BY_VALUES = (
    "test_what_an_option_changes", "test_a_tensor_that_is_there_twice",
    "test_weights_without_strides", "test_kernels_say_that_they_take_no_weights_without_strides",
    "test_without_private_names[all]", "test_replayed_calls_of_other_layouts[layer_norm_attention lengths-strided]",
    "test_gradients_of_replayed_calls[layer_norm_attention-saved without storage]",
    "test_gradients_of_replayed_calls[layer_norm_mlp gelu-saved without storage]",
)  # fmt: skip
_equal, _bool, _float = torch.equal, torch.Tensor.__bool__, torch.Tensor.__float__


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype if a.is_cuda or b.is_cuda else _equal(a, b)


def _truth(t: torch.Tensor) -> bool:
    return True if t.is_cuda and t.dtype is torch.bool else _bool(t)


def _number(t: torch.Tensor) -> float:
    """NaN, which is outside no range: what is in fresh memory is an accident."""
    return _float(t) * math.nan if t.is_cuda else _float(t)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith(BY_VALUES):
            item.add_marker(pytest.mark.skip(reason="depends on values"))


torch.equal = _same_kind
torch.Tensor.__bool__ = _truth
torch.Tensor.__float__ = _number
torch.testing.assert_close = lambda *_, **__: None
torch.nn.init.trunc_normal_ = lambda t, *_, **__: t  # draws until none of the values is too large
rule.errors = lambda got, eager, exact: ()
rule.misplaced = lambda got, exact: 0
