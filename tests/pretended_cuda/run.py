"""Run Python on the pretended CUDA, which is made first: python tests/pretended_cuda/run.py -m pytest tests/runtime"""

import os
import resource
import sys

from build import build
from environment import LIBRARIES, PYTHON, make

DATA = 9_000_000_000  # bytes: a program that fills the pretended memory must not fill the machine's

if __name__ == "__main__":
    make()
    build()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (DATA if hard == resource.RLIM_INFINITY else min(DATA, hard), hard))
    folders = [str(LIBRARIES), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ |= {
        "LD_LIBRARY_PATH": ":".join(folders), "TRITON_LIBCUDA_PATH": str(LIBRARIES), "PRETENDED_CUDA": str(LIBRARIES),
        "PYTEST_ADDOPTS": os.environ.get("PYTEST_ADDOPTS", "") + " -p no_numbers",
    }  # fmt: skip
    os.execv(PYTHON, [str(PYTHON), *sys.argv[1:]])
