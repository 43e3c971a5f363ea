# make demo       install alfx, then train and evaluate a first agent
# make test       all tests                    make test-fast  without the tests that take long
# make test-environments   environments of other packages, those that are installed
# make lint       ruff and mypy                make check      test and lint
# make docs       build the documentation website in build/site
# make clean      remove the virtual environment, caches and builds; keeps runs/
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.*
# mkdocs does not need alfx, so it has its own environment.
DOCS_VENV ?= build/docs-venv
# Each demo writes into a new folder, so earlier runs are kept.
RUN ?= runs/ppo_cart_pole-$(shell date +%Y%m%d-%H%M%S)
# Number of pytest workers; each uses one thread.
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: demo docs test test-fast test-environments lint check install install-test install-bench clean

demo: install
	$(BIN)/python -m alfx.bin.train --conf ppo_cart_pole --root_dir $(RUN)
	$(BIN)/python -m alfx.bin.evaluate --root_dir $(RUN)
	$(BIN)/python -m alfx.bin.plot $(RUN) --output $(RUN)/curves.png
	@echo
	@echo "The run folder is $(RUN)."
	@echo "  watch it play  $(BIN)/python -m alfx.bin.play --root_dir $(RUN)"
	@echo "  record a video $(BIN)/python -m alfx.bin.play --root_dir $(RUN) --record_file $(RUN)/play.mp4"
	@echo "  train longer   $(BIN)/python -m alfx.bin.train --root_dir $(RUN) --conf_param TrainerConfig.num_env_steps=150000"
	@echo "  see the curves $(BIN)/tensorboard --logdir $(RUN)"

test: install-test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-fast: install-test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not (slow or processes or compiles)" $(PYTEST_ARGS)

# Install the packages into $(VENV) first; tests/third_party/test_third_party_environments.py names them.
test-environments: install-test
	ALFX_TEST_ENVIRONMENTS=1 $(BIN)/python -m pytest tests/third_party $(PYTEST_ARGS)

lint: install-test
	$(BIN)/ruff check alfx tests tools
	$(BIN)/mypy

check: test lint

docs: $(DOCS_VENV)/.docs
	$(DOCS_VENV)/bin/mkdocs build --strict

install: $(VENV)/.core
install-test: $(VENV)/.test
install-bench: $(VENV)/.bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Install torch first, so that no other package selects its build. The default is the release used for docs/results.md;
# setup.cfg allows others, for example: make install TORCH='torch==2.9.*'
$(VENV)/.core: setup.cfg pyproject.toml | $(BIN)/python
	@echo "installing alfx into $(VENV) (a few minutes the first time)"
	$(PIP_INSTALL) "$(TORCH)"
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	@echo "installing the test tools and all environment suites into $(VENV)"
	$(PIP_INSTALL) -e ".[test]"
	@touch $@

$(VENV)/.bench: $(VENV)/.core
	$(PIP_INSTALL) -e ".[bench]"
	@touch $@

$(DOCS_VENV)/.docs: setup.cfg
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check $$(sed -n 's/^ *\(mkdocs[a-z-]*[>=<].*\)$$/\1/p' setup.cfg)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
