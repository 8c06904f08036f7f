import pytest
from host_recorder import HostRecorder

from fastvit.cuda_graphs import recorder


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[HostRecorder]:
    """Graphs of the CPU; the recorders that a test makes."""
    made: list[HostRecorder] = []
    monkeypatch.setattr(HostRecorder, "made", made)
    monkeypatch.setattr(recorder, "Recorder", HostRecorder)
    return made
