# Needs Python 3.11 or newer with its headers and venv, gcc and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JSON ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench lock clean

help: ## say what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

demo: $(READY) ## see it all work, on simulators; ends by itself
	@$(BIN)/imds-bridge demo

test: $(READY) ## run all tests, with branch coverage
	@$(BIN)/python -m pytest -n 4 --dist worksteal --cov=bridge --cov-branch --cov-report=term:skip-covered

lint: $(READY) ## linters, types and the architecture's floors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --platform win32
	$(BIN)/lint-imports

bench: $(READY) ## measure against the limits; JSON=FILE writes the figures, too
	@$(BIN)/python -m tests.bench $(if $(JSON),--json $(JSON))

lock: $(READY) ## choose versions anew; the lock files hold versions and hashes, no address
	$(BIN)/pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --upgrade --allow-unsafe --generate-hashes --strip-extras --all-extras \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file requirements.lock pyproject.toml
	$(BIN)/pip-compile --quiet --upgrade --allow-unsafe --generate-hashes --strip-extras --extra websocket \
		--build-deps-for wheel --constraint requirements.lock \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file requirements-runtime.lock pyproject.toml

clean: ## remove what was made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage build dist

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "imds-bridge needs Python 3.11 or newer, PYTHON=... chooses one")'
	@echo "installing into $(VENV) (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
