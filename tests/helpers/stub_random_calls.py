"""Attack replayed calls: random calls, with everything that a caller may change changed between them. Each has to
launch what it launches when nothing is kept.

    python tests/helpers/stub_random_calls.py 300        # prints what was seen, or the first difference, as JSON

In a process without a GPU, with a driver that launches nothing, like stub_launches.py.
"""

import contextlib
import gc
import inspect
import json
import os
import random
import sys
import threading
import warnings
from unittest import mock

import torch
from layouts import LAYOUTS
from op_cases import ROWS, made, more, outputs_of
from replaying import replays
from stub_driver import stub_gpu
from stub_launches import DTYPES, _hooked

from fastvit import ops
from fastvit.ops.runtime import call as runtime_call
from fastvit.study.accuracy.cases import WITHOUT_GRADIENT
from fastvit.warmup import in_library

CPU = torch.device("cpu")
SIZES = {"d": 16, "D": 64, "hidden": 64, "gated": 32, "patch": 4, "height": 8, "width": 12}


class Marked(torch.Tensor):
    """A subclass that changes nothing."""


# ---- what may change of a call's tensors: functions of random numbers and a tensor ----


def _laid_out(draw, t):
    """Lay it out with other strides, or at an address of another alignment."""
    return LAYOUTS[draw.choice([*LAYOUTS])](t.detach()).requires_grad_(t.requires_grad)


CHANGES = (
    *(lambda draw, t: t.detach().clone().requires_grad_(t.requires_grad),) * 2,
    *(lambda draw, t: t.detach().requires_grad_(not t.requires_grad),) * 2,
    *(_laid_out,) * 3,
    lambda draw, t: torch.nn.Parameter(t.detach(), t.requires_grad),
    lambda draw, t: t.detach().as_subclass(Marked).requires_grad_(t.requires_grad),
    lambda draw, t: t if t.requires_grad else torch._neg_view(-t.detach()),
)


def fresh(draw, name, tokens=None, dtype=None):
    """Draw the tensors anew: of other sizes, dtypes, or without those that are optional."""
    samples, tokens = draw.choice((1, 2, 2, 3)), tokens or draw.choice((15, 16, 16, 33))
    sizes = SIZES | {"hidden": draw.choice((64, 128)), "gated": draw.choice((32, 64))}
    tensors = made(name, samples, tokens, CPU, dtype or draw.choice(DTYPES), **sizes)
    for key in tensors:
        optional = key.endswith("bias") or key in ("layer_scale", "row_scale", "pos_embed", "prefix")
        if optional and draw.random() < 0.2:
            tensors[key] = None
    return tensors


def changed(draw, name, tensors):
    """Change one tensor, exchange two of a shape, give one twice, or draw all anew."""
    tensors = dict(tensors)
    given = [key for key, t in tensors.items() if t is not None]
    key = draw.choice(given)
    kind = draw.random()
    if kind < 0.15:
        return fresh(draw, name)
    if kind < 0.3:
        same = [k for k in given if tensors[k].shape == tensors[key].shape and k not in WITHOUT_GRADIENT]
        other = draw.choice(same or [key])
        if draw.random() < 0.5:
            tensors[other] = tensors[key]
        tensors[key], tensors[other] = tensors[other], tensors[key]
        return tensors
    if key in WITHOUT_GRADIENT or not tensors[key].is_floating_point():
        return tensors
    with torch.no_grad():
        tensors[key] = draw.choice(CHANGES)(draw, tensors[key])
    return tensors


OPTIONS = {
    "eps": (1e-6, 0.5),
    "scale": (None, 0.5),
    "dropout_p": (0.0, 0.25),
    "p": (0.25, 0.5),
    "recompute": ("none", "activation", "all"),
}


def drawn_options(draw, name):
    """Draw options of the row's op."""
    row = ROWS[name]
    taken = inspect.signature(getattr(ops, row.op)).parameters
    choices = OPTIONS | ({"recompute": ("none", "attention", "qkv", "all")} if "num_heads" in taken else {})
    return {key: draw.choice(values) for key, values in choices.items() if key in taken and draw.random() < 0.2}


# ---- what may change around a call ----


