# Needs only Python 3.10 or newer and make. The first target that runs makes .venv and installs
# what it needs, as pinned in constraints.txt: demo less than the others, which need what the tests
# need. After that only release needs a network, and docs, the first time.
#
#   make demo                     train, break things, prove that nothing was lost
#   make check                    the rules of the house, types, and all tests that start no job
#   make check jobs               what every change must pass
#   make test                     all quick tests
#   make test-all                 all tests, with the slow tests, for an hour
#   make test-clusters            jobs on real cluster managers, where they are installed
#   make kubernetes-lab           those on Kubernetes, after building its control plane
#   make yarn-lab                 all tests of YARN, on a ResourceManager of Hadoop that they start
#   make docs                     these documents as a site, in build/site
#   make pictures                 the README's pictures, from one run of the demo; needs Chromium
#   make release                  the packages of a release, in dist, built and tried out
#   make demo PYTHON=python3.12   with another interpreter
#   make demo TORCH_INDEX=URL     take torch from a second package index as well, such as that of its
#                                 small CPU build: https://download.pytorch.org/whl/cpu
#
# TORCH_INDEX: on Linux the default package index serves torch built for CUDA, some gigabytes. To get
# the small CPU build, give the address above, which is PyTorch's own index of CPU wheels, or that of
# a mirror: a build found there wins over a plain one of the same version.

