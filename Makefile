# On a fresh machine `make demo` and `make test` do everything, set-up included. `make` lists the targets.

SHELL := bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

# The first Python that is new enough and can make environments; or `make PYTHON=/path/to/python ...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
GPU_PYTHON ?= $(shell for p in python3 $(NEWEST)/bin/python; do \
	$$p -c 'import torch, transformers' 2>/dev/null && { echo $$p; break; }; done)
NO_GPU_PYTHON = $(error no Python here has torch and transformers: make GPU_PYTHON=/path/to/python gpu)
ARGS ?=
PYTEST_ARGS ?=

# Two environments: the newest and the oldest supported Transformers.
NEWEST := .venv
OLDEST := .venv-5.17
DOCS := .venv-docs
LINTED := $(wildcard kvtier integrations examples benchmarks tests setup.py)

# ----------------------------------------------------------------------------------------- set-up
# `.ready` is written last and names this folder. An environment without it was interrupted, or was
# copied from elsewhere: it is built again from nothing.
# The native library is compiled while pip loads packages; pip's own build of kvtier then finds it done.
# If that fails, `if-native` says why.
is_ready = [ "$$(cat $(1)/.ready 2>/dev/null)" = "$(CURDIR)" ] && $(1)/bin/python -c "" 2>/dev/null

define build_env
@set -euo pipefail; \
if command -v flock >/dev/null; then exec 9>.setup.lock; flock 9; fi; \
if $(call is_ready,$(1)); then \
	if [ $(1)/.ready -nt pyproject.toml ] && [ $(1)/.ready -nt constraints-common.txt ] \
		&& [ $(1)/.ready -nt $(2) ]; then exit 0; fi; \
	echo "$(1): pyproject.toml or the constraints changed, updating"; \
else \
	python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
		echo "kvtier needs Python >= 3.11 with venv and pip: make PYTHON=/path/to/python ..." >&2; exit 1; fi; \
	echo "$(1): setting up once, with $$("$$python" --version); this takes a minute or two"; \
	rm -rf $(1); "$$python" -m venv $(1); \
fi; \
rm -f $(1)/.ready; echo "$(CURDIR)" >$(1)/.being-built; \
$(1)/bin/python kvtier/cpu/build.py >/dev/null 2>&1 9>&- & \
$(1)/bin/python -m pip install --disable-pip-version-check --no-input -c $(2) -e '.[$(3)]' 2>&1 \
	| tee $(1)/pip.log \
	| while read -r word name rest; do case "$$word" in \
		Collecting|Processing) name=$${name##*/}; name=$${name%%-[0-9]*}; printf ' %s' "$${name%%[][<>=!~;]*}" ;; \
		Installing) if [ "$$name" = collected ]; then printf '\n  installing ...'; fi ;; \
	esac; done \
	|| { echo; tail -n 20 $(1)/pip.log; echo "$(1): set-up failed (whole log: $(1)/pip.log)"; exit 1; } >&2; \
mv $(1)/.being-built $(1)/.ready; echo " done"
endef

ifneq ($(shell $(call is_ready,$(NEWEST)) && echo yes),yes)
.PHONY: $(NEWEST)/.ready
endif
ifneq ($(shell $(call is_ready,$(OLDEST)) && echo yes),yes)
.PHONY: $(OLDEST)/.ready
endif

$(NEWEST)/.ready: pyproject.toml constraints.txt constraints-common.txt
	$(call build_env,$(NEWEST),constraints.txt,dev)

$(OLDEST)/.ready: pyproject.toml constraints-5.17.txt constraints-common.txt
	$(call build_env,$(OLDEST),constraints-5.17.txt,test)

# --------------------------------------------------------------------------------- native library
# Both environments use the one in the source tree. It needs no more of Python than that there is one.
NATIVE = $(or $(PYTHON),python3) kvtier/cpu/build.py

.PHONY: native if-native
native: ## compile the native library, if it is out of date
	@$(NATIVE)

# For targets that work without it.
if-native:
	@$(NATIVE) --quiet || true

# ---------------------------------------------------------------------------------------- targets
.PHONY: help setup demo test test-newest test-oldest integrations judge soak check sanitize format figures docs bench calibrate gpu clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(NEWEST)/.ready $(OLDEST)/.ready ## build both environments (the other targets do it when needed)

demo: $(NEWEST)/.ready if-native ## run the demo (ARGS="--model NAME ...")
	@$(NEWEST)/bin/python examples/demo.py $(ARGS)

# No test may depend on a model hub; tiny tensors only lose by threads.
RUN_PYTEST = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -o cache_dir=$(1)/.pytest_cache $(2) $(PYTEST_ARGS)
RUN_TESTS = $(call RUN_PYTEST,$(1),-m "not slow" $(2))
# What does not depend on the version of Transformers runs in one of the two, and of other tests each case does; of the
# longest ones a part of the cases, by the day of the commit: see tests/conftest.py. `test-newest` and `test-oldest` run
# all.
test: $(NEWEST)/.ready $(OLDEST)/.ready if-native ## run the tests on the newest and the oldest Transformers, side by side (PYTEST_ARGS="-k NAME")
	@log=$(OLDEST)/pytest.log; committed=$$(git log -1 --format=%ct 2>/dev/null || date +%s); \
	export KVTIER_TEST_SAMPLE=$${KVTIER_TEST_SAMPLE:-$$((committed / 86400))}; \
	KVTIER_TEST_SIDE=oldest $(call RUN_TESTS,$(OLDEST)) >$$log 2>&1 & oldest=$$!; \
	trap 'kill $$oldest 2>/dev/null' INT TERM; \
	echo "newest Transformers ($(NEWEST)); meanwhile the oldest ($(OLDEST)) reports to $$log"; \
	KVTIER_TEST_SIDE=newest $(call RUN_TESTS,$(NEWEST)); newest=$$?; \
	wait $$oldest; oldest=$$?; \
	echo "oldest Transformers ($(OLDEST))"; cat $$log; \
	exit $$((newest ? newest : oldest))

