# make demo and make test are all that a newcomer needs; both need python3 (3.11 or later) and make.
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2
DEMO ?= runs/demo

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

METHODS := local,fedavg,fedavg+ft,fedrep,ifca:k=5,ifca:k=10,pflmf:factor=head:scaled=true:rank=5
TERMS := --data digits --clients 100 --cohort 0.2 --steps 15 --batch-size all --lr 0.3 --seeds 3

.PHONY: install demo test lint types cluster

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "handspan needs Python 3.11 or later: make install PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]' 'pyright[nodejs]'
	touch $@

demo: install
	$(BIN)/handspan compare $(METHODS),fedavg_groups --partition permuted:5 --rounds 100 $(TERMS) \
	    --out $(DEMO)/permuted
	$(BIN)/handspan compare $(METHODS) --partition dirichlet:0.5 --rounds 50 $(TERMS) \
	    --out $(DEMO)/dirichlet
	@echo "tables: $(DEMO)/permuted/comparison.json and $(DEMO)/dirichlet/comparison.json;"
	@echo "every run has a folder beside them (scores, history, models)"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint types
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# What needs Ray, which make install leaves out.
cluster: install
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest tests/cluster
