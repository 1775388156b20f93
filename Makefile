# Needs Python 3.11 or newer with its headers and venv, gcc and make; everything else is installed into VENV.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP = $(BIN)/pip --disable-pip-version-check
# The version file names the commit: an installation writes it, and the first target after a new commit.
VERSION := bridge/version.txt
DEMO_READY := $(VENV)/.demo-ready $(VERSION)
READY := $(VENV)/.ready $(VERSION)
RELEASE_READY := $(VENV)/.release-ready $(VERSION)
JSON ?=
unexport PYTHONDONTWRITEBYTECODE # each test run and process would compile everything again

COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links

.DEFAULT_GOAL := help
.PHONY: help demo console quick test size coverage unit lint format-check types types-windows layers windows units recipes newcomer bench mutants soak fleet dist audit lock clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

demo: $(DEMO_READY) ## explain and show everything on simulators, in about a minute (FAST=1 leaves out the pauses)
	@$(BIN)/imds-bridge demo $(if $(FAST),--fast)

console: $(DEMO_READY) ## show the console with 60 simulated VMs at 60 times the speed, for MINUTES=10 (LISTEN=127.0.0.1:8080)
	@$(BIN)/imds-bridge demo --console $(LISTEN) $(if $(MINUTES),--minutes $(MINUTES))

quick: $(READY) ## run the unit tests and the linters, in less than a minute
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target unit lint

test: $(READY) ## run all tests, in a time zone other than UTC
	@TZ=Asia/Tokyo $(BIN)/python -m pytest -n 6 --dist worksteal

coverage: $(READY) ## run all tests and measure branch coverage, which takes more than twice as long
	@$(BIN)/python -m pytest -n 6 --dist worksteal --cov --cov-report=term:skip-covered

unit: $(READY) ## run the unit tests
	@$(BIN)/python -m pytest -n 2 tests/unit

size: ## print code lines and files of each package, and what else is read
	@$(PYTHON) -m tests.support.size

lint: format-check types types-windows layers ## check style, types and layers

format-check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

types-windows: $(READY) # a cache serves one platform
	$(BIN)/mypy --package bridge --platform win32 --cache-dir .mypy_cache/win32

layers: $(READY)
	$(BIN)/lint-imports

windows: $(READY) ## try everything that tests can on Windows' Python under Wine, in about ten minutes; keeps it in ~/.cache
	@VENV=$(VENV) tests/windows/run

units: $(READY) ## start every unit in its sandbox under a real systemd of Debian 11, 12 and 13, and operate them, in about five minutes; needs root, Debian's mmdebstrap
	@$(BIN)/python -m pytest -rs -m units tests/systemd

recipes: $(READY) ## try each recipe of infra/recipes with its program broken, restarted or changed, and print a table; needs what units needs
	@$(BIN)/python -m pytest -rs -m recipes tests/systemd/test_recipes.py

newcomer: ## run all tests of the last commit on a Debian 12 with the README's packages alone; keeps it in ~/.cache
	@tests/newcomer/run

bench: $(READY) ## measure against the limits; JSON=FILE also writes the figures to a file
	@$(BIN)/python -m tools.bench $(if $(JSON),--json $(JSON))

mutants: $(READY) ## make N single mistakes in a copy of the code, and list those that no test notices (SEED=1 repeats)
	@$(BIN)/python -m tools.mutants --count $(or $(N),200) $(if $(SEED),--seed $(SEED))

soak: $(READY) ## run everything at once under random faults for MINUTES=14, then check it (SEED=1 repeats the faults)
	@$(BIN)/python -m tools.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

fleet: $(READY) ## run 200 forwarders and 20 listeners through a storm of events, in at most 10 minutes (VMS=200 LISTENERS=20)
	@$(BIN)/python -m tools.fleet $(if $(VMS),--vms $(VMS)) $(if $(LISTENERS),--listeners $(LISTENERS))

dist: $(RELEASE_READY) ## build sdist, wheel, the release with all wheels, and SBOM into dist/, twice, and check them in a clean environment
	@VENV=$(VENV) tools/packaging/dist.sh

audit: $(RELEASE_READY) ## look for known vulnerabilities of the locked versions; DRY_RUN=1 needs no network
	@$(BIN)/pip-audit --strict --disable-pip --progress-spinner off $(if $(DRY_RUN),--dry-run) \
		$(foreach lock,$(wildcard requirements/*.lock),--requirement $(lock))

lock: $(READY) ## choose new versions; the lock files hold versions, markers and hashes, no address
	$(BIN)/pip install --quiet uv
	$(COMPILE) --upgrade --all-extras --group dev --output-file requirements/dev.lock pyproject.toml
	$(COMPILE) --constraint requirements/dev.lock --extra apprise --extra console --extra websocket --output-file requirements/runtime.lock pyproject.toml
	$(COMPILE) --constraint requirements/dev.lock --group release --output-file requirements/release.lock
	$(COMPILE) --group go --output-file requirements/go.lock
	$(COMPILE) --constraint requirements/dev.lock --group build --output-file requirements/build.lock
	echo pip | $(COMPILE) --upgrade --output-file requirements/pip.lock -
	$(COMPILE) --constraint requirements/dev.lock --extra console --extra lab --group build --output-file requirements/demo.lock pyproject.toml

clean: ## remove generated files
	rm -rf $(VENV) $(VERSION) .pytest_cache .mypy_cache .ruff_cache .hypothesis .schemathesis .coverage .coverage.* build dist

$(VENV)/.demo-ready: requirements/demo.lock pyproject.toml
	$(call install,requirements/demo.lock)
	@touch $@

$(VENV)/.ready: requirements/dev.lock pyproject.toml
	$(call install,requirements/dev.lock)
	@touch $(VENV)/.demo-ready $@

$(VENV)/.release-ready: requirements/release.lock $(VENV)/.ready
	@$(PIP) install --quiet --require-hashes --no-deps -r requirements/release.lock
	@touch $@

$(VERSION): $(wildcard $(shell git rev-parse --git-path logs/HEAD 2>/dev/null))
	@[ ! -x $(BIN)/hatchling ] || { $(BIN)/hatchling build --target wheel --hooks-only && touch $@; }

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "imds-bridge needs Python 3.11 or newer, PYTHON=... chooses one")'
	@$(PYTHON) -m bridge.lab.prerequisites
	@echo "installing into $(VENV) (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --require-hashes --no-deps -r $(1)
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(PIP) check --quiet # a lock file that lacks a package ends here, not in a test
endef
