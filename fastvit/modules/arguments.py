"""Checks of constructors' arguments before a parameter is made: each names the argument, its value, what is allowed."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import nn

from fastvit._base.keywords import check_known
from fastvit.ops.runtime.checks import FLOATS, check_head_dim, check_is_there, check_statistics
from fastvit.ops.runtime.torch_private import len_torch_dispatch_stack

Pair = int | tuple[int, int]
Device = torch.device | str | None
Dtype = torch.dtype | None
_Module = TypeVar("_Module", bound=nn.Module)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integers(least: int, **values: Any) -> None:
    for name, value in values.items():
        if not _is_integer(value):
            raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def check_flags(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, bool) and not (_is_integer(value) and value in (0, 1)):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_flags_or_none(**values: Any) -> None:
    check_flags(**{name: value for name, value in values.items() if value is not None})


def check_number(name: str, value: Any, allowed: Callable[[float], bool], meaning: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {meaning}, got {value!r}")
    if not allowed(float(value)):
        raise ValueError(f"{name} must be {meaning}, got {value}")


def check_rates(**values: Any) -> None:
    """Check dropout rates, which the ops take in [0, 1)."""
    for name, value in values.items():
        check_number(name, value, lambda p: 0.0 <= p < 1.0, "in [0, 1)")


def check_probabilities(**values: Any) -> None:
    for name, value in values.items():
        check_number(name, value, lambda p: 0.0 <= p <= 1.0, "in [0, 1]")


def check_eps(eps: Any) -> None:
    check_number("eps", eps, lambda value: 0.0 <= value < math.inf, "finite and not negative")


def check_init_values(init_values: Any) -> None:
    if init_values is not None:
        check_number("init_values", init_values, math.isfinite, "a finite number, or None for no LayerScale")


def check_factory(device: Any = None, dtype: Any = None) -> None:
    if dtype is not None and dtype not in FLOATS:
        raise TypeError(f"dtype must be None, float32, float16, bfloat16 or float64, got {dtype!r}")
    if device is not None:
        try:
            where = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device must be None, a torch.device or the name of one, got {device!r}") from error
        if len_torch_dispatch_stack is not None and not len_torch_dispatch_stack():  # fake tensors may be on any device
            check_is_there(where)


def check_heads(dim_name: str, dim: Any, num_heads: Any) -> None:
    """Check the number of heads: exactly the head dimensions that `ops.attention` takes are allowed."""
    check_integers(1, **{dim_name: dim, "num_heads": num_heads})
    if dim % num_heads:
        raise ValueError(f"num_heads must be a divisor of {dim_name} = {dim}, got {num_heads}")
    check_head_dim(f"head_dim = {dim_name} / num_heads = {dim} / {num_heads}", dim // num_heads)


def check_hidden(dim_name: str, dim: int, mlp_ratio: Any, name: str = "mlp_ratio") -> None:
    """Check that the MLP's width, int(dim * mlp_ratio), is at least 1."""
    meaning = f"a finite number with {dim_name} * {name} >= 1, where {dim_name} = {dim}"
    check_number(name, mlp_ratio, lambda ratio: 1 <= dim * ratio < math.inf, meaning)


def checked_pair(name: str, value: Any) -> tuple[int, int]:
    """Return (height, width), from one integer or two."""
    both = (value, value) if _is_integer(value) else value
    if isinstance(both, str) or not isinstance(both, Sequence) or not all(map(_is_integer, both)):
        raise TypeError(f"{name} must be a positive integer or (height, width), got {value!r}")
    if len(both) != 2 or min(both) < 1:
        raise ValueError(f"{name} must be a positive integer or (height, width), got {value!r}")
    return int(both[0]), int(both[1])


