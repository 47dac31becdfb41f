# make demo, make quick, make test: each sets up .venv first where that has not been done; make docs its own small
# environment.
# make quick: tests for the daily loop, without launches and trainings; make test: everything, before a merge.
# make gpu: the same, or from wheels/ where that is there.
# make oldest, make newest: tests on the oldest and the newest versions that pyproject.toml allows.

PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.setup
EDITABLE := --editable '.[deepspeed,nixl,peft,trl]' --group dev
WHEELS := wheels
GPU_PACKAGES := .gpu-packages
GPU_SETUP := $(GPU_PACKAGES)/.setup
DOCS_ENVIRONMENT := .venv-docs
DOCS_SETUP := $(DOCS_ENVIRONMENT)/.setup
CHECKPOINT := runs/checkpoint
DEMO := runs/demo

.PHONY: setup demo quick test lint types tests survey features docs oldest newest axolotl swift gpu gpu-wheels format clean

setup: $(SETUP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		f"{sys.executable} is Python {sys.version.split()[0]}; 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

$(SETUP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up .venv, once: torch, transformers and what tests need. It takes some minutes."
	@echo "Without a GPU PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves the download of CUDA."
	$(BIN)/python -m pip install 'pip>=25.1'  # which knows dependency groups
	$(BIN)/pip install --constraint constraints.txt torch
	$(BIN)/pip install --constraint constraints.txt $(EDITABLE)
	touch $@

# The weights are the last file that the script writes.
$(CHECKPOINT)/model.safetensors: $(SETUP) examples/make_checkpoint.py
	$(BIN)/python examples/make_checkpoint.py --output $(CHECKPOINT) --hidden_size 128 --layers 2 --vocab_size 2048

# Two processes on the CPU, whatever the machine has; DeepSpeed, which peft and TRL import, would warn of it.
demo: $(CHECKPOINT)/model.safetensors
	@CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 $(BIN)/accelerate launch \
		--config_file examples/configs/ddp.yaml --main_process_port 0 \
		examples/demo.py --model_name_or_path $(CHECKPOINT) --output_dir $(DEMO)
	@echo; echo "A step with hf_distca, traced; as a picture: $(DEMO)/step.svg"
	@$(BIN)/hf-distca timeline $(DEMO) --svg $(DEMO)/step.svg
	@echo; echo "Next:"
	@echo "  $(BIN)/hf-distca simulate --lengths prolong --ranks 64 --tokens-per-rank 32k --report runs/report.html"
	@echo "  $(BIN)/accelerate launch --config_file examples/configs/ddp.yaml examples/train.py $(CHECKPOINT) README.md --sample_by paragraph"
	@echo "  $(BIN)/hf-distca doctor"

QUICK_TESTS := $(addprefix tests/,plan planner predict profiling kernels models collator sim timeline cli docs) tests/test_*.py

# A second -m replaces that of pyproject.toml, so what that leaves out is named again.
quick: $(SETUP)
	@echo "Quick tests, without launches: at most three minutes on two cores."
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
		-m "not launches and not gpu and not survey and not further_strategy" $(QUICK_TESTS)

test: lint types tests

lint: $(SETUP)
	@echo "Lint: style, and the direction of imports."
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(SETUP)
	@echo "Types: a minute."
	$(BIN)/mypy
	$(BIN)/mypy tests/user_script.py  # an installed package has types, and a misspelt argument is found

# In the order of tests/conftest.py: by default files with the fewest tests come last, and those launch trainings.
# Three workers on two cores: tests of ranks that are stopped, of limits of time and of processes that start mostly wait.
# Its many processes read compiled files, also where a shell lets Python write none.
tests: export PYTHONDONTWRITEBYTECODE :=
tests: $(SETUP)
	@echo "Tests: a quarter of an hour on two cores."
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# The site into site/: site/index.html needs no server. A broken link, a missing page or a warning ends the build.
# Docstrings are read from the source, so that neither torch nor the library is installed for it.
docs: $(DOCS_SETUP)
	$(DOCS_ENVIRONMENT)/bin/mkdocs build --strict

$(DOCS_SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_ENVIRONMENT)
	$(DOCS_ENVIRONMENT)/bin/python -m pip install --quiet 'pip>=25.1'
	$(DOCS_ENVIRONMENT)/bin/pip install --quiet --constraint constraints.txt --group docs
	touch $@

# Every causal language model of transformers, where `make test` tries one for each mechanism, and simulations that
# pages show; some nine minutes. `python -m tests.survey.page` writes the page of models anew.
survey: $(SETUP)
	$(BIN)/python -m pytest -m survey --numprocesses 2 --dist loadfile tests/survey tests/docs

# What users turn on, as docs/reference/features.md has it. With bitsandbytes, bases in 4 bits too: it is not among what
# is set up, because peft imports it, and with it torch's compiler, in every process.
features: $(SETUP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[quantized]'
	$(BIN)/python -m pytest -m features

# What calls into other libraries, trains under accelerate as users launch it, and what a GPU would be given: PyPI's
# torch is the CUDA build.
VERSION_TESTS := tests/test_imports.py tests/kernels/test_contract.py tests/kernels/test_flash_varlen.py \
	tests/kernels/test_fused_triton.py tests/dispatch/test_launches.py::test_step_on_fake_cuda tests/gpu \
	tests/collator tests/dispatch/test_process_groups.py tests/patches/test_attention.py \
	tests/patches/test_compile.py tests/trainer/test_features.py \
	tests/trainer/test_parallel.py tests/images/test_inputs.py tests/images/test_processed.py \
	"tests/images/test_training.py::test_families[1-llava-False]"

# uv, because pip knows no way to take the oldest. What these versions need in turn is as new as they let it be.
oldest: RESOLUTION := lowest-direct
newest: RESOLUTION := highest
oldest newest:
	$(PYTHON) -m venv .venv-$@
	.venv-$@/bin/python -m pip install --quiet uv
	.venv-$@/bin/uv pip install --quiet --python .venv-$@/bin/python --resolution $(RESOLUTION) $(EDITABLE)
	.venv-$@/bin/uv pip list --python .venv-$@/bin/python
	CUDA_VISIBLE_DEVICES= .venv-$@/bin/python -m pytest $(VERSION_TESTS)

# Trainings of axolotl and ms-swift with the plugins, on two processes, against trainings of transformers. They need
# Python 3.12, as in make axolotl PYTHON=python3.12, and torch's CUDA build or another; no GPU.
axolotl: .venv-axolotl/.setup
	.venv-axolotl/bin/python tests/integrations/compare_axolotl.py runs/axolotl

swift: .venv-swift/.setup
	.venv-swift/bin/python tests/integrations/compare_swift.py runs/swift

.venv-axolotl/.setup: PROGRAM := axolotl==0.21.0
.venv-swift/.setup: PROGRAM := ms-swift==4.6.0 torch==2.13.0
.venv-axolotl/.setup .venv-swift/.setup: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(PROGRAM) --editable .
	touch $@

# Without a GPU it says so at once and fails with status 3: nothing was checked. With the folder wheels/ it needs no
# network, only a PYTHON that has torch, transformers and pip: what else the library needs is taken from the folder.
# GPU="kernel training" runs some parts; RESULTS=FILE is where results are written, after each part.
gpu:
	@$(PYTHON) benchmarks/gpu/devices.py
	@$(MAKE) --no-print-directory $(if $(wildcard $(WHEELS)),$(GPU_SETUP),$(SETUP))
	$(if $(wildcard $(WHEELS)),PYTHONPATH=$(GPU_PACKAGES) $(PYTHON),$(BIN)/python) \
		-m benchmarks.gpu $(if $(RESULTS),--output $(RESULTS)) $(GPU)

# Without resolving: pip would fail where one pin among the installed packages does not hold.
$(GPU_SETUP): $(wildcard $(WHEELS)/*.whl)
	rm -rf $(GPU_PACKAGES)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --target $(GPU_PACKAGES) $(wildcard $(WHEELS)/*.whl)
	touch $@

# For Python 3.12 on Linux, x86-64: what an installation for deep learning usually lacks.
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --implementation cp \
		$(foreach tag,2014_x86_64 _2_17_x86_64 _2_24_x86_64 _2_28_x86_64,--platform manylinux$(tag)) \
		--requirement benchmarks/gpu/wheels.txt --dest $(WHEELS)
	@du -sh $(WHEELS)

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-oldest .venv-newest $(DOCS_ENVIRONMENT) $(GPU_PACKAGES) $(WHEELS) runs site
