# The only things that must be on the machine are Python 3.12 to 3.14 with pip and venv, and make. The newest is taken;
# `make PYTHON=... VENV=... setup` makes another environment.
PYTHON ?= $(shell tools/newest-python)
VENV ?= .venv
LOCK ?= requirements.lock
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Else each process compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE
# How many processes share the tests.
JOBS ?= 2

.PHONY: demo demo-cluster test test-optimized test-oldest test-newest test-all nightly lint check docs mutants mutations programs bench setup dist lock clean

## demo: train on real digits with 4 replicas; picture in out/
demo: setup
	$(BIN)/python examples/digits.py

## demo-cluster: the same on 2 workers with 2 replicas each; ARGS=--kill-one kills one on the way
demo-cluster: setup
	rm -rf out/checkpoints
	$(BIN)/mirrored launch -n 2 --cpu-devices 2 --max-restarts 2 examples/digits.py --checkpoints out/checkpoints $(ARGS)

## test: the default test suite, and which tests took longest; TESTS=... some of it
test: setup
	$(BIN)/python -m pytest -q -n $(JOBS) --durations=5 --durations-min=5 $(TESTS)

# The files whose steps NumPy computes in the default suite: numbers that are compared with those of one device.
OPTIMIZED := $(shell grep -rl --include='test_*.py' in_numpy tests)

## test-optimized: numbers that are compared with those of one device, by XLA with its optimizations
test-optimized: setup
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -q -n $(JOBS) $(OPTIMIZED)

# What another version of Python, JAX, NumPy, Optax, grain or a model library can break: what we take of them, each docstring's
# example, and how two workers end. The numbers of one device are compared at night.
OF_VERSIONS := tests/_jax tests/_models tests/_command/test_check.py tests/data/test_sources.py tests/data/test_kinds.py \
  $(addprefix tests/test_,docs.py env.py optax.py public.py)

## test-oldest: what versions can break, with the oldest Python and JAX that are supported; `make nightly` runs all
test-oldest:
	$(MAKE) test VENV=.venv-oldest LOCK=requirements-oldest.lock PYTHON=$$(tools/newest-python 3.12) TESTS="$(OF_VERSIONS)"

## test-newest: the default suite with Python 3.14; where the machine has none, it comes from Debian
test-newest:
	$(MAKE) test VENV=.venv-newest PYTHON=$$(tools/newest-python 3.14 2>/dev/null || tools/python-of-debian 3.14 .python)

## nightly: what .ci/run takes a sample of: the claims of its tests at other sizes, the whole default suite with the oldest
## versions and with Python 3.14, numbers by XLA with its optimizations, all mutants, 3000 random programs, and
## Ray, where it is installed
nightly: mutants programs test-optimized test-newest plans
	$(BIN)/python -m pytest -q -n $(JOBS) -m nightly
	$(MAKE) test-oldest OF_VERSIONS=tests

## test-all: the default suite and the slow tests
test-all: setup
	$(BIN)/python -m pytest -q -n $(JOBS) -m "slow or not slow"

## lint: style and types
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

## check: lint, and the documentation, whose pages are built and executed
check: lint
	$(BIN)/python -m pytest -q -n $(JOBS) -m "slow or not slow" tests/test_docs.py tests/test_house.py tests/test_built_pages.py

## docs: build the documentation into out/docs
docs: setup
	$(BIN)/python -m sphinx -q -W -b html docs out/docs

## mutants: damage the source in many small ways; each damage must fail its test
mutants: setup
	$(BIN)/python tests/mutants.py

## mutations: damage each line that differs from SINCE (default: the last commit); tells which no test reads
mutations: setup
	$(BIN)/python tests/mutations.py --since $(or $(SINCE),HEAD)

## programs: NUM random programs (default 3000) from seed SEED on, in several ways, each compared with one device; XLA compiles
## one of 20, NumPy computes the others
programs: setup
	$(BIN)/python tests/random_programs/run.py --num $(or $(NUM),3000) --seed $(or $(SEED),0) --jobs $(JOBS)

## plans: compile training steps for TPUs, with the compiler beside the environment: where JAX finds libtpu, it looks for a TPU
plans: setup .plan/libtpu
	PYTHONPATH=.plan $(BIN)/python -m pytest -q -m "$(or $(MARKED),slow)" tests/_plan tests/_jax/test_topologies.py

.plan/libtpu:
	$(PIP) --no-deps --target .plan libtpu==0.0.52

## bench: measure against hand-written JAX, and peers that are installed
bench: setup
	$(BIN)/python benchmarks/run_all.py

## setup: make $(VENV) with exactly the versions of $(LOCK)
setup: $(VENV)/.ready

$(VENV)/.ready: $(LOCK) pyproject.toml
	@test -n "$(PYTHON)"
	$(PYTHON) -m venv --clear $(VENV)
	@# uv takes a third of pip's time; pip is asked where uv fails, for instance where only pip's settings name the index.
	$(PIP) uv==0.13.9 && $(BIN)/uv pip install --quiet --python $(BIN)/python -r $(LOCK) --editable . || $(PIP) -r $(LOCK) --editable .
	@$(BIN)/python -c "import platform, jax; print('Python', platform.python_version(), 'with jax', jax.__version__)"
	@touch $@

## dist: build the source archive and the wheel into dist/, and try the wheel in a clean environment
dist: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	tools/try-wheel $(PYTHON)

## lock: choose new versions, and the oldest that pyproject.toml allows
COMPILE := $(BIN)/uv pip compile pyproject.toml --extra data --extra examples --extra keras --extra flax --extra equinox --group dev --python-version 3.12 \
  --no-emit-index-url --custom-compile-command "make lock" --upgrade --quiet
lock: setup
	$(COMPILE) --universal --output-file requirements.lock
	$(COMPILE) --resolution lowest-direct --output-file requirements-oldest.lock

clean:
	rm -rf .venv .venv-oldest .venv-newest .python .pytest_cache out dist
