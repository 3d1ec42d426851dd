# Two commands matter: `make reproduce` and `make test`. Everything they need goes into .venv.
#
# On a GPU machine whose python3 already has torch with CUDA, that Python is used as it is (WORKBENCH_PYTHON
# overrides the choice); elsewhere .venv gets the CPU set-up pinned in constraints.txt.

TARGET ?= cpu
PY ?= 3.12
VENV := .venv
BASE_PYTHON ?= python3
STAMP := $(VENV)/.installed
HAS_CUDA_TORCH := $(if $(filter-out cpu,$(TARGET)),$(shell $(BASE_PYTHON) -c \
  "import torch, sys; print('yes' if torch.cuda.is_available() else '')" 2>/dev/null))
WORKBENCH_PYTHON ?= $(if $(HAS_CUDA_TORCH),$(BASE_PYTHON),$(VENV)/bin/python)
INSTALLED := $(if $(filter $(VENV)/bin/python,$(WORKBENCH_PYTHON)),$(STAMP))
TESTS := $(VENV)/bin/python -m pytest -n 2 --dist loadfile
TORCH_CPU_INDEX ?=
PIP_FLAGS := --disable-pip-version-check --quiet $(if $(TORCH_CPU_INDEX),--extra-index-url $(TORCH_CPU_INDEX))
export OMP_NUM_THREADS ?= 1

.PHONY: help reproduce test test-all check lab wheelhouse clean
help:
	@echo "make reproduce [TARGET=cpu]  execute every notebook, end with an index page"
	@echo "make test                    lint, types and tests (at most 12 minutes on 2 cores)"
	@echo "make test-all                also the long fuzzing, leak and soak tests"
	@echo "make lab                     JupyterLab on notebooks/"
	@echo "make wheelhouse PY=3.12      wheels for a GPU host without internet, into wheelhouse/"
	@echo "make clean                   remove .venv, caches and unfinished runs"

reproduce: $(INSTALLED)
	PYTHONPATH=$(CURDIR) $(WORKBENCH_PYTHON) -m workbench.cli reproduce --target $(TARGET)

test: check
	$(TESTS) -m "not slow" tests

test-all: check
	$(TESTS) tests

check: $(STAMP)
	$(VENV)/bin/ruff check workbench tests
	$(VENV)/bin/ruff format --check workbench tests
	$(VENV)/bin/mypy

lab: $(INSTALLED)
	PYTHONPATH=$(CURDIR) $(WORKBENCH_PYTHON) -m workbench.cli lab

# The stamp is as new as the last installation: nothing is downloaded again until a pin changes.
$(STAMP): pyproject.toml constraints.txt
	$(BASE_PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))" || \
	  { echo "python3 must be 3.11 to 3.13: set BASE_PYTHON=python3.12"; exit 1; }
	test -x $(VENV)/bin/python || $(BASE_PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[dev]' -c constraints.txt
	touch $@

# For a GPU host that has torch, triton and CUDA but no internet: carry the folder there, then
#   python3 -m pip install --no-index --find-links wheelhouse -r wheelhouse/requirements.txt
wheelhouse:
	mkdir -p wheelhouse
	$(BASE_PYTHON) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  own = [d for d in p['dependencies'] if not d.startswith(('torch', 'triton'))]; \
	  print('\n'.join([*own, *p['optional-dependencies']['gpu-cu13'], 'transformers', 'pytest', 'hypothesis']))" \
	  > wheelhouse/requirements.txt
	$(BASE_PYTHON) -m pip download $(PIP_FLAGS) --dest wheelhouse --only-binary :all: --python-version $(PY) \
	  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 -r wheelhouse/requirements.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	rm -rf papermill_runs/*/*/.partial-*
