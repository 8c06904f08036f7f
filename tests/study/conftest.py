"""The small model of study_models.py is in the zoo."""

from collections.abc import Iterator

import pytest
from study_models import known


@pytest.fixture(autouse=True)
def _models() -> Iterator[None]:
    with known():
        yield
