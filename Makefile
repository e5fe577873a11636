# `make verify` and `make test` set up what they need in $(VENV); a second run finds it done.
PYTHON ?= python3
VENV   ?= .venv
# Installed only where $(PYTHON) has no torch that will do.
TORCH  ?= torch==2.13.0
JOBS   ?= auto
# Of `make fuzz`: how long, and which examples.
MINUTES ?= 10
SEED    ?= 0

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
PACKAGE := $(VENV)/.package-installed
DEV     := $(VENV)/.dev-installed
DOCS    := $(VENV)/.docs-installed
C_SOURCES := $(wildcard src/dsattn/backends/cpu/*.[ch])

# One-liners for a Python that may be anything: torch compares its own version, so nothing is parsed by hand.
PYTHON_WILL_DO := import sys; sys.exit(sys.version_info < (3, 11))
TORCH_WILL_DO  := import torch; raise SystemExit(torch.__version__ < "2.9")
PACKAGES_SEEN  := import sys; [print(f"import site; site.addsitedir({p!r})") for p in sys.path if p.endswith("-packages")]
SITE_PACKAGES  := import sysconfig; print(sysconfig.get_path("purelib"))

.NOTPARALLEL:
.PHONY: help verify test lint self-test unit fuzz sanitize frontend-seam kernels format docs clean

help:
	@echo "make verify   compare every operator with the float64 oracle; report in build/verify.html and build/verify.json"
	@echo "make test     linters, the self-test of verify, the tests"
	@echo "make lint     the linters alone        make self-test   the mutants alone"
	@echo "make unit     the tests alone          make format      let ruff rewrite the sources"
	@echo "make docs     the documentation, built strictly into build/docs"
	@echo "make fuzz     the properties on random examples for MINUTES=10; SEED=1 makes others"
	@echo "make sanitize the C kernels under gcc's address and undefined-behaviour sanitizers, on cases and odd shapes"
	@echo "make frontend-seam   the wrappers of real cuDNN frontends on CPU tensors against their stand-ins, and the backend on them"
	@echo "make kernels         the kernels of the backend's calls, compiled without a GPU; both fetch up to 2 GB of releases once"
	@echo "make clean    remove build/ and $(VENV)"
	@echo "Both of the first set up $(VENV) by themselves. PYTHON=python3.12 chooses the interpreter."

# numpy is not needed, and torch's remark that it is absent is no part of the report.
verify: export PYTHONWARNINGS = ignore:Failed to initialize NumPy
verify: $(PACKAGE)
	@mkdir -p build
	$(PY) -m dsattn verify --suite quick --suite real-text --json build/verify.json --html build/verify.html

test: lint self-test unit

lint: $(DEV)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(VENV)/bin/clang-format --dry-run --Werror $(C_SOURCES)
	$(PY) -m pyrefly check --python-interpreter-path $(PY) --output-format min-text
	$(PY) -c 'from importlinter.cli import lint_imports_command as main; main()' --no-cache --no-logo

self-test: $(DEV)
	$(PY) -m dsattn verify --self-test

# One thread per process: the workers fill the cores, and OpenMP teams that share a core stall each other.
unit: $(DEV)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --maxprocesses 8 --dist worksteal

fuzz: $(DEV)
	OMP_NUM_THREADS=1 $(PY) tests/fuzz.py --minutes $(MINUTES) --seed $(SEED)

sanitize: $(DEV)
	$(PY) tests/sanitize.py

# RELEASES='--release 1.29.1 --arch sm90' for less than all.
frontend-seam: $(DEV)
	PYTHONPATH=src:tests $(PY) -m seam.environments $(RELEASES)

kernels: $(DEV)
	PYTHONPATH=src:tests $(PY) -m seam.environments --kernels $(RELEASES)

format: $(DEV)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	$(VENV)/bin/clang-format -i $(C_SOURCES)

# Warnings are errors, dead links among them. What the builder does not look at, the second line does: nothing that a page
# loads may come from another host, and images and files must be there. Neither needs a network.
docs: $(DOCS)
	$(PY) -m zensical build --strict --clean
	$(PY) tests/built_docs.py build/docs

clean:
	rm -rf build .cache $(VENV)

# A torch of the calling interpreter (a GPU image, an active environment) is used where it is, never fetched again: the
# new environment sees the packages that the caller sees. --system-site-packages would miss those of an active one.
$(PY):
	@$(PYTHON) -c '$(PYTHON_WILL_DO)' || { echo "Python 3.11 or newer is needed: make PYTHON=..." >&2; exit 1; }
	@echo "== $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@if $(PYTHON) -c '$(TORCH_WILL_DO)' 2>/dev/null; then \
	    echo "== on the torch of $(PYTHON)"; \
	    $(PYTHON) -c '$(PACKAGES_SEEN)' > "$$($(PY) -c '$(SITE_PACKAGES)')/packages-of-caller.pth"; \
	fi

$(PACKAGE): pyproject.toml | $(PY)
	@$(PY) -c '$(TORCH_WILL_DO)' 2>/dev/null || { echo "== $(TORCH)"; $(PIP) '$(TORCH)'; }
	@echo "== dsattn and what it needs"
	@$(PIP) --editable '.[plot]'
	@touch $@

$(DEV): $(PACKAGE)
	@echo "== linters and test tools"
	@$(PIP) --editable '.[dev,plot]'
	@touch $@

$(DOCS): $(PACKAGE)
	@echo "== documentation tools"
	@$(PIP) --editable '.[docs]'
	@touch $@
