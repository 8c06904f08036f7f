"""The machine on which gluon_emulator.py runs a program: partitions, shared memory, barriers, copies and products.

Each partition is a thread. One runs at a time, and at every operation that others can see a scheduler chooses what
goes on: a partition, a TMA copy that lands, or a wgmma that executes. The seed fixes the choices, and how fast each
partition and the copies are.

A vector clock follows what happens before what: through the arrivals at an mbarrier's phase to those who wait for it,
through TMA copies to their barrier, through waits for wgmma and for stores. Two accesses to the same shared memory, one
of them a write, that are not ordered are a fault in every schedule, not only where they collide.
"""

import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

MEMORY = 232_448  # bytes of shared memory of a program
OURS = {str(path) for path in Path(__file__).parent.glob("gluon_*.py")} | {threading.__file__}
_machine = None


class Fault(Exception):
    """A kernel is wrong. `kind`: see gluon_emulator.py."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Stopped(BaseException):
    """Ends the threads of a machine that has failed."""


def now():
    """Return the machine that runs."""
    return _machine


def where():
    """Return file and line of the kernel."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename in OURS:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Agent:
    """A partition, or one asynchronous operation. clock: how much of each agent came before."""

    def __init__(self, name, clock):
        self.id = _machine.agents = _machine.agents + 1
        self.name, self.clock, self.done, self.waited = name, {**clock, self.id: 1}, False, False

    def join(self, clock):
        for who, at in clock.items():
            self.clock[who] = max(at, self.clock.get(who, 0))

    def access(self, view, write, asynchronous=False):
        """Record an access to shared memory; raise if it is not ordered after an earlier one."""
        text, written = f"{self.name} at {where()} ({'writes' if write else 'reads'})", False
        for old in view.alloc.accesses:
            if not (old.write or write) or not old.view.overlaps(view):
                continue
            if self.clock.get(old.who, 0) < old.at:
                raise Fault("race", f"{view}: {text} is not ordered after {old.text}")
            if asynchronous and not old.fenced:
                raise Fault("fence", f"{view}: {text} by the asynchronous proxy, no fence after {old.text}")
            written |= old.write
        if not write and not written:
            raise Fault("race", f"{view}: {text} of what nothing has written")
        if write:
            view.alloc.accesses[:] = [a for a in view.alloc.accesses if not view.covers(a.view)]
        fenced = asynchronous or not write
        mine = SimpleNamespace(who=self.id, at=self.clock[self.id], view=view, write=write, fenced=fenced, text=text)
        view.alloc.accesses.append(mine)
        return mine


class Partition(Agent):
    def __init__(self, name, function, clock):
        super().__init__(name, clock)
        self.go, self.ready, self.waits, self.error = threading.Semaphore(0), lambda: True, lambda: "can go on", None
        self.products, self.stores, self.unfenced = [], [], []
        self.speed = _machine.random.choice((1, 1, 5, 30))
        self.thread = threading.Thread(target=self.body, args=(_machine, function), daemon=True)
        self.thread.start()
        _machine.parts.append(self)

    def body(self, machine, function):
        self.go.acquire()
        try:
            if not machine.stopped:
                function()
        except BaseException as error:  # handed to the scheduler
            self.error = error
        self.done = True
        machine.back.release()


class Machine:
    """One program of a grid. stored: how often each element of each storage was stored to, by its address."""

    def __init__(self, seed, program, grid, stored):
        global _machine
        _machine = self
        self.random, self.program, self.grid, self.stored = random.Random(seed), program, grid, stored
        self.agents, self.bytes, self.stopped, self.current = 0, 0, False, None
        self.back, self.parts, self.copies, self.barriers = threading.Semaphore(0), [], [], {}
        self.copy_speed = self.random.choice((0.2, 1, 1, 20))

    def run(self, function):
        Partition("the program", function, {})
        try:
            while not all(p.done for p in self.parts):
                self.step()
            operations = [o for p in self.parts for o in p.products + p.stores if not o.waited]
            for left in self.copies + operations:
                raise Fault("leftover", f"the program ends without a wait for {left.name}")
            for barrier in self.barriers.values():
                if barrier.bytes:
                    raise Fault("barrier", f"the program ends with {barrier}")
        finally:
            self.stopped = True
            for part in self.parts:
                if not part.done:
                    part.go.release()
                    part.thread.join()

    def step(self):
        choices = [(p.speed, p) for p in self.parts if not p.done and p.ready()]
        choices += [(self.copy_speed, c) for c in self.copies]
        choices += [(1, op) for p in self.parts for op in [o for o in p.products if not o.done][:1]]
        if not choices:
            raise Fault("deadlock", "; ".join(f"{p.name} {p.waits()}" for p in self.parts if not p.done))
        weights, things = zip(*choices, strict=True)
        chosen = self.random.choices(things, weights)[0]
        if not isinstance(chosen, Partition):
            chosen.execute()
            return
        self.current = chosen
        chosen.go.release()
        self.back.acquire()
        if chosen.error:
            raise chosen.error

    def pause(self, ready=lambda: True, waits=lambda: "can go on"):
        """Let the scheduler choose; return the partition that called."""
        me = self.current
        me.ready, me.waits = ready, waits
        self.back.release()
        me.go.acquire()
        if self.stopped:
            raise Stopped
        me.clock[me.id] += 1
        return me

    def count_stores(self, tensor, ids):
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        address = tensor.untyped_storage().data_ptr()
        counts = self.stored.setdefault(address, torch.zeros(size, dtype=torch.int32))
        counts.index_add_(0, ids.reshape(-1).long(), torch.ones(ids.numel(), dtype=torch.int32))


