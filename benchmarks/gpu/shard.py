"""A pytest plugin: `-p benchmarks.gpu.shard --shard 2/4` runs the second of every four tests, so that a long file
becomes steps of minutes."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", type=_shard, default=(1, 1), metavar="I/N", help="of every N tests the I-th")


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--shard wants I/N with 1 <= I <= N, got {text!r}")
    return int(index), int(count)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, count = config.option.shard
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % count != index - 1])
    items[:] = items[index - 1 :: count]
