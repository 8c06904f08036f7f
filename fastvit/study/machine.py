"""Reports what fastvit finds on this machine, which path every op takes, and what keeps it from running well."""

from __future__ import annotations

import getpass
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastvit import _triton
from fastvit._output import not_writable

OK, NOTE, TROUBLE = "ok", "note", "trouble"
_PACKAGES = {  # optional packages, and their use
    "timm": "models of timm", "transformers": "models of transformers", "safetensors": "weights in .safetensors",
    "rich": "tables of this command", "matplotlib": "pictures of studies", "Pillow": "pictures read from files",
    "pytest-benchmark": "fastvit bench",
}  # fmt: skip
_LEAST_TORCH, _NEWEST_TORCH = (2, 9), (2, 15)  # tested versions


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    Attributes:
        topic: "versions", "devices", "compilers", "caches", "ops", "packages".
        name: such as "torch" or "cuda:0".
        value: what was found.
        status: "ok"; "note" if it changes how fastvit runs; "trouble" if it keeps fastvit from running well.
    """

    topic: str
    name: str
    value: str
    status: str = OK


_Probe = Callable[[], Iterator[Finding]]


def doctor() -> tuple[Finding, ...]:
    """Return all findings. It never raises: a probe that fails becomes a finding."""
    found: list[Finding] = []
    for topic, probe in _PROBES:
        try:
            found += probe()
        except Exception as error:  # any failure is a finding
            words = (str(error).splitlines() or [""])[0]
            found.append(Finding(topic, probe.__name__.strip("_"), f"{type(error).__name__}: {words}", TROUBLE))
    return tuple(found)


def _versions() -> Iterator[Finding]:
    import fastvit

    yield Finding("versions", "fastvit", f"{fastvit.__version__}, {Path(fastvit.__file__).parent}")
    yield Finding("versions", "python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("versions", "system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _LEAST_TORCH:
        yield Finding("versions", "torch", f"{torch.__version__}: older than 2.9, which fastvit needs", TROUBLE)
    elif version > _NEWEST_TORCH:
        yield Finding("versions", "torch", f"{torch.__version__}: newer than 2.15, the newest that was tested", NOTE)
    else:
        yield Finding("versions", "torch", torch.__version__)
    from fastvit.ops.runtime import backend as backends
    from fastvit.ops.runtime import torch_private

    missing = [name for name, value in vars(torch_private).items() if value is None and not name.startswith("__")]
    if not backends._KNOWS_OBSERVERS:
        names = ", ".join(sorted(missing))
        yield Finding("versions", "private names", f"torch lacks {names}: every call goes through the dispatcher", NOTE)


def _launches() -> Iterator[Finding]:
    if (version := version_of("triton")) is None or not _triton.is_installed():
        missing = f"not installed: every op runs on ATen; {_triton.how_to_install()}"
        yield Finding("versions", "triton", missing, NOTE)
        return
    if _triton.minor(version) == _triton.minor(_triton.TESTED.get(_triton.minor(torch.__version__), "")):
        yield Finding("versions", "triton", version)
    else:
        pairs = ", ".join(f"{of} with {triton}" for of, triton in _triton.TESTED.items())
        what = f"{version}: not tested with torch {torch.__version__}, but torch {pairs}; {_triton.how_to_install()}"
        yield Finding("versions", "triton", what, NOTE)
    from fastvit.ops.runtime import launch

    if torch.version.hip:
        yield Finding("versions", "launches", "by Triton's own binder, as on every AMD GPU")
    elif launch._DIRECT:
        yield Finding("versions", "launches", "direct: a kernel that was seen before is called without Triton's binder")
    else:
        why = f"by Triton's own binder, slower by some 15 us each: only 3.6 to 3.9 were tested, not {version}"
        yield Finding("versions", "launches", why, NOTE)


def _devices() -> Iterator[Finding]:
    yield Finding("devices", "CPU", f"{cpu_name()}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield Finding("devices", "GPU", f"none: {why_no_gpu()}", NOTE)
    else:
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        yield Finding("devices", "runtime", f"{runtime}, cuDNN {torch.backends.cudnn.version()}")
        for index in range(torch.cuda.device_count()):
            yield from _gpu(index)
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        run = subprocess.run(query, capture_output=True, text=True, timeout=20)
        words = (run.stdout or run.stderr).strip().splitlines()
        yield Finding(
            "devices", "driver", words[0] if words else "nvidia-smi says nothing", OK if run.returncode == 0 else NOTE
        )


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


def _gpu(index: int) -> Iterator[Finding]:
    from fastvit.kernels import _tuned
    from fastvit.ops.runtime.device import cache_folder

    gpu = torch.cuda.get_device_properties(index)
    arch = str(gpu.gcnArchName).split(":")[0] if torch.version.hip else f"sm_{gpu.major}{gpu.minor}"
    free, _ = torch.cuda.mem_get_info(index)
    size = f"{gpu.total_memory / 1e9:.1f} GB, {free / 1e9:.1f} GB free, {gpu.multi_processor_count} multiprocessors"
    old = not torch.version.hip and gpu.major < 8
    why = ": older than sm_80, its ops run on ATen" if old else ""
    yield Finding("devices", f"cuda:{index}", f"{gpu.name}, {arch}, {size}{why}", NOTE if old else OK)
    yield _table("tuned table", _tuned.shipped(arch, gpu.name), f"none for {gpu.name}: kernels run as shipped")
    users = _tuned.users(arch, gpu.name, cache_folder())
    yield _table("your table", users, "none")


def _table(name: str, table: Any, without: str) -> Finding:
    """Report a table of launch choices. without: the text if there is none."""
    if table is None:
        return Finding("devices", name, without)
    if table.ignored:
        return Finding("devices", name, f"{table.path} is ignored: {table.ignored}", NOTE)
    return Finding("devices", name, f"{table.path}, {len(table.choices)} choices")


def _compilers() -> Iterator[Finding]:
    for variable, what, names in (("CC", "C", ("gcc", "clang", "cc")), ("CXX", "C++", ("g++", "clang++"))):
        wanted = "Triton's launcher" if what == "C" else "inductor on a CPU (torch.compile)"
        chosen = os.environ.get(variable)
        found = shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, names)), None)
        if found:
            yield Finding("compilers", what, f"{found}, for {wanted}")
        else:
            missing = f"{variable}={chosen} is not there" if chosen else f"none of {', '.join(names)}"
            status = TROUBLE if what == "C" and torch.cuda.is_available() else NOTE
            yield Finding("compilers", what, f"{missing}: {wanted} needs one", status)


def _caches() -> Iterator[Finding]:
    if importlib.util.find_spec("triton") is not None:
        from triton import knobs

        yield _folder("Triton", Path(knobs.cache.dir))
    default = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    yield _folder("inductor", Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default)))


def _folder(name: str, path: Path) -> Finding:
    if reason := not_writable(path):
        return Finding("caches", name, reason, TROUBLE)
    files = [file for file in path.rglob("*") if file.is_file()] if path.exists() else []
    return Finding("caches", name, f"{path}, {len(files)} files, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB")


def _ops() -> Iterator[Finding]:
    """Report the path of every op on the default device: a GPU if there is one."""
    from fastvit.kernels import _configs
    from fastvit.ops.runtime import backend as backends
    from fastvit.study.accuracy import verification

    backend, strict = backends.settings()
    for name, default in backends.VARIABLES.items():
        value = os.environ.get(name)
        yield Finding("ops", name, f"{value or default}{'' if value else ', the default'}", NOTE if value else OK)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for op in verification.OPS:
        path, why = _path(device, backend)
        yield Finding(
            "ops", op, f"{path}: {why}", OK if path == ("ATen" if device.type == "cpu" else "Triton") else NOTE
        )
    if strict and device.type == "cuda":
        limits = f"float64, rows of more than {_configs.MAX_ROW:,} elements"
        yield Finding("ops", "strict", f"what Triton cannot take ({limits}) raises", NOTE)


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


def _one_launch() -> Iterator[Finding]:
    """Compile, launch and check one kernel."""
    from fastvit import ops

    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    device = torch.device("cuda")
    x = torch.randn(4, 64, device=device)
    weight, bias = torch.ones(64, device=device), torch.zeros(64, device=device)
    with ops.use_backend("triton", strict=True):
        out = ops.layer_norm(x, weight, bias)
    error = float((out - torch.nn.functional.layer_norm(x, (64,), weight, bias, 1e-6)).abs().max())
    right = error < 1e-5
    yield Finding("ops", "one launch", f"layer_norm on {device}, off by {error:.1e}", OK if right else TROUBLE)


def _packages() -> Iterator[Finding]:
    for name, use in _PACKAGES.items():
        version = version_of(name)
        if name == "transformers" and version is not None and int(version.split(".")[0]) < 5:
            yield Finding("packages", name, f"{version}: accelerate knows the models of transformers 5", NOTE)
        else:
            yield Finding("packages", name, f"not installed; for {use}" if version is None else f"{version}, for {use}")
    if (version := version_of("torchvision")) is not None:
        try:
            importlib.import_module("torchvision")
        except Exception as error:
            why = f"{version} cannot be imported, nor what imports it (timm, transformers): {error}"
            if "torchvision::" in str(error):  # its compiled operators are missing, or cannot be loaded
                why += f". It is not of the same build as torch {torch.__version__}: pip uninstall torchvision, and "
                why += "install it from the index that torch came from (README.md, Install)"
            yield Finding("packages", "torchvision", why, TROUBLE)
        else:
            yield Finding("packages", "torchvision", f"{version}, which timm and transformers import")


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_info(field: str) -> str:
    """Return the first value of a field of /proc/cpuinfo, or ""."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


_PROBES: tuple[tuple[str, _Probe], ...] = (
    ("versions", _versions), ("versions", _launches), ("devices", _devices), ("compilers", _compilers),
    ("caches", _caches), ("ops", _ops), ("ops", _one_launch), ("packages", _packages),
)  # fmt: skip