class Copy(Agent):
    """A TMA copy in flight: to shared memory with a barrier, else from it."""

    def __init__(self, desc, coord, view, barrier=None):
        name = f"{'copy of' if barrier else 'store to'} {desc.name}{[int(c) for c in coord]}"
        super().__init__(name, _machine.current.clock)
        self.desc, self.view, self.barrier = desc, view, barrier
        if view.shape != desc.block_shape[len(desc.block_shape) - len(view.shape) :] or view.data.nbytes != desc.nbytes:
            raise Fault("shape", f"{name}: box {desc.block_shape}, buffer {view.shape}")
        if view.dtype != desc.dtype or len(coord) != len(desc.shape):
            raise Fault("shape", f"{name}: {desc.dtype} and {view.dtype}, {len(desc.shape)} coordinates wanted")
        ends = [max(int(at), min(n, int(at) + b)) for at, b, n in zip(coord, desc.block_shape, desc.shape, strict=True)]
        self.outer = tuple(slice(int(at), end) for at, end in zip(coord, ends, strict=True))
        self.inner = tuple(slice(0, end - int(at)) for at, end in zip(coord, ends, strict=True))
        self.access(view, write=barrier is not None, asynchronous=True)
        _machine.copies.append(self)

    def execute(self):
        _machine.copies.remove(self)
        if self.barrier:
            box = torch.zeros(self.desc.block_shape, dtype=self.view.dtype)
            box[self.inner] = self.desc.base[self.outer]  # what is outside stays zero
            self.view.data.copy_(box.view(self.view.shape))
            self.barrier.release(landed=self.desc.nbytes, clock=self.clock)
        else:
            self.desc.base[self.outer] = self.view.data.reshape(self.desc.block_shape)[self.inner]
            _machine.count_stores(self.desc.base, self.desc.ids[self.outer])
        self.done = True


class Product(Agent):
    """A wgmma in flight, into result. It reads its operands when it executes, at the latest at its wait."""

    def __init__(self, a, b, acc, use_acc, result):
        super().__init__(f"the product of {where()}", _machine.current.clock)
        self.operands, self.acc, self.result = (a, b), acc if use_acc else None, result
        for x in self.operands:
            if hasattr(x, "alloc"):
                self.access(x, write=False, asynchronous=True)
        (m, k), (k2, n) = a.shape, b.shape
        if k != k2 or list(acc.shape) != [m, n] or a.dtype != b.dtype or m % 64 or k % 16 or n % 8:
            raise Fault("shape", f"{self.name}: {a.shape} @ {b.shape} + {acc.shape}")
        _machine.current.products.append(self)

    def execute(self):
        a, b = (x.data.to(torch.float32) for x in self.operands)
        self.value = a @ b
        if self.acc is not None:
            self.value += self.acc if self.acc.op is None else self.acc.op.value
        self.operands, self.acc, self.done = (), None, True

    def finish(self):
        if not self.done:
            self.execute()
        self.waited = True
        self.result.copy_(self.value)


class Barrier:
    """An mbarrier. pending: arrivals of this phase to come; seen: the clock of its last phase."""

    def __init__(self, name, count, access):
        self.name, self.count, self.pending, self.bytes, self.phase, self.access = name, count, count, 0, 0, access
        self.arriving, self.seen = {}, {}

    def release(self, arrivals=0, expected=0, landed=0, clock=None):
        clock = _machine.current.clock if clock is None else clock
        for who, at in clock.items():
            self.arriving[who] = max(at, self.arriving.get(who, 0))
        self.pending, self.bytes = self.pending - arrivals, self.bytes + expected - landed
        if self.pending < 0:
            raise Fault("barrier", f"{self.name}: more arrivals than its count of {self.count}, at {where()}")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending, self.seen = self.phase + 1, self.count, dict(self.arriving)

    def __str__(self):
        return (
            f"{self.name}, in phase {self.phase}, {self.pending} of {self.count} arrivals, {self.bytes} bytes to come"
        )
