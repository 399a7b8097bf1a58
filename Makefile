# Each target sets up what it needs: on a fresh machine any one of them is enough.
#   make test ARGS="-k arrows"      what comes after the command
#   make install PYTHON=python3.13  another interpreter (3.11 to 3.13)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Most tests wait for processes, so there are more workers than cores; tests/scheduling.py says who runs what, the longest first.
PARALLEL ?= --numprocesses=3
BENCHMARKS ?= start restart takeover overhead progress detection checkpoint handling

# -qq: pip tells errors, not warnings about places that it looked at. The constraints hold for what builds the package too.
PIP_INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq

# The variable silences a notice about the end of mkdocs 1; warnings end the build, and are shown.
BUILD_SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1 | { grep -v -e '^INFO' -e '^$$' || true; }

# The modules are compiled once, and not in each of a thousand processes.
RUN_TESTS := scripts/system_packages.sh && $(BIN)/python -m compileall -q holdfast flows tasks policies detectors benchmarks && \
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest $(PARALLEL) --durations=20 -rfEs

PREFECT_TESTS ?= tests/integration/test_deployment.py tests/integration/test_cluster_health.py tests/integration/test_prefect_shows.py

FRAMEWORK_TESTS ?= tests/runtime/test_torchtitan.py tests/runtime/test_deepspeed.py tests/runtime/test_megatron.py

.PHONY: help install demo test test-long test-all durations test-prefect frameworks kubernetes gpu check docs conformance matrix bench lock clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install: $(VENV)/.all  ## Install Holdfast with all it needs to run into .venv
	@echo "Holdfast is installed: $(BIN)/holdfast --help"

demo: $(VENV)/.all  ## Train, break the training three times, and prove that nothing was lost
	@$(BIN)/holdfast demo $(ARGS)

test: $(VENV)/.dev  ## Run the tests, without those marked `long` (installs the system packages that they need)
	@$(RUN_TESTS) -m "not long" $(ARGS)

test-long: $(VENV)/.dev  ## Run the tests marked `long`: recovery on many hosts, every example, each way to stop a controller
	@$(RUN_TESTS) -m long $(ARGS)

test-all: $(VENV)/.dev  ## Run all tests
	@$(RUN_TESTS) $(ARGS)

durations: override ARGS += --record-durations
durations: test-all  ## Run all tests and write down how long each file takes: the order of the next runs

test-prefect: $(VENV)/.dev  ## Run the tests of flows and deployments with the newest Prefect that is supported
	@newest=$$(scripts/newest_prefect.sh $(VENV)) && "$$newest" -m prefect --version && "$$newest" -m pytest $(PARALLEL) $(PREFECT_TESTS) $(ARGS)

frameworks: $(VENV)/.dev  ## Run the tests of torchtitan, DeepSpeed and Megatron Core in an environment that has them (2 minutes and 1.5 GB)
	@python=$$(scripts/frameworks.sh $(VENV)) && "$$python" -m pytest -p no:xdist $(FRAMEWORK_TESTS) $(ARGS)

kubernetes: $(VENV)/.dev  ## Run the tests with a real Kubernetes API server, built from Debian's source (15 minutes and 3 GB the first time)
	@folder=$$(scripts/kube_apiserver.sh) && KUBERNETES_BIN="$$folder" $(BIN)/python -m pytest -p no:xdist tests/integration/test_kubernetes.py $(ARGS)

gpu: $(VENV)/.dev  ## Run tests/gpu on one NVIDIA card, 10 minutes at most; table and logs in build/gpu (without a card it says so, with status 0)
	@$(BIN)/python -m tests.gpu $(ARGS)

check: $(VENV)/.dev  ## Lint, formatting, types, spelling, documentation site
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/codespell
	@$(BUILD_SITE)
	@echo "check: ruff, formatting, types, spelling and the documentation site are fine"

docs: $(VENV)/.dev  ## Write the generated pages in docs/ anew, and build the site into build/site
	@$(BIN)/python -m docs.generate
	@$(BUILD_SITE)
	@echo "docs: open build/site/index.html"

conformance: $(VENV)/.dev  ## Run PyTorch's own tests over managed groups (minutes); ARGS=--update writes the list of what passes
	@$(BIN)/python -m tests.conformance $(ARGS)

matrix: $(VENV)/.dev  ## Run the tests of the runtime with each supported torch (10 minutes and 6 GB each); VERSIONS="2.14 2.15" for some, KEEP=1 keeps environments
	@$(BIN)/python -m tests.matrix $(if $(KEEP),--keep) $(if $(FAILED),--failed) $(if $(PYTHON),--python "$$(command -v $(PYTHON))") $(VERSIONS)

bench: $(VENV)/.all  ## Measure what the README claims; results in build/bench/
	@mkdir -p build/bench
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --json build/bench/$$name.json $(ARGS); done

lock:  ## Write constraints.txt anew (UPGRADE=1: with newer versions)
	@scripts/lock.sh

clean:  ## Remove what the targets above made
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@echo "Making $(VENV)"
	@"$$(scripts/find_python.sh $(PYTHON))" -m venv $(VENV)
	@touch $@

# torch comes first and by its exact version: asked for by a range, pip may take a build that pulls in gigabytes.
$(VENV)/.all: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing torch and Holdfast into $(VENV) (minutes the first time)"
	@$(PIP_INSTALL) "$$(grep '^torch==' constraints.txt)"
	@$(PIP_INSTALL) -e '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.all
	@echo "Installing what tests and checks need into $(VENV)"
	@$(PIP_INSTALL) -e '.[all,dev]'
	@touch $@
