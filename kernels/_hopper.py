"""Parts of all kernels for Hopper, and Gluon's names as the versions of Triton spell them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

if hasattr(tma, "async_load"):  # from Triton 3.8 on
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

if hasattr(gl.shared_memory_descriptor, "reinterpret"):  # from Triton 3.9 on

    @gluon.jit
    def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return buffer.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return buffer._reinterpret(dtype, shape, layout)


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a product of 64 rows for each four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """Allocate n barriers, whose phases end after so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(found.index(i), count=count)
    return found