def checked_indices(name: str, value: Any, count: int) -> list[int]:
    """Return the chosen ones of `count` blocks, counted from 0. value: their indices, counted from the end if negative,
    or how many of the last ones."""
    meaning = f"a number of last blocks from 1 to {count}, or blocks from {-count} to {count - 1}"
    if _is_integer(value):
        if not 1 <= value <= count:
            raise ValueError(f"{name} must be {meaning}, got {value}")
        return list(range(count - value, count))
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(_is_integer, value)):
        raise TypeError(f"{name} must be {meaning}, got {value!r}")
    if not value or not all(-count <= index < count for index in value):
        raise ValueError(f"{name} must be {meaning}, got {value!r}")
    return [int(index) % count for index in value]


Statistics = tuple[float, ...] | None


def checked_statistics(mean: Any, std: Any, in_chans: int) -> tuple[Statistics, Statistics]:
    """Return both as tuples, or None and None."""
    if (mean is None) != (std is None):
        raise ValueError(f"mean and std must both be given or both be None, got mean={mean!r} and std={std!r}")
    if mean is None:
        return None, None
    return check_statistics("mean", mean, in_chans), check_statistics("std", std, in_chans)


def check_choice(argument: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{argument} must be one of {allowed}, got {value!r}")


def by_name(argument: str, value: str | Callable[..., nn.Module], table: Mapping[str, Any]) -> Any:
    """Return table[value] for a name, or the class or other callable itself; a ValueError for an unknown name."""
    if not isinstance(value, str):
        if not callable(value):
            raise TypeError(f"{argument} must be a class or one of {sorted(table)}, got {value!r}")
        return value
    if value in table:
        return table[value]
    near = difflib.get_close_matches(value, table)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"{argument} must be a class or one of {sorted(table)}, got {value!r}{hint}")


# By the name of an argument whose value alone decides, in every constructor that has it
_CHECKS: dict[str, Callable[..., None]] = {
    name: check
    for check, names in (
        (functools.partial(check_integers, 1), "dim num_channels channels in_features in_chans embed_dim"),
        (functools.partial(check_integers, 0), "num_prefix_tokens align_to swiglu_align_to"),
        (check_rates, "attn_drop proj_drop drop"),
        (check_probabilities, "drop_path drop_prob"),
        (check_flags, "elementwise_affine gate_last swiglu_mlp scale_mlp bias qkv_bias k_bias proj_bias qk_norm"),
        (
            check_flags,
            "qkv_fused rotate_half rope_rotate_half scale_by_keep strict_img_size dynamic_img_size class_token",
        ),
        (check_flags, "no_embed_class pre_norm final_norm use_abs_pos_emb use_rot_pos_emb use_pre_transformer_norm"),
        (_check_flags_or_none, "fc_norm use_fc_norm use_post_transformer_norm"),
        (check_factory, "device dtype"),
        (check_eps, "eps"),
        (check_init_values, "init_values"),
    )
    for name in names.split()
}


@functools.cache
def _known(kind: type) -> tuple[str, ...]:
    """Return the names of a constructor's arguments; those of its bases too if it passes further ones on."""
    known: dict[str, None] = {}  # without repeats, in their order
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        parameters = inspect.signature(each).parameters.values()
        known.update(dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD))
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return tuple(known)


def check_arguments(given: Iterable[str], kind: type, what: str | None = None) -> None:
    """Check the names of a constructor's keyword arguments. what: what takes them, in an error; the class if None."""
    check_known(given, _known(kind), what or kind.__name__)


def with_known_arguments(kind: type[_Module]) -> type[_Module]:
    """Decorate a module's class, so that its constructor first checks the names of its arguments and, by `_CHECKS`,
    their values."""
    construct, signature = kind.__init__, inspect.signature(kind)

    @functools.wraps(construct)
    def checked(self: _Module, *args: Any, **kwargs: Any) -> None:
        check_arguments(kwargs, kind)
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            if name in _CHECKS:
                _CHECKS[name](**{name: value})
        construct(self, *args, **kwargs)

    kind.__init__ = checked  # type: ignore[assignment, method-assign]
    return kind
