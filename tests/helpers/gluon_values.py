"""Tensors in registers, pointers, shared memory and descriptors, as kernels in gluon_emulator.py see them."""

import torch
from gluon_machine import Fault, now, where


def dtype_of(x):
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "int1": "bool"}
    return x if isinstance(x, torch.dtype) else getattr(torch, names.get(str(x), str(x)))


class Fields:
    """A layout or a type, of which little matters."""

    layout = None

    def __init__(self, *_, **fields):
        self.__dict__.update(fields)


class Registers(torch.Tensor):
    """A number or a tensor of the kernel. op: the product that computes it."""

    op = None
    type = property(lambda self: Fields(shape=self.shape, layout=None))

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        for x in args:
            op = x.op if isinstance(x, Registers) else None
            if op is not None and not op.waited and function.__name__ != "__get__":
                raise Fault("unready", f"{op.name}: its accumulator is used at {where()} before a wait for it")
        return super().__torch_function__(function, kinds, args, kwargs or {})

    def to(self, dtype):
        return super().to(dtype_of(dtype))

    def split(self):
        return self[..., 0], self[..., 1]


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"):  # x += 1 makes a new value
    setattr(Registers, f"__i{_name}__", getattr(torch.Tensor, f"__{_name}__"))


def registers(x, dtype=None):
    return torch.as_tensor(x, dtype=dtype).as_subclass(Registers)


class Pointer:
    def __init__(self, tensor, offset=0):
        self.tensor, self.offset, self.dtype = tensor, offset, Fields(element_ty=tensor.dtype)

    def __add__(self, other):
        return Pointer(self.tensor, self.offset + other)

    def at(self, mask):
        """Return the offsets, which of them count, and the memory as one row."""
        offset = torch.as_tensor(self.offset).long()
        mask = torch.as_tensor(True if mask is None else mask).broadcast_to(offset.shape)
        extent = 1 + sum((n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        wrong = mask & ((offset < 0) | (offset >= extent))
        if wrong.any():
            raise Fault("bounds", f"offset {int(offset[wrong][0])} of a tensor of {extent}, at {where()}")
        return offset, mask, torch.as_strided(self.tensor, (extent,), (1,), self.tensor.storage_offset())


class Shared:
    """A view of shared memory. ids: the numbers of its elements in the allocation."""

    layout = None

    def __init__(self, alloc, data, ids):
        self.alloc, self.data, self.ids, self.shape, self.dtype = alloc, data, ids, list(data.shape), data.dtype
        self.low, self.high, self.type = int(ids.min()), int(ids.max()) + 1, Fields(shape=self.shape)
        self.is_whole = ids.numel() == self.high - self.low

    def overlaps(self, other):
        """Whether views of one allocation share an element."""
        apart = self.low >= other.high or other.low >= self.high
        return not apart and ((self.is_whole and other.is_whole) or bool(torch.isin(self.ids, other.ids).any()))

    def covers(self, other):
        return self.is_whole and self.low <= other.low and other.high <= self.high

    def changed(self, change):
        return Shared(self.alloc, change(self.data), change(self.ids))

    def index(self, i):
        return self.slice(i, 1).changed(lambda x: x[0])

    def slice(self, start, length, dim=0):
        if start < 0 or start + length > self.shape[dim]:
            raise Fault("bounds", f"{self}: {int(start)} to {int(start + length)} of {self.shape[dim]}, at {where()}")
        return self.changed(lambda x: x.narrow(dim, int(start), int(length)))

    def permute(self, order):
        return self.changed(lambda x: x.permute(*order))

    def reshape(self, shape):
        return self.changed(lambda x: x.reshape([int(n) for n in shape]))

    def _reinterpret(self, dtype, shape, layout):
        if dtype_of(dtype) != self.dtype:
            raise Fault("shape", f"{self}: reinterpreted as {dtype}")
        return self.reshape(shape)

    def load(self, layout=None):
        now().pause().access(self, write=False)
        return registers(self.data.clone())

    def store(self, value):
        me = now().pause()
        me.unfenced.append(me.access(self, write=True))
        if list(value.shape) != self.shape or value.dtype != self.dtype:
            raise Fault("shape", f"{self}: store of {list(value.shape)} {value.dtype}")
        self.data.copy_(value)

    def __str__(self):
        return f"{self.alloc.name}[{self.low}:{self.high}]"


class Descriptor:
    layout = None

    def __init__(self, base, block_shape, name):
        self.base, self.shape, self.block_shape, self.name = base, list(base.shape), [int(b) for b in block_shape], name
        size = base.untyped_storage().nbytes() // base.element_size()
        self.ids = torch.as_strided(torch.arange(size), base.shape, base.stride(), base.storage_offset())
        self.dtype, self.nbytes = base.dtype, torch.Size(self.block_shape).numel() * base.element_size()
        self.block_type, self.nbytes_per_cta = Fields(shape=self.block_shape, nbytes=self.nbytes), self.nbytes
        aligned = all(s * base.element_size() % 16 == 0 for s in base.stride()[:-1]) and base.data_ptr() % 16 == 0
        if max(self.block_shape) > 256 or not aligned or base.stride(-1) != 1:
            raise Fault("shape", f"descriptor {name}: box {block_shape}, strides {base.stride()}")
