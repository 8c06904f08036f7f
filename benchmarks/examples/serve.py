"""Measure the latency of a timm model at batch 1, untouched and accelerated; on a GPU also with `fastvit.graphs`.

    python benchmarks/examples/serve.py --model vit_base_patch16_224

At batch 1 a GPU waits for its host, which queues kernels one by one; a CUDA graph queues all of them at once. The first
two calls warm up, the third is captured, later ones are replayed. On a CPU the accelerated model runs PyTorch's own
fused functions: fastvit's kernels are for GPUs.
"""

import copy
import sys
import time

import torch
from torch import Tensor, nn
from train import check_installed

import fastvit
from fastvit.cli import options, terminal

WARM_UP = 5


def latencies(models: dict[str, nn.Module], image: Tensor, rounds: int) -> dict[str, Tensor]:
    """Milliseconds of every call (rounds,), the models in turn: what slows the machine down for a while slows all."""
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(WARM_UP + rounds):
        for name, model in models.items():
            start = time.perf_counter()
            model(image)
            if image.is_cuda:
                torch.cuda.synchronize()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: torch.tensor(times[WARM_UP:]) for name, times in taken.items()}


def main() -> int:
    parser = terminal.Parser("serve.py", __doc__ or "")
    parser.add_argument("--model", default="vit_base_patch16_224", help="a Vision Transformer of timm")
    parser.add_argument("--pretrained", action="store_true", help="timm's weights, which it downloads")
    parser.add_argument("--rounds", type=options.count, default=100)
    args = parser.parse_args()
    print("serve.py: loading timm", file=sys.stderr)
    check_installed("timm", "torchvision")
    import timm.data

    if not timm.is_model(args.model):
        raise ValueError(f"--model must be a model of timm, got {args.model}")
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)

    print(f"serve.py: making {args.model}", file=sys.stderr)
    model = timm.create_model(args.model, pretrained=args.pretrained).to(device, dtype).eval().requires_grad_(False)
    image = torch.randn(1, *timm.data.resolve_model_data_config(model)["input_size"], device=device, dtype=dtype)
    accelerated = copy.deepcopy(model)
    print(fastvit.accelerate(accelerated))
    models: dict[str, nn.Module] = {"timm": model, "timm, accelerated": accelerated}
    if gpu:
        for name, each in list(models.items()):
            models[f"{name}, graphs"] = graphed = copy.deepcopy(each)
            fastvit.graphs(graphed)

    print(f"serve.py: calling each model {WARM_UP + args.rounds} times", file=sys.stderr)
    where = torch.cuda.get_device_name() if gpu else f"a CPU, {torch.get_num_threads()} threads, no kernel of fastvit"
    print(f"\n{args.model}, batch 1, {dtype}\non {where}")
    print(f"largest difference of the outputs {(accelerated(image) - model(image)).abs().max().item():.1e}")
    print(f"milliseconds, {args.rounds} calls, in turn\n")
    print(f"{'':30}{'median':>9}{'p99':>9}")
    for name, times in latencies(models, image, args.rounds).items():
        print(f"{name:30}{times.median().item():9.2f}{times.quantile(0.99).item():9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(terminal.guarded(main, name="serve.py"))
