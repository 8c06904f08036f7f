"""The cost of a call on the host, without a clock: the Python functions that it enters, the same on every machine."""

import sys
from pathlib import Path

import fastvit

PACKAGE = f"{Path(fastvit.__file__).parent}/"


def functions_entered(call):
    """Return the Python functions that call() enters, itself excluded, as file:name."""
    entered = []

    def note(frame, event, _):
        if event == "call":
            entered.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[1:]
