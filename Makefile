PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# One process per core with one thread each: the models of tests are too small to share cores. Compiled modules are kept,
# because tests start processes that import them again.
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)

.DEFAULT_GOAL := help
.PHONY: help install browser demo deploy-demo docs test test-all check changelog bench clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/.installed  ## Create .venv with Atoll and the development tools

# Two stamps, for users and for developers: a second call installs nothing until the requirements change.
PIP = $(BIN)/python -m pip install -q --disable-pip-version-check

.venv/.core: pyproject.toml constraints.txt
	@echo "Installing Atoll into .venv (once; the first time takes a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) -c constraints.txt -e .
	@touch $@

.venv/.installed: .venv/.core
	@echo "Installing the development tools into .venv (once; the first time takes a few minutes) ..."
	@$(PIP) -c constraints.txt -e '.[dev]'
	@$(PIP) --no-deps byzfl==0.0.11  # without torchvision: tests read its rules only
	@touch $@

# Reports are tested in a real browser. One that is there is used; without one their tests are skipped, except in CI.
browser:  ## Install Chromium for the tests, unless there is a browser
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || { \
		echo "Installing Chromium from the system's packages (once) ..."; \
		$(SUDO) apt-get -qq update && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq -y install chromium >/dev/null; \
	} || echo "No browser could be installed with apt-get: install Chromium or Chrome to run the tests of reports."

demo: .venv/.core  ## Compare six methods on the bundled digits, 20 clients, 3 seeds
	$(BIN)/atoll compare local fedavg fedavg-ft fedprox ditto fedper \
		--task digits --partition dirichlet:0.3 --clients 20 --seeds 3

docs: .venv/.installed  ## Build the documentation as a site in site/; open site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Built site/index.html"

deploy-demo: .venv/.installed  ## Three hospitals and a server as processes, with TLS and keys: two methods, one report
	PATH="$(abspath $(BIN)):$$PATH" examples/sites.sh

test: check browser  ## Everything the continuous integration runs: lint, format, types, tests
	$(TESTS) -m "not slow"

test-all: check browser  ## The same with the slow tests
	$(TESTS)

check: .venv/.installed  ## Lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

changelog:  ## Join the fragments of changelog.d/ into CHANGELOG.md
	$(PYTHON) changelog.d/join.py

bench: .venv/.installed  ## Measure speed on this machine
	$(BIN)/atoll bench

clean:  ## Remove the environment, caches and build output (runs/ stays)
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
