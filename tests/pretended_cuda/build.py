"""Build the libraries of the pretended CUDA for the environment that environment.py makes.

Functions that the C files do not have, and torch's libraries ask for, are made here. Each writes its name into the
trace, once, and returns an error of its library.
"""

import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path

from environment import HEADERS, HERE, LIBRARIES, PYTHON, SITE, make

INCLUDE = HEADERS / "nvidia/cu13/include"
MADE = LIBRARIES / "made"
WRITTEN = {
    "libcudart": ["trace.c", "memory.c", "streams.c", "captures.c", "launches.c", "runtime.c"],
    "libcuda": ["driver.c"], "libcublas": ["blas.c"], "libcublasLt": ["blas.c"], "libnccl": ["nccl.c"],
}  # fmt: skip
# Symbols without a version that begin so belong to a library
PREFIXES = {
    "nccl": "libnccl.so.2", "cuFile": "libcufile.so.0", "cusparseLt": "libcusparseLt.so.0",
    "nvshmem": "libnvshmem_host.so.3", "cu": "libcuda.so.1",
}  # fmt: skip
# What a function that is not written returns; others: 801, not supported
ERRORS = {
    "libcublas": 15, "libcublasLt": 15, "libcudnn": 3000, "libcufft": 16, "libcurand": 203, "libcusparse": 10,
    "libcusparseLt": 10, "libcusolver": 9, "libnvrtc": 7, "libcupti": 15, "libnccl": 3, "libnvshmem_host": 7,
    "libcufile": 5001,
}  # fmt: skip
# Nothing happens, and nothing is noted
HARMLESS = re.compile(
    r"cupti|nvrtcVersion|cudnnGetVersion|cudnnGetCudartVersion|cuFileDriver|cudaProfiler|__cuda\w+FatBinary"
    r"|__cudaRegisterVar|cuInit$|cuModuleUnload|cuFuncSetCacheConfig|cublasSetSmCountTarget|ncclGroup(Start|End)"
    r"|ncclComm(Destroy|Abort|Finalize|Deregister)$"
)
# Asked for by name: c10/cuda/driver_api.h and Triton
BY_NAME = [
    "cuInit", "cuMemAddressReserve", "cuMemRelease", "cuMemMap", "cuMemAddressFree", "cuMemSetAccess", "cuMemUnmap",
    "cuMemCreate", "cuMemGetAllocationGranularity", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
    "cuMemRetainAllocationHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMemGetAddressRange_v2",
    "cuMemsetD32Async", "cuStreamWriteValue32", "cuTensorMapEncodeIm2col", "cuCtxGetLimit", "cuCtxSetLimit",
]  # fmt: skip


def printed(*command: object) -> list[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout.splitlines()


def symbols(library: Path, *options: str) -> list[str]:
    return [line.split()[-1] for line in printed("nm", *options, library)]


def wanted() -> dict[str, dict[str, str]]:
    """Return what torch's libraries ask for: library -> symbol -> its version."""
    needed: dict[str, dict[str, str]] = defaultdict(dict)
    libraries = [*sorted((SITE / "torch/lib").glob("*.so")), *sorted((SITE / "torchvision").glob("*.so"))]
    own = {name.partition("@")[0] for library in libraries for name in symbols(library, "-D", "--defined-only")}
    for library in libraries:
        for symbol in symbols(library, "-D", "--undefined-only"):
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            home = version if version.startswith("lib") else "libnvshmem_host.so.3" if version == "NVSHMEM" else None
            if home is None and not version:
                home = next((PREFIXES[prefix] for prefix in PREFIXES if name.startswith(prefix)), None)
            if home and name not in own:
                needed[home][name] = version
        for line in printed("readelf", "-d", library):
            if "NEEDED" in line and (found := re.search(r"\[(lib(cu|nccl|nvrtc|nvshmem|nvJit).*)\]", line)):
                needed.setdefault(found[1], {})
    needed["libcuda.so.1"] |= dict.fromkeys(BY_NAME, "")
    return needed


def stub(name: str, stem: str) -> str:
    if HARMLESS.match(name):
        return f"long {name}(void) {{ return 0; }}"
    value = str(ERRORS.get(stem, 801))
    if re.search("ErrorString|StatusString|ErrorName|LastError$", name):
        value = f'(long)"an error of the pretended {stem}"'
    return (
        f"long {name}(void) {{ static int noted; "
        f"if (!noted++) pretended_note(\"stub\", \"'name':'{name}'\"); return {value}; }}"
    )


def compiled(compiler: str, out: Path, *arguments: object) -> None:
    command = [compiler, "-O1", "-g", "-fPIC", "-Wall", f"-I{INCLUDE}", f"-I{HERE}", "-o", out, *arguments]
    subprocess.run([str(c) for c in command], check=True)


def is_old(made: Path, *sources: Path) -> bool:
    return not made.exists() or any(source.stat().st_mtime > made.stat().st_mtime for source in sources)


def build() -> None:
    """Compile what is not there, or is older than its sources."""
    MADE.mkdir(parents=True, exist_ok=True)
    script, header, cache = Path(__file__), HERE / "pretended.h", MADE / "wanted.json"
    if is_old(cache, script):
        cache.write_text(json.dumps(wanted()))
    needed = json.loads(cache.read_text())
    runtime = next(name for name in needed if name.startswith("libcudart."))
    for library in sorted(needed, key=lambda name: name != runtime):  # which the others need
        stem = library.partition(".")[0]
        sources = [HERE / name for name in WRITTEN.get(stem, [])]
        if not is_old(LIBRARIES / library, script, header, *sources):
            continue
        objects = []
        for source in sources:
            objects.append(MADE / f"{source.stem}.o")
            compiled("gcc", objects[-1], "-std=gnu11", "-c", source)
        written = {name for made in objects for name in symbols(made, "--defined-only")}
        stubs = MADE / f"{stem}_stubs.c"
        lines = [stub(name, stem) for name in sorted(set(needed[library]) - written)]
        stubs.write_text("\n".join(["void pretended_note(const char *, const char *, ...);", *lines, ""]))
        versions = MADE / f"{stem}.map"
        names = sorted(set(needed[library].values()) - {""})
        versions.write_text("".join(f"{name} {{ global: *; }};\n" for name in names))
        options = [f"-Wl,--version-script={versions}"] if names else []
        others = ["-ldl", "-lstdc++"] if library == runtime else [LIBRARIES / runtime, "-Wl,-rpath,$ORIGIN"]
        compiled("gcc", LIBRARIES / library, "-shared", stubs, *objects, f"-Wl,-soname,{library}", *options, *others)
    tracker, source = LIBRARIES / "libtracker.so", HERE / "tracker.cpp"
    if is_old(tracker, source):
        torch = SITE / "torch"
        compiled(
            "g++", tracker, "-DC10_USING_CUSTOM_GENERATED_MACROS", "-std=c++20", "-shared", f"-I{torch / 'include'}",
            source, f"-L{torch / 'lib'}", "-lc10_cuda", "-lc10", LIBRARIES / runtime,
        )  # fmt: skip


if __name__ == "__main__":
    make()
    build()
    print(f"The pretended CUDA is ready: {PYTHON}, {LIBRARIES}")
