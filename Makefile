# make train   train examples/recommender.py     (ARGS="--nproc 4"; other examples: ARGS=dlrm, ARGS="lm --nproc 4")
# make docs    the documentation site, in build/docs/index.html
# make check   format check, lint, types
# make quick   the tests that start no processes
# make test    check, and the tests; of tests with three parameters or more, cases in which every two values meet
#              (make test ARGS="-k layering")
# make every   check, and all tests with all their cases: also slow ones, surveys, the site in a browser; then a soak
# make test-torch TORCH=2.14.1   the tests on simulated ranks and the surveys of ops with another torch (6 GB)
# make wheel   build both distributions, and try the wheel in empty environments (make wheel TORCH=2.14.1)
# make release TAG=v0.2.0   compare the tag with version and changelog; then the same
# Each prepares .venv when pyproject.toml or constraints.txt changed; otherwise it starts at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=

BIN := .venv/bin
RUN_READY := .venv/.ready-to-run
DEV_READY := .venv/.ready-to-test
DOCS_READY := .venv/.ready-for-docs
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
# Without compiled files each process would compile this package and all tests again.
unexport PYTHONDONTWRITEBYTECODE
# Only these files are collected: all of them take as long as a survey of some hundred ops.
SURVEYS = $$(grep -rl --include='*.py' pytest.mark.survey tests)
PARALLEL := --numprocesses auto --maxprocesses 8 --dist worksteal
# Tests that start processes wait half of their time, so three workers share two cores.
SHARING := --numprocesses $(shell expr $$(nproc) + $$(nproc) / 2) --maxprocesses 8 --dist worksteal

.PHONY: train docs check quick test tests surveys every test-torch wheel release

# The first word of ARGS may name the example; the others are its options.
JOB := $(filter recommender dlrm lm,$(firstword $(ARGS)))
train: $(RUN_READY)
	$(BIN)/python examples/$(or $(JOB:lm=language_model),recommender).py $(if $(JOB),$(wordlist 2,99,$(ARGS)),$(ARGS))

docs: $(DOCS_READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Built: build/docs/index.html"

check: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

quick: $(DEV_READY)
	$(BIN)/pytest -m "not processes and not slow and not browser and not survey" $(or $(ARGS),$(PARALLEL))

# Type checking has one core, so it runs beside the tests.
test: $(DEV_READY)
ifdef ARGS
	$(MAKE) check
	$(BIN)/pytest $(ARGS)
else
	$(MAKE) --jobs 2 check tests
endif

tests: $(DEV_READY)
	$(BIN)/pytest -m "not slow and not browser and not survey" $(SHARING)

surveys: $(DEV_READY)
	$(BIN)/pytest -m survey $(SURVEYS)

# Surveys of the op table and the soak keep all cores busy by themselves, so they run apart from the other tests.
# A slow machine has time for three disturbances: seed 14 begins with SIGKILL of all, SIGTERM, SIGKILL of a rank.
every: $(DEV_READY)
	$(MAKE) --jobs 2 check surveys
	$(BIN)/pytest --every-case -m "not survey" $(SHARING)
	$(BIN)/python -m tools.soak --seconds 60 --seed 14

wheel: $(DEV_READY)
	$(BIN)/python scripts/try_wheel.py $(if $(TORCH),--torch $(TORCH)) $(ARGS)

release: $(DEV_READY)
	$(BIN)/python scripts/check_release.py $(TAG)
	$(MAKE) wheel

TORCH_ENV := .venv-torch-$(TORCH)
TORCH_READY := $(TORCH_ENV)/.ready-to-test

test-torch: $(TORCH_READY)
	$(TORCH_ENV)/bin/pytest -m "not processes and not survey" $(or $(ARGS),$(PARALLEL))
ifndef ARGS
	$(TORCH_ENV)/bin/pytest -m survey $(SURVEYS)
endif

$(TORCH_READY): pyproject.toml constraints.txt
	$(if $(TORCH),,$(error make test-torch needs a version: make test-torch TORCH=2.14.1))
	$(PYTHON) -m venv $(TORCH_ENV)
	$(TORCH_ENV)/bin/python -m pip install --quiet --no-deps torch==$(TORCH) || \
		{ rm -r "$(TORCH_ENV)"; echo "pip cannot install torch $(TORCH). Fix: give a version that exists, as TORCH=2.14.1"; exit 1; }
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(TORCH_ENV)/constraints.txt
	$(TORCH_ENV)/bin/python -m pip install --quiet --constraint $(TORCH_ENV)/constraints.txt --editable ".[dev]"
	touch $@

$(RUN_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) ".[examples]"
	touch $@

$(DOCS_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) ".[docs,examples]"
	touch $(RUN_READY) $@

# What tests need includes what running and the site need, so this one answers for all.
$(DEV_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) ".[dev]"
	touch $(RUN_READY) $(DOCS_READY) $@
