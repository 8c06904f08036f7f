"""Numbers, tensors, pointers, shared memory and TMA descriptors, as kernels under gluon_emulator.py see them."""

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


def plain(x):
    return x.data if isinstance(x, Value) else int(x) if isinstance(x, Scalar) else x


class Scalar(int):
    """An integer of the device."""

    def __new__(cls, x, wide=False):
        if not wide and not -(2**31) <= int(x) < 2**31:
            raise Fault("shape", f"{int(x)} does not fit 32 bits, at {where()}")
        self = super().__new__(cls, x)
        self.wide = wide
        return self

    def to(self, dtype):
        dtype = dtype_of(dtype)
        return float(self) if dtype.is_floating_point else Scalar(int(self), dtype is torch.int64)


class Value:
    """A tensor in registers. op: the product that computes it."""

    def __init__(self, data=None, op=None, shape=None):
        self.own, self.op, self.shape = data, op, list(data.shape) if op is None else shape

    @property
    def data(self):
        if self.op is None:
            return self.own
        if not self.op.waited:
            raise Fault("unready", f"{self.op.name}: its accumulator is used at {where()} before a wait for it")
        return self.op.value

    dtype = property(lambda self: self.own.dtype if self.op is None else torch.float32)
    type = property(lambda self: Fields(shape=self.shape, layout=Fields(), element_ty=self.dtype))

    def to(self, dtype):
        return Value(self.data.to(dtype_of(dtype)))

    def reshape(self, *shape):
        return Value(self.data.reshape(*shape))

    def permute(self, *order):
        return Value(self.data.permute(*order))

    def split(self):
        return Value(self.data[..., 0]), Value(self.data[..., 1])

    def __getitem__(self, key):
        return Value(self.data[key])

    def __neg__(self):
        return Value(-self.data)

    def __bool__(self):
        raise TypeError("a tensor is not a condition")


class Pointer:
    def __init__(self, tensor, offset=0):
        self.tensor, self.offset, self.dtype = tensor, offset, Fields(element_ty=tensor.dtype)

    def __add__(self, other):
        return Pointer(self.tensor, self.offset + plain(other))

    __radd__ = __add__

    def at(self, mask):
        """Return the offsets, which of them count, and the memory as one row."""
        offset = torch.as_tensor(self.offset)
        mask = torch.as_tensor(True if mask is None else plain(mask)).broadcast_to(offset.shape)
        extent = 1 + sum((n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        wrong = mask & ((offset < 0) | (offset >= extent))
        if wrong.any():
            raise Fault("bounds", f"offset {int(offset[wrong][0])} of a tensor of {extent}, at {where()}")
        return offset, mask, torch.as_strided(self.tensor, (extent,), (1,), self.tensor.storage_offset())


def _operator(kind, name):
    def scalar(self, other):
        if isinstance(other, float):
            return getattr(float(self), name)(other)
        if isinstance(other, Value | Pointer):
            return NotImplemented
        found = getattr(int, name)(self, int(other))
        return found if found is NotImplemented else Scalar(found, self.wide or getattr(other, "wide", False))

    def value(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        mine, other = self.data, plain(other)
        if isinstance(other, torch.Tensor) and mine.dim() != other.dim() and mine.dim() and other.dim():
            raise Fault("shape", f"{list(mine.shape)} and {list(other.shape)} at {where()}")
        return Value(getattr(mine, name)(other))

    return {Scalar: scalar, Value: value}[kind]


for _kind in (Scalar, Value):
    for _name in ["add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"] + ["truediv"] * (_kind is Value):
        for _side in ("", "r"):
            setattr(_kind, f"__{_side}{_name}__", _operator(_kind, f"__{_side}{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(Value, f"__{_name}__"))


class Shared:
    """A view of shared memory. ids: the numbers of its elements in the allocation."""

    layout = None

    def __init__(self, alloc, data, ids):
        self.alloc, self.data, self.ids, self.shape, self.dtype = alloc, data, ids, list(data.shape), data.dtype
        self.low, self.high = int(ids.min()), int(ids.max()) + 1

    type = property(lambda self: Fields(shape=self.shape, element_ty=self.dtype))

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
        return self.changed(lambda x: x.view(*shape))

    def _reinterpret(self, dtype, shape, layout):
        if dtype_of(dtype) != self.dtype:
            raise Fault("shape", f"{self}: reinterpreted as {dtype}")
        return self.changed(lambda x: x.reshape([int(n) for n in shape]))

    def load(self, layout=None):
        now().pause().access(self, write=False)
        return Value(self.data.clone())

    def store(self, value):
        me = now().pause()
        me.unfenced.append(me.access(self, write=True))
        if value.shape != self.shape or value.dtype != self.dtype:
            raise Fault("shape", f"{self}: store of {value.shape} {value.dtype}")
        self.data.copy_(value.data)

    def __str__(self):
        return f"{self.alloc.name}[{self.low}:{self.high}]"


class Descriptor:
    def __init__(self, base, block_shape, name):
        self.base, self.shape, self.block_shape, self.name = base, list(base.shape), [int(b) for b in block_shape], name
        size = base.untyped_storage().nbytes() // base.element_size()
        self.ids = torch.as_strided(torch.arange(size), base.shape, base.stride(), base.storage_offset())
        self.dtype, self.layout, self.numel = base.dtype, None, torch.Size(self.block_shape).numel()
        self.nbytes = self.nbytes_per_cta = self.numel * base.element_size()
        self.block_type = Fields(shape=self.block_shape, nbytes=self.nbytes, element_ty=base.dtype)
        aligned = all(s * base.element_size() % 16 == 0 for s in base.stride()[:-1]) and base.data_ptr() % 16 == 0
        if max(self.block_shape) > 256 or not aligned or base.stride(-1) != 1:
            raise Fault("shape", f"descriptor {name}: box {block_shape}, strides {base.stride()}")
