"""Run an example as a user does, with a torch that torchvision may not be built for: run_example.py FILE ARGUMENTS."""

import os
import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])  # for benchmarks.harness; the helpers' names are not wanted here
from benchmarks.harness import libraries

libraries.load("timm")
file = sys.argv[1]
sys.path[0] = os.path.dirname(file)
sys.argv = sys.argv[1:]
runpy.run_path(file, run_name="__main__")
