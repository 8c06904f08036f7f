"""Launch configurations: every GPU gets those of a target that is compiled and judged (test_targets.py), or a clear
word that there are no kernels for it; tiles fit the shared memory and the shapes."""

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch

from fastvit import ops
from fastvit.kernels import _attention_configs, _configs, _relative_configs
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices

# a compiled target, and the GPUs with no less shared memory that have its configurations
LIKE = {
    "sm_80": ["sm_87"],
    "sm_100": ["sm_103"],
    "sm_120": ["sm_86", "sm_89", "sm_121"],
    "gfx942": ["gfx90a", "gfx950", "gfx1100", "gfx1201"],
}
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_120": 99 * 1024, "gfx942": 64 * 1024}
TOO_OLD = ("sm_50", "sm_61", "sm_70", "sm_75")


def configurations(arch: str) -> list[Any]:
    """Return the configurations of every kernel, over lengths, head dimensions, widths and dtypes."""
    configs = []
    kernels = [getattr(_attention_configs, f"attention_{name}") for name in ("fwd", "bwd_dq", "bwd_dkdv", "bwd_short")]
    shapes = product((1, 17, 50, 64, 197, 256, 257, 577, 1024, 1370, 16385), range(16, 257, 8))
    dtypes = product(((2, False), (4, False), (4, True)), (False, True))
    for (n, d), ((itemsize, tf32), has_dropout) in product(shapes, dtypes):
        configs += [kernel(n, d, itemsize, has_dropout, arch, tf32) for kernel in kernels]
    for m, n in product((1, 197, 50_432), (192, 768, 3072)):
        configs += [gemm(m, n, 768, size, arch) for gemm in (_configs.gemm, _configs.gated_gemm) for size in (2, 4)]
        for itemsize, loaded in ((2, 2), (2, 4), (4, 4)):
            options = {"itemsize": itemsize, "loaded": loaded, "arch": arch, "multiprocessors": 100}
            configs.append(_configs.patch_embed(m, n, 588, **options))
            configs.append(_configs.patch_embed(n, 588, m, **options, split=True))
    for dim, backward in product((64, 768, 1664, 8192), (False, True)):
        configs.append(_configs.layer_norm(dim, backward=backward, arch=arch))
    return configs


@pytest.mark.parametrize(("target", "arch"), [(target, arch) for target, archs in LIKE.items() for arch in archs])
def test_every_gpu_has_the_configurations_of_a_compiled_target(target, arch):
    assert configurations(arch) == configurations(target)


@pytest.mark.parametrize("arch", TOO_OLD)
def test_a_gpu_without_kernels_falls_back_and_says_so(arch, triton_backend, device, monkeypatch):
    monkeypatch.setattr(backends, "_warned", set())
    monkeypatch.setattr(devices, "_target", lambda x: arch)
    x, w, b = torch.randn(2, 5, 32, device=device), torch.randn(32, device=device), torch.randn(32, device=device)
    with pytest.raises(backends.KernelUnsupported, match=f"{arch} is older than sm_80"):
        ops.layer_norm(x, w, b)
    with ops.use_backend("auto", strict=False), pytest.warns(UserWarning, match="older than sm_80"):
        out = ops.layer_norm(x, w, b)
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, (32,), w, b, 1e-6))


def test_tiles_of_a_grid_pad_little():
    columns = {width: _relative_configs.grid_columns(width, 64) for width in (1, 5, 14, 24, 32, 40, 64, 80, 96, 128)}
    assert columns == {1: 1, 5: 8, 14: 16, 24: 8, 32: 32, 40: 16, 64: 64, 80: 32, 96: 32, 128: 64}
    assert _relative_configs.grid_columns(64, 32) == 32


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_tiles_of_linear_layers_fit(arch):
    for m in (1, 100, 50_432):
        for n, k in ((3072, 768), (768, 3072)):
            for itemsize in (2, 4):
                config = _configs.gemm(m, n, k, itemsize, arch)
                assert config.block_m >= 64, "wgmma takes 64 rows"
                assert config.block_k * itemsize <= 128
                stages = config.num_stages if arch.startswith("sm") else 1
                assert (config.block_m + config.block_n) * config.block_k * itemsize * stages <= SHARED_MEMORY[arch]
                assert _configs.use_triton_gemm(m, n, k, itemsize, False) == (itemsize == 2)
            assert not _configs.use_triton_gemm(m, n, 588, 2, False), "rows of 1176 bytes have no 16-byte accesses"


MEASURED = {  # on an H200, at D = 768: by rows, whether ours was faster or as fast
    50_432: {"fc1": True, "fc2": True, "proj": True, "backward": False},
    6_304: {"fc1": True, "fc2": False, "proj": False, "backward": False},
    197: {"fc1": True, "fc2": False, "proj": True, "backward": True},
}


