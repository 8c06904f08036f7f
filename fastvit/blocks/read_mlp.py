"""Read MLPs, plain and gated: those of timm's names, ours included, and those of other `layouts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn

from fastvit.blocks.read import ACTIVATIONS, DROPOUT, LINEAR, Dropout, read_inner_norm, read_layer
from fastvit.blocks.spec import AdaptedLinear, MlpSpec
from fastvit.blocks.submodules import CannotFuse, Classes, qualified_name, submodules
from fastvit.ops import Norm
from fastvit.ops.runtime.activations import GATED


class Layout(NamedTuple):
    """The names of an MLP's layers. fc1: one layer, or those of gate and value. act: None if the class calls SiLU.
    drops: the dropouts after the activation and after fc2. gated: whether it is, if the class alone determines it.
    classes: those of all names."""

    fc1: tuple[str, ...]
    act: str | None
    fc2: str
    drops: tuple[str, ...]
    gated: bool
    classes: dict[str, Classes]


def layout(fc1: str, act: str | None, fc2: str, drops: str = "", gated: bool = False) -> Layout:
    names, dropouts = tuple(fc1.split()), tuple(drops.split())
    activation: dict[str, Classes] = {act: {*ACTIVATIONS}} if act else {}
    linear: dict[str, Classes] = dict.fromkeys((*names, fc2), LINEAR)
    return Layout(names, act, fc2, dropouts, gated, linear | activation | dict.fromkeys(dropouts, DROPOUT))


_TIMM = layout("fc1", "act", "fc2", "drop1 drop2")  # GluMlp too, whose attribute says that it is gated
# By the name of one layer: the first of these names that an MLP has decides
LAYOUTS = {"fc1_g": layout("fc1_g fc1_x", "act", "fc2", "drop1 drop2", gated=True), "drop1": _TIMM}
_SILU = nn.SiLU()


def read_mlp(mlp: Any, dropout: Dropout = None, layouts: Mapping[str, Layout] = LAYOUTS) -> MlpSpec:
    """Read an MLP. dropout: the one after it, if another module has it."""
    children = mlp._modules
    names = _TIMM
    for name in layouts:
        if name in children:
            names = layouts[name]
            break
    submodules(mlp, names.classes)
    if isinstance(mlp, nn.Sequential) and len(children) > len(names.classes):  # it calls all of them
        raise CannotFuse("further layers in it")
    for name, child in children.items():
        if type(child) is nn.Dropout and name not in names.drops and child.training and child.p:
            raise CannotFuse("a dropout in another place")
    act = _SILU if names.act is None else children[names.act]
    drop1, drop2 = (children[names.drops[0]], children[names.drops[1]]) if names.drops else (None, dropout)
    norm = read_inner_norm(mlp) if "norm" in children else None
    plain = describe_mlp(children[names.fc1[0]], act, children[names.fc2], drop1, drop2, norm)
    if not names.gated and "gate_last" not in mlp.__dict__:
        return plain
    for gated, activation in GATED.items():
        if activation == plain.activation:
            value = read_layer(children[names.fc1[1]]) if len(names.fc1) == 2 else None
            gate_last, adapted = mlp.__dict__.get("gate_last", False), plain.adapted or type(value) is AdaptedLinear
            return plain._replace(activation=gated, value=value, gate_last=gate_last, adapted=adapted)
    raise CannotFuse(f"a gate with {plain.activation}")


def describe_mlp(
    fc1: nn.Linear, act: nn.Module, fc2: nn.Linear, drop1: Dropout, drop2: Dropout, inner_norm: Norm | None = None
) -> MlpSpec:
    """Describe an MLP, after checking that the ops take its probabilities. act: of a class in ACTIVATIONS."""
    p1 = drop1.p if drop1 is not None and drop1.training else 0.0
    p2 = drop2.p if drop2 is not None and drop2.training else 0.0
    if p1 >= 1.0 or p2 >= 1.0:
        raise CannotFuse("a dropout of everything")
    if p1 not in (0.0, p2):
        raise CannotFuse(f"its two dropouts differ: {p1} and {p2}")
    if _calls_another(act):
        raise CannotFuse("an activation that calls another function")
    activation = ACTIVATIONS.get(type(act)) or ACTIVATIONS[qualified_name(act)]
    if act.__dict__.get("approximate") == "tanh":  # nn.GELU's
        activation = "gelu_tanh"
    first, last = read_layer(fc1), read_layer(fc2)
    adapted = AdaptedLinear in (type(first), type(last))
    return MlpSpec(first, last, activation, act, p1, p2, inner_norm=inner_norm, adapted=adapted)


def _calls_another(act: nn.Module) -> bool:
    """Return whether an activation holds a function, as transformers' do, that is neither GELU nor a method of its
    own."""
    held = vars(act).get("act")
    held = getattr(held, "func", held)  # a partial
    return held is not None and held is not F.gelu and getattr(held, "__self__", None) is not act
