# Two commands:
#   make train   train the recommender demo        (make train ARGS="--nproc 4"; of bytes: make train ARGS=lm)
#   make test    format check, lint, types, tests  (make test ARGS="-k layering")
# Each prepares .venv when pyproject.toml or constraints.txt changed; otherwise it starts at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=
ALL_TESTS := --numprocesses auto --maxprocesses 8 --dist worksteal

BIN := .venv/bin
RUN_READY := .venv/.ready-to-run
DEV_READY := .venv/.ready-to-test
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: train test

train: $(RUN_READY)
	$(BIN)/shardwise train $(ARGS)

test: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest $(or $(ARGS),$(ALL_TESTS))

$(RUN_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) .
	touch $@

# What tests need includes what running needs, so this one answers for both.
$(DEV_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) ".[dev]"
	touch $(RUN_READY) $@
