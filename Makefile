# `make train` and `make test` work in a bare clone: they make .venv first, once.
# ARGS is passed on: make train ARGS="--seed 3", make test ARGS="-k broker".

# Without it every process that a test starts compiles the project's modules again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: train test test-processes test-systems test-slow test-kubernetes mutations soak learn check format bench bench-peers protos dashboards reference dist

train: .venv/installed
	$(BIN)/penstock train CartPole-v1 $(ARGS)

# What stands on the core: the units and contracts of it, and its rooms of tests that start processes.
SYSTEMS := $(addprefix tests/,unit/workloads unit/gateway contract/gateway)
PROCESSES_OF_SYSTEMS := $(addprefix tests/processes/,chat gateway prompts goals)

# The first tier of the core, with one end-to-end test of each promise. Those wait most of the time: they come first,
# and there are more workers than cores.
test: .venv/installed-test
	$(BIN)/pytest -q -m "not slow and not postgresql" -n 3 --dist worksteal $(addprefix --ignore ,$(SYSTEMS)) \
		tests/spine tests/unit tests/contract tests/property tests/abuse tests/mutations $(ARGS)

# Both below: a file at a time to each worker, so that its fixtures are made once; the longest come first, so that no
# worker is left alone with one of them.
PROCESSES := -n 4 --dist loadfile --no-loadscope-reorder

# The other tests that start processes: of services, networks, kills, abuse, what is deployed, and PostgreSQL.
test-processes: .venv/installed-test
	$(BIN)/pytest -q -m "not slow and postgresql" -n 3 --dist worksteal --ignore tests/contract/gateway tests/contract
	$(BIN)/pytest -q -m "not slow" $(PROCESSES) $(addprefix --ignore ,$(PROCESSES_OF_SYSTEMS)) \
		$(addprefix tests/processes/,train faults language learner) tests/processes tests/deploy $(ARGS)

# Of what stands on the core, the gateway with accounts and jobs, language models, prompts, chat and goals, every tier;
# and what is learned.
test-systems: .venv/installed-test
	$(BIN)/pytest -q -m "not slow" $(PROCESSES) tests/learning $(PROCESSES_OF_SYSTEMS) $(SYSTEMS) $(ARGS)

test-slow: .venv/installed-test .venv/installed-learn
	$(BIN)/pytest -q -m slow -n 3 --maxschedchunk 1 $(ARGS)

# On the cluster that KUBECONFIG names, or on one that is built from PENSTOCK_KUBERNETES_SOURCE (CONTRIBUTING.md).
test-kubernetes: .venv/installed-test
	$(BIN)/pytest -ra --timeout 3600 tests/kubernetes $(ARGS)

# Each mechanism switched off in a copy of the tree: the test that guards it must fail.
mutations: .venv/installed-test .venv/installed-learn
	$(BIN)/python -m tests.mutations.campaign $(ARGS)

# A run under fire for 30 minutes, audited all along: make soak ARGS="--minutes 5 --seed 7".
# A flow for 10 minutes: make soak ARGS="--scenario overload", or full (Redis), or absent (the learner).
soak: .venv/installed
	$(BIN)/python -m tests.support.fleet.soak $(ARGS)

# Every learning proof that benchmarks/results/proofs.jsonl has no record of, then the results in docs/algorithms.md.
learn: .venv/installed-learn
	$(BIN)/python -m benchmarks.proofs $(ARGS)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python protos/generate.py --check
	$(BIN)/python -m deploy.grafana --check
	$(BIN)/python -m deploy.prometheus.operator --check

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages of docs/reference, and the table of docs/guarantees.md.
reference: .venv/installed-test
	$(BIN)/python docs/generate.py
	$(BIN)/python -m tests.promises

bench: .venv/installed
	$(BIN)/python -m benchmarks $(ARGS)

# Five tasks beside peers, the policy server beside a third and a language model beside a fourth, each in an
# environment of its own: make bench-peers ARGS="--repeat 1".
bench-peers: .venv/installed-test .venv/installed-learn .venv-peers/stable-baselines3/installed \
		.venv-peers/sample-factory/installed .venv-peers/sbx/installed .venv-peers/trl/installed
	$(BIN)/python -m benchmarks --only peers --only peers-acrobot --only peers-lunar-lander \
		--only peers-sac --only peers-dqn \
		--only serving-peers --only language-peers --repeat 5 $(ARGS)

protos: .venv/installed
	$(BIN)/python protos/generate.py

dashboards: .venv/installed
	$(BIN)/python -m deploy.grafana
	$(BIN)/python -m deploy.prometheus.operator

# A wheel and an sdist in dist/, whose description and metadata an index would accept.
dist: .venv/installed
	rm -rf build dist
	$(PIP) build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (some minutes the first time)"
	$(PIP) --editable ".[all,dev]"
	@touch $@

# Language models, and texts and their embeddings, are 0.6 GB more, which `make train` does without, as it does
# without the gateway.
.venv/installed-test: .venv/installed
	@echo "installing what language models, the gateway and games need"
	$(PIP) --editable ".[all,dev,rlhf,gateway,data,test-people,atari,minatar]"
	@touch $@

# Physics, and EnvPool with its 0.7 GB of assets: what tests them is skipped by name without.
.venv/installed-learn: .venv/installed
	$(PIP) --editable ".[all,box2d,mujoco,envpool]"
	@touch $@

.venv-peers/%/installed: benchmarks/peers/%.txt benchmarks/peers/constraints.txt
	@test -x .venv-peers/$*/bin/python || $(PYTHON) -m venv .venv-peers/$*
	@echo "installing $* into .venv-peers"
	.venv-peers/$*/bin/python -m pip install -qq --disable-pip-version-check \
		--constraint benchmarks/peers/constraints.txt --requirement $<
	@touch $@
