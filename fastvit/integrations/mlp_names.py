"""Read MLPs of all libraries: a row for each set of names that their layers have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastvit.blocks import read_mlp as timm
from fastvit.blocks.read_mlp import layout
from fastvit.blocks.spec import MlpSpec

_LAYOUTS = {
    **timm.LAYOUTS,
    "drop": layout("fc1", "act", "fc2", "drop drop"),
    "dropout1": layout("fc1", "activation_fn", "fc2", "dropout1 dropout2"),
    "activation_fn": layout("fc1", "activation_fn", "fc2"),
    "activation": layout("fc1", "activation", "fc2"),  # Dinov2 in earlier versions of transformers
    "gate_proj": layout("gate_proj up_proj", "act_fn", "down_proj", gated=True),
    "up_proj": layout("up_proj", "act_fn", "down_proj"),
    "weights_in": layout("weights_in", None, "weights_out", gated=True),
    "lin1": layout("lin1", "act", "lin2"),
    "w12": layout("w12", None, "w3", gated=True),
    "w1": layout("w1 w2", None, "w3", gated=True),
    "linear_fc1": layout("linear_fc1", "act_fn", "linear_fc2"),
    "act": layout("fc1", "act", "fc2"),
    "c_fc": layout("c_fc", "gelu", "c_proj"),
    "3": layout("0", "1", "3", "2 4"),
}
read_mlp: Callable[..., MlpSpec] = partial(timm.read_mlp, layouts=_LAYOUTS)
