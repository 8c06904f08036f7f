"""Run Python in a session of its own that ends with the process that started it, even if that one is killed.

    python -m benchmarks.gpu.process_group ARGUMENTS...

The session is killed when the standard input of this process is closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    child = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def watch() -> None:
        sys.stdin.buffer.read()
        end()

    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    end()  # what the child has started and not ended
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    status = main()
    os._exit(status)  # the thread is still reading