@pytest.mark.parametrize("m", MEASURED)
def test_the_vendor_s_matmul_runs_where_it_was_faster(m):
    shapes = {"fc1": (3072, 768), "fc2": (768, 3072), "proj": (768, 768), "backward": (3072, 768)}
    taken = {name: _configs.use_triton_gemm(m, *shapes[name], 2, name == "backward", "sm_90") for name in shapes}
    assert taken == MEASURED[m]
    for arch in ("sm_80", "sm_100", "gfx942"):
        assert all(_configs.use_triton_gemm(m, *shapes[name], 2, name == "backward", arch) for name in shapes)


def test_tma_takes_tiles_that_fill_a_hopper_gpu():
    """Two programs on each of 132 SMs, with a tile or more each."""
    plain = _configs.gemm(50_432, 3072, 768, 2, "sm_90")
    described = _configs.gemm(50_432, 3072, 768, 2, "sm_90", described=True)
    assert (plain.programs_per_sm, described.programs_per_sm) == (0, 2)
    assert dataclasses.replace(described, programs_per_sm=0) == plain, "for a tensor at an odd address, too"

    def taken(m, n, k=768, itemsize=2, arch="sm_90"):
        config = _configs.gemm(m, n, k, itemsize, arch, described=True)
        assert config.programs_per_sm or config == _configs.gemm(m, n, k, itemsize, arch)
        return config.programs_per_sm > 0

    assert taken(50_432, 768)
    assert taken(50_432, 768, 3072)
    assert taken(6304, 3072)
    assert taken(6304, 768)
    assert taken(128 * 66, 512)
    assert not taken(128 * 65, 512)
    assert not taken(197, 3072)
    assert not taken(50_432, 3072, itemsize=4)
    assert not any(taken(50_432, 3072, arch=arch) for arch in SHARED_MEMORY if arch != "sm_90")


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_tiles_of_patch_embeddings_fit(arch):
    for m, k, (itemsize, loaded) in product((1, 100, 25216, 10**6), (588, 768), ((2, 2), (2, 4), (4, 4))):
        options = {"itemsize": itemsize, "loaded": loaded, "arch": arch, "multiprocessors": 132}
        for shape, split in (((m, 768, k), False), ((768, k, m), True)):
            config = _configs.patch_embed(*shape, **options, split=split)
            tiles = (config.block_m + config.block_n) * config.block_k
            assert tiles * loaded * config.num_stages <= SHARED_MEMORY[arch]
            assert 1 <= config.splits <= (max(m // 256, 1) if split else 1)


@pytest.mark.parametrize("largest", [16, 64, 128])
def test_key_tails(largest):
    for n in range(1, largest + 1):
        first, second = _attention_configs.key_tails(n)
        assert all(width.bit_count() == 1 and 16 <= width <= largest for width in (first, second or 16))
        assert first > second
        assert first + second >= n
        assert not second or first < n, "only the last tile is masked"
        assert 7 * (first + second) <= 8 * 16 * -(-n // 16), "few scores are padding"


@pytest.mark.parametrize("kind", ["", "mask", "groups", "lengths"])
@pytest.mark.parametrize("d", [40, 48, 72, 80, 88, 96, 160])
def test_a_head_dimension_in_two_parts_has_a_loop(d, kind):
    """On sm_90: without a loop ptxas computes wrong addresses of the second part."""
    for n in range(17, 300, 7):
        for has_dropout in (False, True):
            assert _attention_configs.attention_fwd(n, d, 2, has_dropout, "sm_90", False, kind).loop


def test_four_programs_of_dkdv_share_a_multiprocessor_where_that_was_measured():
    """In plain attention of 49 to 64 dimensions, in 16 bits, where the last tile of queries is narrow."""

    def limited(n, d=64, itemsize=2, dropout=False, arch="sm_90", kind=""):
        config = _attention_configs.attention_bwd_dkdv(n, d, itemsize, dropout, arch, False, kind)
        assert (config.num_stages, config.max_registers) == (3, 128) or config.max_registers is None
        return config.max_registers is not None

    assert [n for n in (50, 196, 197, 201, 256, 257, 401, 577, 1025) if limited(n)] == [196, 197, 201, 257, 577, 1025]
    assert [d for d in (32, 48, 56, 64, 72, 80) if limited(197, d)] == [56, 64]
    assert not any((limited(197, itemsize=4), limited(197, arch="sm_80")))
    assert not any((limited(197, dropout=True), limited(197, kind="mask"), limited(197, kind="causal")))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize("d", [64, 80])
def test_last_tile_is_not_mostly_empty(arch, d):
    for n in (17, 64, 65, 129, 197, 257, 300, 385, 577, 1025):
        forward = _attention_configs.attention_fwd(n, d, 2, False, arch)
        dq = _attention_configs.attention_bwd_dq(n, d, 2, False, arch, False)
        dkdv = _attention_configs.attention_bwd_dkdv(n, d, 2, False, arch, False)
        for rows in (forward.block_m, dq.block_m, dkdv.block_n):
            assert -(-n // rows) * rows <= 1.1 * -(-n // 64) * 64
