"""The page of a small model, and a browser for it."""

from __future__ import annotations

import base64
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import randomised
from study_models import known

import fastvit
from fastvit import zoo
from fastvit.study.explore import exploration, memory

NAME = "vit_of_the_tests"
CONFIG: dict[str, Any] = {
    "img_size": 40, "patch_size": 8, "num_classes": 10, "embed_dim": 48, "depth": 2, "num_heads": 3, "reg_tokens": 1,
}  # fmt: skip
NAMES = ("vit_tiny_patch16_224", "vit_small_patch32_224", "vit_base_patch16_384", "vit_small_patch14_dinov2")
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def small_model() -> Iterator[None]:
    """Within the context the zoo has the model; the page lists only a few others, and plans without eager attention."""
    with pytest.MonkeyPatch.context() as patch, known():
        patch.setitem(zoo.CONFIGS, NAME, CONFIG)
        patch.setattr(exploration, "_NAMES", NAMES)
        patch.setattr(memory, "PROVIDERS", ("sdpa", "fastvit"))
        yield


def weights(folder: Path) -> Path:
    """Write a file of weights that are large enough for attention and positions to differ."""
    path = folder / "weights.pth"
    torch.save(randomised(fastvit.VisionTransformer(**CONFIG), 0.3).state_dict(), path)
    return path


def picture(folder: Path) -> Path:
    """Write a picture whose name is markup."""
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    path = folder / "<img src=x onerror=alert(1)>&amp;.png"
    generator = np.random.default_rng(0)
    image.fromarray(generator.integers(0, 255, (60, 50, 3), dtype=np.uint8)).save(path)
    return path


def decoded(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


def similarities(text: str, positions: int) -> np.ndarray:
    """Return the cosines (positions, positions) that the page shows."""
    lower = np.zeros((positions, positions))
    lower[np.tril_indices(positions)] = decoded(text, np.int8) / 127
    return lower + np.tril(lower, -1).T


def rows_of(packed: dict[str, str], tokens: int) -> np.ndarray:
    """Return the rows (queries, N) that the page computes."""
    values = decoded(packed["values"], np.uint8).reshape(-1, tokens)
    return values / 255 * decoded(packed["most"], "<f4")[:, None]


def percent(x: float) -> str:
    return f"{100 * x:.{1 if x < 0.0995 else 0}f}\u00a0%"


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a headless browser, or skip the test and say what is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium is found: apt-get install chromium, or name one in $CHROMIUM")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Opened:
    """The page in a window, with its console messages and its requests."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.page = browser.new_page(viewport={"width": 1200, "height": 900})
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-complete]", state="attached")

    def number(self, within: str, name: str) -> int:
        """Return the number in an entry of a <dl>."""
        return int(re.sub(r"\D", "", self.text(f'{within} [data-name="{name}"] dd', first_line=True)))

    def text(self, selector: str, first_line: bool = False) -> str:
        text: str = self.page.locator(selector).first.inner_text()
        return text.splitlines()[0] if first_line else text

    def slide(self, within: str, name: str, *keys: str) -> None:
        """Press keys on a slider."""
        slider = self.page.locator(f'{within} input[data-name="{name}"]')
        for key in keys:
            slider.press(key)

    def parts(self, provider: str) -> dict[str, int]:
        """Return the bytes of a provider in the memory table, by part."""
        cells = self.page.locator(f'#memory-table td[data-provider="{provider}"]')
        found = cells.evaluate_all(
            "cells => cells.map((cell) => [cell.parentElement.dataset.part, +cell.dataset.bytes])"
        )
        return dict(found)
