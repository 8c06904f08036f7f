"""Shared by stub_launches.py and stub_calls.py, which run their checks in a process without a GPU."""

import contextlib
import json
import traceback

import torch
import triton

from fastvit import ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def one_kernel(rows=4):
    """Return a call of one kernel."""
    x, w = torch.zeros(rows, 64), torch.zeros(64)
    return lambda: ops.layer_norm(x, w, w)


@contextlib.contextmanager
def hooked(hook):
    """Call the hook at every launch."""
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)


def run_checks(script):
    """Print {check: "" or what went wrong} of a script's functions without an underscore, as JSON."""
    results = {}
    for name, check in [*script.items()]:
        if name[0] != "_" and getattr(check, "__module__", "") == "__main__" and callable(check):
            try:
                check()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
    print(json.dumps(results))
