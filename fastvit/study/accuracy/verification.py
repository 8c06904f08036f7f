"""Compare the fused ops with float64 on this machine, by the rule of `rule.py`: outputs and all gradients."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastvit import ops
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime.backend import KernelUnsupported
from fastvit.ops.runtime.checks import check_is_there
from fastvit.study.accuracy import cases, rule
from fastvit.study.accuracy.cases import HEAD_DIMS
from fastvit.study.sources import find, model_source

OPS = tuple(name for name in ops.__all__ if name not in ("Norm", "Relative", "Rotary", "use_backend"))
_BATCH = 2  # images for a whole model
_NOTHING = 1e-11  # a bias's gradient below this share of the weight's is zero but for float64's rounding


@dataclass(frozen=True)
class Verdict:
    """The result for one op, or for a whole model, in one dtype.

    Attributes:
        name: the op and what is special about the case; or the model's name.
        dtype: "float32", "bfloat16", "float16".
        head_dim: None for an op without heads.
        width, tokens: the case's.
        path: what ran it: "Triton", "interpreter" (Triton's) or "ATen".
        output: the worst error ratio of the outputs, error over (eager's error plus half an ulp), against float64. 1.0
            is as accurate as eager, and the rule allows 2. If the first draw of data has more, the ratio is that of
            four draws together. None if the op did not run.
        gradient: the worst ratio of the gradients, with a third of an ulp; the rule allows 3.
        worst: the tensor with that gradient.
        passed: whether the rule holds.
        note: why the rule does not hold, or why the op ran on ATen although Triton was wanted.
    """

    name: str
    dtype: str
    head_dim: int | None
    width: int
    tokens: int
    path: str
    output: float | None
    gradient: float | None
    worst: str
    passed: bool
    note: str = ""


def verify(
    model: str | None = None, *, dtypes: Sequence[str] | None = None, device: torch.device | str | None = None,
    head_dims: Sequence[int] | None = None, names: Sequence[str] | None = None, depth: int | None = None,
    step: Callable[[str], None] = lambda what: None,
) -> Iterator[Verdict]:  # fmt: skip
    """Run every public op and compare outputs and gradients with eager PyTorch in the same dtype, both against eager in
    float64. New memory is filled with NaN for the fused op. With a model, the ops have its sizes, and the model itself,
    with random parameters on two images of random pixels, is compared too. The op dropout is checked; the dropout
    options of other ops are not.

        all(verdict.passed for verdict in fastvit.study.verify(device="cuda"))

    Args:
        model: a name that a study takes (`fastvit.list_models()`, timm's, a config.json, module:function).
        dtypes: some of "float32", "bfloat16", "float16"; None for those that the device has.
        device: None for a GPU if there is one, else the CPU.
        head_dims: None for the model's; without a model 32, 64, 72, 80, 96 and 128. A Hopper GPU has large cases, too.
        names: of ops in `fastvit.ops`; None for all.
        depth: cut the model to so many blocks; None for all.
        step: called with the name of the next comparison.

    Yields:
        A verdict for each op, dtype and head dimension, then for the model in each dtype.

    Raises:
        ValueError: an unknown op, dtype, device or model; a depth without a model.
    """
    on = _device(device)
    kinds = _dtypes(dtypes, on)
    for given in (dtypes, head_dims, names):
        if given is not None and not given:
            raise ValueError("dtypes, head_dims and names must not be empty: nothing would be verified")
    if unknown := set(names or ()) - set(OPS):
        raise ValueError(f"no op is called {sorted(unknown)[0]!r}; the ops are {', '.join(OPS)}")
    if depth is not None and model is None:
        raise ValueError("depth is for a model, and none is given")
    subject = None if model is None else find.find(model)
    width, heads = (cases.WIDTH, cases.HEADS) if subject is None else _sizes(subject, depth)
    if head_dims is None:
        head_dims = HEAD_DIMS if subject is None else (width // heads,)
    if bad := [d for d in head_dims if d % 8 or not 16 <= d <= 256]:
        raise ValueError(f"a head dimension is a multiple of 8 from 16 to 256, got {bad[0]}")
    return _verdicts(subject, on, kinds, names, head_dims, width, min(heads, 4), depth, step)


def _verdicts(
    subject: model_source.ModelSource | None, device: torch.device, dtypes: dict[str, torch.dtype],
    names: Sequence[str] | None, head_dims: Sequence[int], width: int, heads: int, depth: int | None,
    step: Callable[[str], None],
) -> Iterator[Verdict]:  # fmt: skip
    several = cases.cases(names, head_dims, width, heads)
    if subject is None and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        several += [case for case in cases.large() if names is None or case.op in names]
    for case in several:
        for name, dtype in dtypes.items():
            step(f"{case.name} {name}")
            compared = functools.partial(_compared_op, case, dtype, device)
            yield _verdict(compared, device, case.name, name, case.head_dim, case.width, case.tokens)
    for name, dtype in dtypes.items() if subject is not None else ():
        assert subject is not None
        step(f"{subject.name} {name}")
        compared = functools.partial(_compared_model, subject, depth, dtype, device)
        (H, W), (h, w) = subject.sizes()
        yield _verdict(compared, device, subject.name, name, head_dims[0], width, (H // h) * (W // w))


def _verdict(
    compared: Callable[[bool, int], Iterator[rule.Compared]], device: torch.device,
    name: str, dtype: str, head_dim: int | None, width: int, tokens: int,
) -> Verdict:  # fmt: skip
    """compared: a function that yields what is compared, of whether what Triton cannot take raises, and of the draw."""
    path, note = _path(device), ""
    try:
        with _measured(device):
            try:
                ratios = rule.pooled_ratios(functools.partial(compared, True))
            except KernelUnsupported as reason:
                path, note = "ATen", str(reason)
                ratios = rule.pooled_ratios(functools.partial(compared, False))
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises where the error has ended the context: nothing can follow then
        note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Verdict(name, dtype, head_dim, width, tokens, path, None, None, "", False, note)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    output = max((ratio for what, ratio in ratios.items() if what.startswith("output")), default=0.0)
    gradients = {what[1:]: ratio for what, ratio in ratios.items() if not what.startswith("output")}
    worst = max(gradients, key=lambda what: gradients[what], default="")
    gradient = gradients.get(worst, 0.0)
    if math.isinf(max(output, gradient)):
        note = "; ".join(filter(None, (note, "not finite where the exact result is, or the reverse")))
    passed = output <= rule.OUTPUT and gradient <= rule.GRADIENT
    return Verdict(name, dtype, head_dim, width, tokens, path, output, gradient, worst, passed, note)


def _compared_op(
    case: cases.Case, dtype: torch.dtype, device: torch.device, strict: bool, draw: int
) -> Iterator[rule.Compared]:
    tensors = case.tensors(dtype, device, draw)
    return rule.compare(case.fused, case.eager, tensors, within=lambda: _fused(strict))


def _compared_model(
    subject: model_source.ModelSource,
    depth: int | None,
    dtype: torch.dtype,
    device: torch.device,
    strict: bool,
    draw: int,
) -> Iterator[rule.Compared]:
    found = []
    torch.manual_seed(draw)
    images = model_source.images_for(subject.on_meta("sdpa"), _BATCH, subject.image_size, dtype).to(device)
    # SDPA for the exact one: the eager attention of transformers computes its softmax in float32 for any input
    for provider, compute in (("fastvit", dtype), ("eager", dtype), ("sdpa", torch.float64)):
        module = _randomised(_built(subject, provider, depth), dtype).to(device, compute).eval()
        parameters = dict(module.named_parameters())
        with _fused(strict) if provider == "fastvit" else contextlib.nullcontext():
            out = model_source.output_of(module(images.to(compute)))
            dout = rule.gradient(out.to(dtype), seed=90).to(compute)
            gradients = torch.autograd.grad(out, list(parameters.values()), dout, allow_unused=True)
        found.append((out.detach(), dict(zip(parameters, gradients, strict=True))))
        del module, parameters, out
    (got, of_got), (same, of_same), (exact, of_exact) = found
    yield rule.Compared("output", got, same, exact)
    for name, expected in of_exact.items():
        if (of_got[name] is None) != (expected is None):
            raise ArithmeticError(f"{name} has a gradient on one side only")
        if expected is None:
            continue
        together = [name]
        weight = f"{name.removesuffix('bias')}weight"
        if name.endswith(".bias") and expected.abs().max() <= _NOTHING * of_exact.get(weight, expected).abs().max():
            together.append(weight)  # a bias of k does not change the softmax: its gradient is rounding of others
        parts = ([run[part].flatten() for part in together] for run in (of_got, of_same, of_exact))
        yield rule.Compared(f"d{name}", *map(torch.cat, parts))


def _of_depth(subject: model_source.ModelSource, depth: int | None) -> dict[str, Any]:
    name = "num_hidden_layers" if subject.origin == "transformers" else "depth"
    return {} if depth is None else {name: depth}


def _built(subject: model_source.ModelSource, provider: str, depth: int | None) -> nn.Module:
    if provider == "eager" and subject.origin == "function":
        provider = "sdpa"  # as its author wrote it
    return subject.build(provider, **_of_depth(subject, depth))


@torch.no_grad()
def _randomised(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Draw parameters by name, equal for every provider, representable in the dtype, and without the degenerate values
    of an initialisation."""
    for seed, (name, parameter) in enumerate(sorted(model.named_parameters())):
        t = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        of_norm = parameter.dim() == 1 and not name.endswith("bias")  # or LayerScale, under any name
        parameter.copy_(cases.values("weight" if of_norm else name, t).to(dtype))
    return model


@contextlib.contextmanager
def _fused(strict: bool) -> Iterator[None]:
    with ops.use_backend(backends.settings()[0], strict=strict), rule.poisoned():
        yield


@contextlib.contextmanager
def _measured(device: torch.device) -> Iterator[None]:
    """Within the context float32 convolutions do not use TF32, and warnings are off. The state of random numbers is
    restored afterwards."""
    cudnn = torch.backends.cudnn
    before, cudnn.allow_tf32 = cudnn.allow_tf32, False
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        cudnn.allow_tf32 = before


def _path(device: torch.device) -> str:
    if not backends.wants_triton(torch.empty(0, device=device)):
        return "ATen"
    return "interpreter" if backends.INTERPRET else "Triton"


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}")
    check_is_there(found)
    return found


def _dtypes(names: Sequence[str] | None, device: torch.device) -> dict[str, torch.dtype]:
    if names is None:
        has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
        return {name: dtype for name, dtype in model_source.DTYPES.items() if has_bf16 or name != "bfloat16"}
    if unknown := [name for name in names if name not in model_source.DTYPES]:
        raise ValueError(f"dtype must be one of {', '.join(model_source.DTYPES)}, got {unknown[0]!r}")
    return {name: model_source.DTYPES[name] for name in names}


def _sizes(subject: model_source.ModelSource, depth: int | None) -> tuple[int, int]:
    """Return width and number of heads of a model's attention."""
    model = subject.on_meta("sdpa", **_of_depth(subject, depth))
    for module in model.modules():
        heads = getattr(module, "num_heads", getattr(module, "num_attention_heads", None))
        linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
        if isinstance(heads, int) and linear is not None:
            return linear.in_features, heads
    raise ValueError(f"{subject.name} has no attention that says how many heads it has")
