"""No measured launch choice is in use, and the small model of study_models.py is in the zoo."""

from collections.abc import Iterator

import pytest
from study_models import known


@pytest.fixture(autouse=True)
def _models(nothing_tuned: None) -> Iterator[None]:
    with known():
        yield
