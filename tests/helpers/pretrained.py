"""The trained DINOv2 ViT-S/14 of benchmarks/harness/pretrained.py: its weights under other names, and its outputs in
ONNX Runtime. Tests are skipped where a package is missing."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.harness import pretrained

DEPTH = 12


def graph_path() -> Path:
    """Return the ONNX file; skip the test where a package is missing."""
    for package in ("onnxruntime", "skimage"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    try:
        return pretrained.graph_path()
    except ImportError as error:
        pytest.skip(str(error))


def state_dict() -> dict[str, Tensor]:
    """Return the weights under the names of `Dinov2Model`'s files (transformers 4)."""
    graph_path()  # skips
    return pretrained.state_dict()


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
