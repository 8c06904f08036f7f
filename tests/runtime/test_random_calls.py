"""Random calls on ATen, whose tensors and options change between them, give what they give in Python: results and
gradients, bit by bit. What random calls launch: test_launches.py."""

import contextlib
import random

import pytest
import torch
from op_cases import ROWS, more, outputs_of
from replaying import in_python, replays
from stub_random_calls import changed, drawn_options, fresh

from fastvit import ops
from fastvit.ops.runtime import call as runtime_call
from fastvit.ops.runtime import record

pytestmark = pytest.mark.skipif(record.available() is None, reason="there is no C compiler, or no triton")
MODES = (*(contextlib.nullcontext,) * 4, torch.no_grad, torch.inference_mode)


def outcome(name, tensors, options, mode):
    """Return results and gradients, what the results are, and the error."""
    torch.manual_seed(0)
    leaves = {id(t): t for t in tensors.values() if t is not None and t.requires_grad}.values()
    try:
        with mode():
            outputs = outputs_of(ROWS[name].call(ops, **more(name), **options)(**tensors))
            wanted = [o.float().sin().sum() for o in outputs if o.requires_grad]
            gradients = torch.autograd.grad(wanted, [*leaves], allow_unused=True) if wanted else ()
    except (ValueError, TypeError, RuntimeError) as error:
        return [], f"{type(error).__name__}: {error}"
    kinds = [(o.requires_grad, o._is_view(), o.is_inference(), o.stride(), o.dtype) for o in outputs]
    return [*outputs, *gradients], kinds


def equal(a, b):
    if a is None or b is None:
        return a is b
    return a.dtype is b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_random_calls(count):
    draw, states = random.Random(1), {}
    with runtime_call.forgotten(), ops.use_backend("aten"), replays() as replayed:
        for i in range(count):
            if i % 60 == 0:  # a few ops at a time, so that calls are alike
                some = draw.sample([*ROWS], 3)
            name = draw.choice(some)
            of_name = states.setdefault(name, [fresh(draw, name, 16, draw.choice((torch.float32, torch.bfloat16)))])
            if draw.random() < 0.4:
                of_name.append(changed(draw, name, draw.choice(of_name)))
                del of_name[:-4]
            call = name, draw.choice(of_name), drawn_options(draw, name), draw.choice(MODES)
            got, of_got = outcome(*call)
            with in_python():
                want, of_want = outcome(*call)
            assert of_got == of_want, call
            assert all(map(equal, got, want)), call
    assert sum(replayed) > count / 4
