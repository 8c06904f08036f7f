"""Run a Gluon kernel for Hopper on a CPU: check the protocol between its partitions, and compute its numbers.

    from gluon_emulator import Fault, launch
    launch(kernel, grid, *arguments, seed=3, STAGES=2, num_warps=4)     # torch tensors, numbers, host TensorDescriptors

The bodies of @gluon.jit functions run as Python, with Gluon's and Triton's names replaced by this module's, on the
machine of gluon_machine.py. Programs run one after the other. Raised as Fault, by kind:

    race      shared memory is read or written without order, or read before it was written
    deadlock  nothing can go on: which partition waits for which phase of which barrier, and what that barrier lacks
    barrier   not initialised, more arrivals than its count, bytes left over
    unready   an accumulator is used before its product was waited for
    fence     a generic write, or an initialised barrier, is used by TMA or wgmma without fence_async_shared
    bounds    a pointer outside its tensor, an index outside its allocation, too much shared memory
    shape     operands that do not fit
    leftover  copies or products in flight at a program's end

Not shown: layouts, registers, what ptxas does, the order of memory among the warps of one partition, time.
"""

import types
from types import SimpleNamespace

import torch
import triton.language as tl
from gluon_machine import MEMORY, Barrier, Copy, Fault, Machine, Partition, Product, now, where
from gluon_values import Descriptor, Fields, Pointer, Registers, Shared, dtype_of, registers
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from fastvit.kernels import _hopper

__all__ = ["Fault", "launch"]

# ---- names of Hopper, Gluon and Triton -------------------------------------------------------------------------------


def barrier_of(view):
    now().pause()
    found = now().barriers.get((view.alloc, view.low))
    if found is None or view.ids.numel() != 1 or now().current.clock.get(found.access.who, 0) < found.access.at:
        raise Fault("barrier", f"{view} is not initialised, at {where()}")
    return found


def init(view, count):
    me = now().pause()
    me.unfenced.append(me.access(view, write=True))
    now().barriers[view.alloc, view.low] = Barrier(f"{view.alloc.name}[{view.low}]", int(count), me.unfenced[-1])


def release(view, pred, *amounts):
    barrier = barrier_of(view)
    if pred:
        barrier.release(*amounts)


def wait(view, phase, pred=True, deps=()):
    barrier, at = barrier_of(view), where()
    if int(phase) not in (0, 1):
        raise Fault("barrier", f"{barrier.name}: parity {int(phase)} at {at}")
    if pred:
        reason = f"waits at {at} for parity {int(phase)} of"
        now().pause(lambda: (barrier.phase & 1) != int(phase), lambda: f"{reason} {barrier}").join(barrier.seen)


def load_tile(desc, coord, barrier, result, pred=True):
    found = barrier_of(barrier)
    if not found.access.fenced:
        raise Fault("fence", f"{found.name}: a copy signals it at {where()}, no fence after its initialisation")
    if pred:
        Copy(desc, coord, result, found)


def store_wait(pendings):
    stores = now().current.stores
    first = stores[: max(0, len(stores) - int(pendings))]
    me = now().pause(lambda: all(s.done for s in first), lambda: "waits for stores")
    for store in first:
        store.waited = True
        me.join(store.clock)


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    now().pause()
    found = registers(torch.full(acc.shape, torch.nan))
    found.op = Product(a, b, acc, bool(use_acc), found)
    return found if is_async else warpgroup_mma_wait(0, (found,))


def warpgroup_mma_wait(num_outstanding=0, deps=()):
    me = now().pause()
    first = me.products[: max(0, len(me.products) - int(num_outstanding))]
    for op in first:
        op.finish()
        me.join(op.clock)
    del me.products[: len(first)]
    return deps[0] if len(deps) == 1 else tuple(deps)


def fence_async_shared():
    me = now().pause()
    for access in me.unfenced:
        access.fenced = True
    me.unfenced.clear()


def full(shape, x, dtype, layout=None):
    return registers(torch.full([int(n) for n in shape], x, dtype=dtype_of(dtype)))


def either(function):
    """A function of two operands, each a tensor or a number."""
    return lambda a, b, propagate_nan=None: function(*(registers(x) for x in (a, b)))


def static_assert(condition, message=""):
    assert condition, message


def allocate_shared_memory(dtype, shape, layout=None):
    shape = [int(n) for n in shape]
    data = torch.full(shape, -1, dtype=dtype_of(dtype))
    if data.is_floating_point():
        data.fill_(torch.nan)
    now().bytes += data.nbytes
    if now().bytes > MEMORY:
        raise Fault("bounds", f"{now().bytes} bytes of shared memory")
    return Shared(Fields(name=f"memory of {where()}", accesses=[]), data, torch.arange(data.numel()).view(shape))


def load(pointer, mask=None, other=0, **_):
    now().pause()
    offset, mask, memory = pointer.at(mask)
    return registers(torch.where(mask, memory[torch.where(mask, offset, 0)], other).to(memory.dtype))