test-newest: $(NEWEST)/.ready if-native ## run all tests on the newest supported Transformers
	$(call RUN_TESTS,$(NEWEST))

test-oldest: $(OLDEST)/.ready if-native ## run all tests on the oldest supported Transformers
	$(call RUN_TESTS,$(OLDEST))

integrations: $(NEWEST)/.ready if-native ## run the scripts for other libraries, each in an environment of its own (ARGS="peft trl ...")
	@$(NEWEST)/bin/python integrations/run.py $(ARGS)

judge: $(NEWEST)/.ready if-native ## load generators of others against kvtier serve, each in an environment of its own (ARGS="aiperf guidellm")
	@$(NEWEST)/bin/python integrations/judge.py $(ARGS)

# How much more than the tests play; a seed that failed is in the message. Two at a time, as in `test`: each takes about
# an hour.
SOAKED = KVTIER_TEST_OPERATIONS=30000 KVTIER_TEST_SETTINGS=200 KVTIER_TEST_CASES=1000 KVTIER_TEST_TURNS=500 \
	KVTIER_TEST_FLIPS=200 KVTIER_TEST_WORLDS=10000 KVTIER_TEST_WORKLOADS=5 KVTIER_TEST_LOADS=200 KVTIER_TEST_CLIENTS=200 \
	KVTIER_TEST_KILLS=20 KVTIER_TEST_PROBLEMS=150 KVTIER_TEST_WALKS=20 KVTIER_TEST_LINES=200
WALKS = tests/conversation tests/serving tests/memory/test_shared_memory.py tests/memory/test_memory_threads.py \
	tests/hf/test_needed.py tests/planning/test_adaptive.py tests/cpu/test_accuracy.py tests/kernels/test_paged.py
soak: $(NEWEST)/.ready if-native ## slow tests, and random walks and searches for longer than in the tests, seeded
	@log=$(NEWEST)/soak.log; \
	$(SOAKED) $(call RUN_TESTS,$(NEWEST),$(WALKS)) >$$log 2>&1 & walks=$$!; \
	trap 'kill $$walks 2>/dev/null' INT TERM; \
	echo "slow tests; meanwhile walks report to $$log"; \
	$(call RUN_PYTEST,$(NEWEST),-m slow); slow=$$?; \
	wait $$walks; walks=$$?; \
	echo "walks"; cat $$log; \
	exit $$((slow ? slow : walks))

check: $(NEWEST)/.ready native ## format, lint, types and import rules, and that the native library compiles
	$(NEWEST)/bin/ruff format --check $(LINTED)
	$(NEWEST)/bin/ruff check $(LINTED)
	$(NEWEST)/bin/mypy
	$(NEWEST)/bin/python -m pytest -q tests/test_imports.py

sanitize: $(NEWEST)/.ready ## test the native library under sanitizers
	$(NEWEST)/bin/python tests/cpu/sanitize.py $(ARGS)

format: $(NEWEST)/.ready ## format the code and apply safe lint fixes
	$(NEWEST)/bin/ruff check --fix-only $(LINTED)
	$(NEWEST)/bin/ruff format $(LINTED)

figures: $(NEWEST)/.ready ## make the tables and plots of README and docs from the committed records
	$(NEWEST)/bin/python -m benchmarks.figures $(ARGS)

# The site has an environment of its own: nothing that tests need is among what builds it.
$(DOCS)/.ready: constraints-docs.txt
	@rm -rf $(DOCS) && $(or $(PYTHON),python3) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -r constraints-docs.txt
	@echo "$(CURDIR)" >$@

docs: $(DOCS)/.ready ## build the documents as a site in site/, with the API reference; a warning is an error
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

bench: $(NEWEST)/.ready if-native ## run benchmarks (ARGS="SCENARIO ... --against OTHER_CHECKOUT")
	$(NEWEST)/bin/python -m benchmarks $(ARGS)

# No set-up: these take whatever Python has torch, for a machine with a GPU may have no network.
calibrate: ## measure this machine's device and link once, and store its profile (ARGS="--device cuda:1")
	@PYTHONPATH=. exec $(or $(GPU_PYTHON),$(NO_GPU_PYTHON)) -m kvtier calibrate $(ARGS)

gpu: ## test and measure on a GPU, from the plain source tree (GPU_PYTHON=python3)
	@PYTHONPATH=. exec $(or $(GPU_PYTHON),$(NO_GPU_PYTHON)) -m benchmarks.gpu $(ARGS)

clean: ## remove build outputs and caches
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -f kvtier/cpu/*.so kvtier/cpu/.*.so.*
	find $(LINTED) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove the environments
	rm -rf $(NEWEST) $(OLDEST) $(DOCS) .venv-integrations .setup.lock
