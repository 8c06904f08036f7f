"""Gluon's names for Hopper, as the versions of Triton spell them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

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
