"""Gluon's names for Hopper, as the versions of Triton spell them."""

from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):  # from Triton 3.8 on
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
