"""Reports what fastvit finds on this machine, which path every op takes, and what keeps it from running well."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fastvit._base import which_triton
from fastvit._base.version import __version__, version_of

OK, NOTE, TROUBLE = "ok", "note", "trouble"
_PACKAGES = {  # optional packages, and their use
    "torchvision": "timm and transformers", "timm": "models of timm", "transformers": "models of transformers",
    "safetensors": "weights in .safetensors", "rich": "tables of this command", "matplotlib": "pictures of studies",
    "Pillow": "pictures read from files", "pytest-benchmark": "the benchmarks of a checkout",
}  # fmt: skip
_LEAST_TORCH, _NEWEST_TORCH = (2, 9), (2, 15)  # tested versions


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    Attributes:
        topic: "versions", "devices", "compilers", "ops", "packages".
        name: such as "torch" or "cuda:0".
        value: what was found.
        status: "ok"; "note" if it changes how fastvit runs; "trouble" if it keeps fastvit from running well.
    """

    topic: str
    name: str
    value: str
    status: str = OK


def doctor() -> tuple[Finding, ...]:
    """Return all findings. It never raises: a probe that fails becomes a finding."""
    findings: list[Finding] = []
    for topic, probe in _PROBES:
        try:
            findings += probe()
        except Exception as error:  # any failure is a finding
            words = (str(error).splitlines() or [""])[0]
            findings.append(Finding(topic, probe.__name__.strip("_"), f"{type(error).__name__}: {words}", TROUBLE))
    return tuple(findings)


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "fastvit", f"{__version__}, {Path(__file__).parents[1]}")
    yield Finding("versions", "python", f"{platform.python_version()}, {sys.executable}")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _LEAST_TORCH:
        yield Finding("versions", "torch", f"{torch.__version__}: older than 2.9, which fastvit needs", TROUBLE)
    elif version > _NEWEST_TORCH:
        yield Finding("versions", "torch", f"{torch.__version__}: newer than 2.15, the newest that was tested", NOTE)
    else:
        yield Finding("versions", "torch", torch.__version__)
    yield _triton_version()


def _triton_version() -> Finding:
    version = version_of("triton")
    if version is None or not which_triton.is_installed():
        missing = f"not installed: every op runs on ATen; {which_triton.how_to_install()}"
        return Finding("versions", "triton", missing, NOTE)
    tested = which_triton.TESTED.get(which_triton.minor(torch.__version__), "")
    if which_triton.minor(version) == which_triton.minor(tested):
        return Finding("versions", "triton", version)
    pairs = ", ".join(f"{of} with {triton}" for of, triton in which_triton.TESTED.items())
    what = f"{version}: not tested with torch {torch.__version__}, but torch {pairs}; {which_triton.how_to_install()}"
    return Finding("versions", "triton", what, NOTE)


