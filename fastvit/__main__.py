"""Run the command `fastvit` by `python -m fastvit`."""

import sys

from fastvit.cli import main

if __name__ == "__main__":
    sys.exit(main())
