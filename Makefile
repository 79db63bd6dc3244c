# Everything here works in a fresh clone with Python 3.10 or newer, make and git.
# Each target makes the environment that it needs, in .venv, and only once.

PYTHON ?= python3
VENV   ?= .venv
# One more than processors, up to 4, because many tests wait for a disk or for another process.
JOBS   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 3 ? n + 1 : 4 )))
ARGS   ?=

BIN  := $(VENV)/bin
WITH := $(VENV)/.with

# Folders of the quick tier, which is for other versions of Python than the one of `make test`.
QUICK := $(addprefix tests/, format policy state cli platforms store/local store/test_store.py \
  ownership interop test_layers.py test_doctests.py test_public.py)

# One thread of torch a worker, as in tests/conftest.py: $(JOBS) workers share the cores. Bytecode is
# kept, whatever the environment says: the tests start hundreds of processes that import the same.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-quick test-full test-long test-stores mutants samples check coverage bench bench-compare gpu docs dist lock clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*  ## ' Makefile | sed -E 's/^([a-z-]+):.*  ## (.*)/  make \1\t\2/' | expand -t 22
	@echo
	@echo '  PYTHON=python3.12   the interpreter for .venv      JOBS=4   test workers'
	@echo "  ARGS='...'          more arguments for the command that the target runs"

demo: $(WITH)-plot  ## Train a small GPT, kill it three times, and compare with the undisturbed run
	$(BIN)/python examples/demo/demo.py $(ARGS)

test: $(WITH)-test  ## Run the tests and the doctests, in minutes
	$(PYTEST) -n $(JOBS) --dist worksteal $(ARGS)

test-quick: $(WITH)-test  ## Run the tests that differ by Python: PYTHON=python3.12 VENV=.venv-3.12
	$(BIN)/python --version
	$(PYTEST) -n $(JOBS) --dist worksteal $(QUICK) $(ARGS)

test-full: $(WITH)-test  ## Run whole products and all small servers, too: before a release
	$(PYTEST) -n $(JOBS) --dist worksteal -m 'not long and not stores' $(ARGS)

test-long: $(WITH)-test  ## Run the long tier: more kills, more flips, more schedules
	$(PYTEST) -n $(JOBS) --dist worksteal -m long $(ARGS)

mutants: $(WITH)-test  ## Break our own code on purpose, and tell which test notices
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(ARGS)

test-stores: $(WITH)-test  ## Run the tests that need Ceph, Swift or many commits on real object stores
	$(PYTEST) -n $(JOBS) --dist worksteal -m stores $(ARGS)

samples: $(VENV)/.made  ## Make the samples in tests/golden/peers again, each by its own library
	$(BIN)/python tests/golden/peers/make.py $(ARGS)

check: $(WITH)-test $(WITH)-check  ## Format, lint, types, layers, doctests, workflows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*
	$(BIN)/zizmor --offline --quiet .github
	$(PYTEST) tests/test_layers.py tests/test_doctests.py $(ARGS)

coverage: $(WITH)-test  ## Run the tests of make test; fail below the floor of covered lines
	$(PYTEST) -n $(JOBS) --dist worksteal --cov --cov-report=term:skip-covered $(ARGS)

bench: $(WITH)-bench  ## Measure everything beside peers and the machine's limits; print the goals
	$(BIN)/python -m bench $(ARGS)

bench-compare: $(WITH)-bench  ## Compare two runs: make bench-compare OLD=a.json NEW=b.json
	$(BIN)/python -m bench.compare $(OLD) $(NEW) $(ARGS)

# Needs no environment: it looks for a Python whose torch has CUDA first.
gpu:  ## Test and measure on a GPU, in 9 minutes; without one the same on CPU tensors
	$(PYTHON) -m bench.gpu_run --python $(PYTHON) --venv $(VENV) $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

docs: $(WITH)-docs  ## Build the documents into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/docs $(ARGS)
	@echo 'build/docs/index.html'

dist: $(WITH)-check  ## Build the wheel and the source distribution into dist
	$(BIN)/hatchling build --clean $(ARGS)

clean:  ## Remove the environment and everything that was built
	rm -rf $(VENV) .servers build dist demo-output bench-output .mypy_cache .ruff_cache .pytest_cache

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'Holdfast needs Python 3.10 or newer; name one: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# One stamp and one lock for each extra, so that the demo does not wait for packages of the tests.
# --no-deps, because pip would ask for a hash of torch, too. The lock has the packages of the build,
# so that needs no isolation.
$(WITH)-%: $(VENV)/.made pyproject.toml requirements/%.txt requirements/torch.txt
	$(PIP) -r requirements/torch.txt
	$(PIP) --no-deps --require-hashes -r requirements/$*.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

LOCK := uv pip compile --quiet --universal --python-version 3.10 --no-python-downloads \
  --generate-hashes --no-annotate --custom-compile-command 'make lock' \
  --excludes requirements/torch.txt
lock_extra = printf 'hatchling\neditables\n' | $(BIN)/$(LOCK) --extra $(1) \
  -o requirements/$(1).txt $(2) $(ARGS) pyproject.toml - >/dev/null

# The dependencies of torchtitan hold fsspec back, and its bridge needs few of them: see the extra.
lock: $(VENV)/.made  ## Lock versions and hashes for new requirements; ARGS=--upgrade for new versions
	$(PIP) uv
	$(call lock_extra,test)
	echo "torchtitan==0.3.0; python_version >= '3.11'" | \
	  $(BIN)/$(LOCK) --no-deps --no-header - >> requirements/test.txt
	$(call lock_extra,check,-c requirements/test.txt)
	$(call lock_extra,docs,-c requirements/test.txt)
	$(call lock_extra,plot,-c requirements/test.txt)
	$(call lock_extra,bench)