def _devices() -> Iterator[Finding]:
    yield Finding("devices", "CPU", f"{cpu_name()}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield Finding("devices", "GPU", f"none: {why_no_gpu()}", NOTE)
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def why_no_gpu() -> str:
    """Return why no kernel can run on a GPU here, in one line, or "" if one can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build"
    variable = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if torch.version.hip or major >= 8:
            return ""
        return f"{torch.cuda.get_device_name()} is sm_{major}{minor}, and the kernels need sm_80 or newer"
    if os.environ.get(variable, "all").strip() in ("", "-1"):
        return f"{variable}={os.environ[variable]} hides every GPU"
    try:
        torch.cuda.init()  # its error names what is missing, such as a driver
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return f"torch is built for {torch.version.cuda or torch.version.hip}, and sees no GPU"


def _gpu(index: int) -> Finding:
    gpu = torch.cuda.get_device_properties(index)
    arch = str(gpu.gcnArchName).split(":")[0] if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
    size = f"{gpu.total_memory / 1e9:.1f} GB, {gpu.multi_processor_count} multiprocessors"
    old = not torch.version.hip and gpu.major < 8
    why = ": older than sm_80, its ops run on ATen" if old else ""
    return Finding("devices", f"cuda:{index}", f"{gpu.name}, {arch}, {size}{why}", NOTE if old else OK)


def _compilers() -> Iterator[Finding]:
    chosen, names = os.environ.get("CC"), ("gcc", "clang", "cc")
    compiler = shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, names)), None)
    if compiler:
        yield Finding("compilers", "C", compiler)
    else:
        missing = f"CC={chosen} is not there" if chosen else f"none of {', '.join(names)}"
        status = TROUBLE if torch.cuda.is_available() else NOTE
        yield Finding("compilers", "C", f"{missing}: Triton's launcher needs one", status)


def _ops() -> Iterator[Finding]:
    """Report the path of the ops on the default device, a GPU if there is one, which is the same for all of them; and
    whether later calls of an op are replayed in C."""
    from fastvit.ops.runtime import backend as backends
    from fastvit.ops.runtime import record
    from fastvit.study.accuracy import verification

    backend, _ = backends.settings()
    for name, default in (backends.VARIABLES | backends.VARIABLES_AT_IMPORT).items():
        value = os.environ.get(name)
        yield Finding("ops", name, f"{value or default}{'' if value else ', the default'}", NOTE if value else OK)
    why = record.why_not() if backends.replays else "FASTVIT_REPLAY or use_backend says so"
    if why is None and torch.version.hip:
        why = "launches on AMD GPUs go by Triton's own way"
    calls = f"in Python every time: {why}" if why else "replayed in C once seen"
    yield Finding("ops", "calls", calls, NOTE if why else OK)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path, why = _path(device, backend)
    status = OK if path == ("ATen" if device.type == "cpu" else "Triton") else NOTE
    yield Finding("ops", f"{len(verification.OPS)} ops", f"{path}: {why} ({', '.join(verification.OPS)})", status)


def _path(device: torch.device, backend: str) -> tuple[str, str]:
    """Return what runs an op on float32 or 16-bit tensors of this device, and why."""
    from fastvit.ops.runtime import backend as backends
    from fastvit.ops.runtime import device as devices

    x = torch.empty(0, device=device)
    if not backends.wants_triton(x):  # raises if Triton is asked for and cannot run
        if backend == "aten":
            return "ATen", "FASTVIT_BACKEND or use_backend says so"
        if not backends.HAVE_TRITON:
            return "ATen", "triton is not installed"
        return "ATen", "no GPU, and on a CPU Triton has only its interpreter"
    if backends.INTERPRET:
        return (
            "Triton's interpreter",
            "TRITON_INTERPRET=1; slow, and its bfloat16 matmuls are wrong (tests/ mends them)",
        )
    try:
        return "Triton", f"{device} is {devices.arch(x)}; float64 runs on ATen"
    except backends.KernelUnsupported as reason:
        return "ATen", str(reason)


def _packages() -> Iterator[Finding]:
    """Import every package: that one is installed does not say that it works."""
    for name, use in _PACKAGES.items():
        version = version_of(name)
        if version is None:
            yield Finding("packages", name, f"not installed; for {use}")
            continue
        try:
            importlib.import_module("PIL" if name == "Pillow" else name.replace("-", "_"))
        except Exception as error:
            why = f"{version}, for {use}, cannot be imported: {(str(error).splitlines() or [''])[0]}"
            if name == "torchvision" and "torchvision::" in why:  # its compiled operators cannot be loaded
                why += f". It is not of the same build as torch {torch.__version__}: pip uninstall torchvision, and "
                why += "install it from the index that torch came from (README.md, Install)"
            yield Finding("packages", name, why, TROUBLE)
        else:
            yield Finding("packages", name, f"{version}, for {use}")


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()


_PROBES: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("versions", _versions), ("devices", _devices), ("compilers", _compilers), ("ops", _ops), ("packages", _packages),
)  # fmt: skip