def store(pointer, value, mask=None, **_):
    now().pause()
    offset, mask, memory = pointer.at(mask)
    memory[offset[mask]] = torch.as_tensor(value).to(memory.dtype).broadcast_to(offset.shape)[mask]
    now().count_stores(pointer.tensor, offset[mask] + pointer.tensor.storage_offset())


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    me = now().pause()
    if len(worker_num_warps) != len(functions_and_args) - 1:
        raise Fault("shape", "one number of warps for each worker")
    parts = [
        Partition(f"{i}:{f.__name__}", lambda f=f, args=args: f(*args), me.clock)
        for i, (f, args) in enumerate(functions_and_args)
    ]
    now().pause(lambda: all(p.done for p in parts), lambda: "waits for its partitions")
    for part in parts:
        me.join(part.clock)


LANGUAGE = SimpleNamespace(
    **{name: dtype_of(name) for name in ("bfloat16", "float16", "float32", "int1", "int32", "int64")},
    **dict.fromkeys(
        ("DotOperandLayout", "NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "SwizzledSharedLayout"), Fields
    ),
    **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "abs", "erf", "clamp")},
    reshape=torch.reshape, constexpr=tl.constexpr, PropagateNan=tl.PropagateNan,
    NVMMASharedLayout=SimpleNamespace(get_default_for=Fields),
    maximum=either(torch.maximum), minimum=either(torch.minimum), max=torch.amax, min=torch.amin, sum=torch.sum,
    program_id=lambda axis: registers(now().program[axis], torch.int32), permute=torch.permute, split=Registers.split,
    num_programs=lambda axis: registers(now().grid[axis], torch.int32),
    static_range=lambda *a: range(*map(int, a)), cdiv=lambda a, b: (a + b - 1) // b,
    fma=lambda a, b, c: a * b + c, join=lambda a, b: torch.stack((a, b), -1),
    arange=lambda start, end, layout=None: registers(torch.arange(start, end, dtype=torch.int32)),
    full=full, zeros=lambda shape, dtype, layout=None: full(shape, 0, dtype),
    where=torch.where, convert_layout=lambda x, layout, assert_trivial=False: x, expand_dims=torch.unsqueeze,
    load=load, store=store, static_assert=static_assert,
    allocate_shared_memory=allocate_shared_memory, warp_specialize=warp_specialize,
)  # fmt: skip
MODULES = {
    gl: LANGUAGE, tl: LANGUAGE, hopper.tma: SimpleNamespace(store_wait=store_wait),
    hopper.mbarrier: SimpleNamespace(
        MBarrierLayout=Fields, init=init, wait=wait,
        expect=lambda view, nbytes, pred=True: release(view, pred, 1, int(nbytes)),
        arrive=lambda view, *, count=1, pred=True: release(view, pred, int(count)),
    ),
}  # fmt: skip
FUNCTIONS = {
    hopper.warpgroup_mma: warpgroup_mma, hopper.warpgroup_mma_wait: warpgroup_mma_wait,
    hopper.fence_async_shared: fence_async_shared, _hopper.load_tile: load_tile,
    _hopper.store_tile: lambda desc, coord, src: now().pause().stores.append(Copy(desc, coord, src)),
}  # fmt: skip


# ---- running a kernel ------------------------------------------------------------------------------------------------

_emulated = {}


def emulated(function):
    """Return the Python function of a compiled function, with Gluon's and Triton's names replaced."""
    body = getattr(function, "fn", function)
    if body in _emulated:
        return _emulated[body]
    names = {"range": lambda *a: (registers(i, torch.int32) for i in range(*map(int, a)))}
    names["__builtins__"] = __builtins__
    _emulated[body] = types.FunctionType(body.__code__, names, body.__name__, body.__defaults__, body.__closure__)
    for name in body.__code__.co_names:
        value = body.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            names[name] = MODULES.get(value, value)
        elif isinstance(value, tl.constexpr):
            names[name] = value.value
        elif hasattr(value, "fn"):
            names[name] = emulated(value)
        elif value is not None:
            names[name] = FUNCTIONS.get(value, value)
    return _emulated[body]


def argument(name, x):
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if hasattr(x, "block_shape"):
        base = torch.as_strided(x.base, x.shape, x.strides, x.base.storage_offset())
        return Descriptor(base, x.block_shape, name)
    return registers(x, torch.int32) if isinstance(x, int) and not isinstance(x, bool) else x


def launch(kernel, grid, *args, seed=0, num_warps=4, maxnreg=None, **constants):
    """Run all programs of a grid. Return how often each element of each storage was stored to, by its address."""
    function, grid, stored = emulated(kernel), (*grid, 1, 1)[:3], {}
    given = dict(zip(function.__code__.co_varnames, args, strict=False)) | constants
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    given = {name: x if name in fixed else argument(name, x) for name, x in given.items()}
    for i in range(grid[0] * grid[1] * grid[2]):
        program = i % grid[0], i // grid[0] % grid[1], i // grid[0] // grid[1]
        Machine(f"{seed} {i}", program, grid, stored).run(lambda: function(**given))
    return stored