SETTINGS = {  # which stay until they change again
    "FASTVIT_BACKEND": (None, None, "auto", "triton", "aten"),
    "FASTVIT_STRICT": (None, None, "0", "1"),
    "precision": ("highest", "high"),
    "deterministic": (False, True),
    "autocast": (None, None, torch.bfloat16, torch.float16),
    "mode": (contextlib.nullcontext, contextlib.nullcontext, torch.no_grad, torch.inference_mode),
    "in a thread": (False, False, True),
    "hook": (False, False, False, True),
}


@contextlib.contextmanager
def _under(settings, seen):
    """Apply the settings. seen: a list that a hook of launches appends to."""
    for name in ("FASTVIT_BACKEND", "FASTVIT_STRICT"):
        os.environ.pop(name, None)
        if settings[name] is not None:
            os.environ[name] = settings[name]
    torch.set_float32_matmul_precision(settings["precision"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=True)
    autocast = torch.autocast("cpu", settings["autocast"], enabled=settings["autocast"] is not None)
    with autocast, settings["mode"](), _hooked(seen.append) if settings["hook"] else contextlib.nullcontext():
        yield


def _launched(gpu, settings, name, tensors, options):
    """Return a call's launches, forward and backward: kernels, grids, numbers, and for each pointer the tensor and the
    place in it that it points to, if it was given. Also return its error, and how many launches the hook has seen."""
    gpu.launches.clear()
    seen = []
    call = ROWS[name].call(ops, **more(name), **options)
    ranges = {}
    for key, t in tensors.items():
        if t is not None:
            storage = t.untyped_storage()
            ranges[key] = storage.data_ptr(), storage.nbytes()

    def place(argument):
        address = argument.data_ptr() if isinstance(argument, torch.Tensor) else argument or 0
        if address == 0:
            return None
        return [(key, address - start) for key, (start, size) in ranges.items() if 0 <= address - start < size] or "new"

    error = []

    def work():
        try:
            with _under(settings, seen):
                outputs = outputs_of(call(**tensors))
                wanted = [o for o in outputs if o.requires_grad]
                if wanted:
                    torch.autograd.backward(wanted, [torch.ones_like(o) for o in wanted])
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as raised:
            error.append(f"{type(raised).__name__}: {raised}")

    thread = threading.Thread(target=work)
    (thread.start(), thread.join()) if settings["in a thread"] else work()
    launches = []
    for kernel, grid, arguments in gpu.launches:
        signature = [*kernel.src.signature.items()]
        passed = [
            place(a) if kind.startswith("*") else a
            for (_, kind), a in zip(signature, arguments, strict=True)
            if kind != "constexpr"
        ]
        launches.append((kernel.name, id(kernel), grid, passed))
    for t in tensors.values():
        if t is not None and t.is_leaf:
            t.grad = None
    return launches, error, len(seen)


def main(calls):
    draw, settings = random.Random(1), {name: choices[0] for name, choices in SETTINGS.items()}

    def on_triton(x):
        """Decide as `wants_triton` does with a GPU."""
        return settings["FASTVIT_BACKEND"] != "aten"

    names = [*ROWS]
    states = {name: [fresh(draw, name, 16, dtype) for dtype in (torch.bfloat16, torch.float32)] for name in names}
    launches = errors = 0
    with stub_gpu() as gpu, in_library(wants_triton=on_triton), replays() as replayed:
        for step in range(calls):
            if step % 40 == 0:  # a few ops at a time, so that calls are alike
                some = draw.sample(names, 4)
            name = draw.choice(some)
            if draw.random() < 0.3:
                setting = draw.choice([*SETTINGS])
                settings[setting] = draw.choice(SETTINGS[setting])
                gc.collect(draw.choice((0, 0, 0, 0, 0, 0, 0, 2)))
            if draw.random() < 0.6:
                states[name].append(changed(draw, name, draw.choice(states[name])))
                del states[name][:-4]
            tensors, options = draw.choice(states[name]), drawn_options(draw, name)
            got = _launched(gpu, settings, name, tensors, options)
            kept, runtime_call._kept = runtime_call._kept, {}
            want = _launched(gpu, settings, name, tensors, options)
            runtime_call._kept = kept
            if got != want:
                print(json.dumps({"problem": f"call {step} of {name} with {options}: {got}, wanted {want}"}))
                sys.exit(1)
            launches, errors = launches + len(got[0]), errors + bool(got[1])
    print(json.dumps({"calls": calls, "launches": launches, "replayed": sum(replayed), "errors": errors}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with mock.patch("fastvit.ops.runtime.backend._chosen", None):  # the environment counts
        main(int(sys.argv[1]))