PYTHON ?= python3
TORCH_INDEX ?=
SEEDS ?= 0:200
COUNT ?= 1000000
PYTEST_OPTIONS ?=
SEED ?= 0
MUTANTS ?=
PEERS ?=
WEEKS ?= 0:20
MANAGER ?=
LABS ?= $(HOME)/.cache/holdfast-labs
export KUBEBUILDER_ASSETS ?= $(patsubst %/built,%,$(wildcard $(LABS)/kubernetes/built))
export HOLDFAST_NODE ?= $(patsubst %/built,%,$(wildcard $(LABS)/node/built))
export HOLDFAST_KUEUE ?= $(patsubst %/built,%,$(wildcard $(LABS)/kueue/built))
export HOLDFAST_JOBSET ?= $(patsubst %/built,%,$(wildcard $(LABS)/jobset/built))
export HOLDFAST_YARN_JARS ?= $(patsubst %/.fetched,%,$(wildcard $(LABS)/yarn/.fetched))

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_STAMP := $(VENV)/.installed-torch
DEMO_STAMP := $(VENV)/.installed-demo
# No compiling: it would take as long as the rest, for modules that are mostly never imported.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile -c constraints.txt
PEERS_ENV := build/peers
PEERS_PIP := $(PEERS_ENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile \
  -c benchmarks/peers_constraints.txt
PYTEST := $(BIN)/python -m pytest -q
UNITS = $(shell find tests -name unit -type d)
JOBS = $(shell find tests -name jobs -type d)
FIND_JAVA = command -v java >/dev/null || { echo "make yarn-lab needs Java 17, which runs Hadoop \
(on Debian: apt-get install openjdk-17-jre-headless)." >&2; exit 1; }

.PHONY: help demo check lint types rules units jobs test test-all coverage test-clusters kubernetes-lab yarn-lab yarn-contract weeks fuzz sim mutants bench bench-peers docs pictures release clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(DEMO_STAMP)
	$(BIN)/holdfast demo

check: lint types rules units

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

rules: $(STAMP)
	$(PYTEST) tests/house

# Everything that starts no job.
units: $(STAMP)
	$(PYTEST) -n 2 --dist worksteal $(UNITS) $(PYTEST_OPTIONS)

# Two processes: enough to halve the time, few enough that the tests' own workers are not starved.
# PYTEST_OPTIONS=--fail-on-missing-packages fails if a test is skipped for lack of a Debian package.
# The house rules are left to `make check`.
test: $(STAMP)
	$(PYTEST) -n 2 --dist worksteal --ignore=tests/house $(PYTEST_OPTIONS)

# What `make test` runs after `make check`.
jobs: $(STAMP)
	$(PYTEST) -n 2 --dist worksteal $(JOBS) $(PYTEST_OPTIONS)

test-all: $(STAMP)
	$(PYTEST) -n 2 --dist worksteal -m "not clusters" $(PYTEST_OPTIONS)

# What the quick tests run of the source, also in processes that they start: build/coverage/html.
# Lines that only a killed process has run are missing, since it cannot tell of them.
coverage: $(VENV)/.installed-coverage
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest -q -n 2 --dist worksteal $(PYTEST_OPTIONS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage html -q -d build/coverage/html
	$(BIN)/coverage report --skip-covered --sort=miss | tail -n 40

# Managers that are not installed are skipped, with the package that brings them. One process: each
# test is a cluster.
test-clusters: $(STAMP)
	$(PYTEST) -m clusters -rs $(PYTEST_OPTIONS)

# Real servers on this machine. They are built once, from their public packages, and kept in LABS,
# where test-clusters finds them, too.
kubernetes-lab: $(STAMP)
	tests/labs/build_control_plane.sh $(LABS)/kubernetes
	tests/labs/node/build.sh $(LABS)/node
	tests/labs/build_controller.sh kueue $(LABS)/kueue
	tests/labs/build_controller.sh jobset $(LABS)/jobset
	KUBEBUILDER_ASSETS=$(LABS)/kubernetes HOLDFAST_NODE=$(LABS)/node HOLDFAST_KUEUE=$(LABS)/kueue \
	  HOLDFAST_JOBSET=$(LABS)/jobset $(PYTEST) -m clusters -rs \
	  -k "kubernetes or containers or kueue" $(PYTEST_OPTIONS)

# Java 17; Maven and a network the first time.
yarn-lab: $(STAMP) $(LABS)/yarn/.fetched
	@$(FIND_JAVA)
	HOLDFAST_YARN_JARS=$(LABS)/yarn $(PYTEST) -m "" -rs tests/clusters/yarn $(PYTEST_OPTIONS)

# The part of it that each change must pass, in about a minute: an adapter's contract.
yarn-contract: $(STAMP) $(LABS)/yarn/.fetched
	HOLDFAST_YARN_JARS=$(LABS)/yarn $(PYTEST) -m "" -rs tests/clusters/yarn/jobs/test_yarn_cluster.py \
	  -k "contract and others" $(PYTEST_OPTIONS)

# The stamp comes last here, too. Each jar has a name with its version, so old ones must go first.
$(LABS)/yarn/.fetched: tests/labs/yarn_pom.xml
	@$(FIND_JAVA)
	@command -v mvn >/dev/null || \
	  { echo "make yarn-lab needs Maven, to fetch Hadoop's jars (on Debian: apt-get install maven)." >&2; exit 1; }
	rm -f "$(LABS)/yarn/"*.jar
	mvn -q -B -f $< dependency:copy-dependencies -DoutputDirectory="$(abspath $(LABS))/yarn"
	@touch $@

# An operator's acts on each manager, drawn from the seeds A to B-1 of WEEKS=A:B: three to ten minutes
# for each seed and manager. MANAGER=slurm for one of them.
weeks: $(STAMP)
	HOLDFAST_WEEKS=$(WEEKS) $(PYTEST) -m clusters -rs -s tests/clusters/jobs/test_operator_weeks.py -k "$(MANAGER)" \
	  $(PYTEST_OPTIONS)

# The same as the slow tests of tests/engine/wire/jobs/test_fuzz.py; COUNT=N inputs for each of the two fuzzers.
fuzz: $(STAMP)
	$(BIN)/python tests/fuzz/run.py plain $(COUNT)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
	  { echo "no coverage-guided fuzzing: atheris is not installed (holdfast[fuzz])"; exit 0; } && \
	  $(BIN)/python tests/fuzz/run.py coverage $(COUNT)

sim: $(STAMP)
	$(BIN)/holdfast sim --seeds $(SEEDS)

# Random one-line bugs, and who notices: docs/testing.md. SEED=N for another sample; more options in
# MUTANTS, such as MUTANTS="--count 50 --only '*/core/tree.py'".
mutants: $(STAMP)
	PYTHONPATH=tests:tests/kits $(BIN)/python -m mutants.survey --jobs 2 --seed $(SEED) $(MUTANTS)

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

# Other frameworks, in an environment of their own; torchft's wheel is for Python 3.11 on Linux.
# PEERS="--kills 2 --freezes 1" for a shorter look.
bench-peers: $(STAMP) $(PEERS_ENV)/.installed
	$(BIN)/python benchmarks/peers.py $(PEERS)

$(PEERS_ENV)/.installed: benchmarks/peers_constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "torchft needs Python 3.11: make bench-peers PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(PEERS_ENV)
	$(PEERS_PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch numpy
	$(PEERS_PIP) torchft 'ray[train]' torchdata
	@touch $@

# The site asks other servers for nothing, neither while it is built nor where it is read.
docs: $(VENV)/.installed-docs
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict
	@echo "built; to read it: $(PYTHON) -m http.server --directory build/site"

# docs/demo.png, docs/report.png, docs/kill.svg and the lines below it in the README. With
# CHROMIUM=/path/to/chromium if it is not on the path.
pictures: $(DEMO_STAMP)
	$(BIN)/python docs/draw_pictures.py

# CONTRIBUTING.md says how a release is made. The interpreter is that of the empty environment, too.
release: $(VENV)/.installed-release
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) .ci/release $(BIN)/python

# The tools of one target, which the others do not need: an extra of pyproject.toml.
$(VENV)/.installed-%: $(STAMP)
	$(PIP) --no-build-isolation -e '.[$*]'
	@touch $@

# Stamps are written last: an interrupted installation is simply done again. torch comes first,
# by itself, so that TORCH_INDEX is asked for nothing else; no build isolation, so that a current
# environment is brought up to date without a network.
$(TORCH_STAMP): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Holdfast needs Python 3.10 or newer: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	  { echo "No venv module (on Debian and Ubuntu it is the package python3-venv)." >&2; exit 1; }
	@echo "installing into $(VENV); the first time this takes some minutes"
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch setuptools
	@touch $@

# What the tests need includes what the demo needs.
$(STAMP): $(TORCH_STAMP) pyproject.toml constraints.txt src/holdfast/engine/core/errors.py
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $(DEMO_STAMP) $@

$(DEMO_STAMP): $(TORCH_STAMP) pyproject.toml constraints.txt src/holdfast/engine/core/errors.py
	$(PIP) --no-build-isolation -e '.[demo]'
	@touch $@

# Keeps the environment, which is slow to make; `rm -rf .venv` starts from nothing.
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find $(wildcard src tests examples benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +
