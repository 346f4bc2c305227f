# make quickstart: from a fresh clone to a Gemma-3-270M that learned to calculate with a tool by GRPO.   make test: the default test suite.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
RUNDIR ?= runs/quickstart
SEED ?= 0

.PHONY: setup setup-test quickstart test test-slow lint clean

setup: $(VENV)/.installed
setup-test: $(VENV)/.installed-test

$(VENV)/.installed: setup.py
	@bash launch/setup.sh "$(PYTHON)" "$(VENV)" gemma
	@touch $@

$(VENV)/.installed-test: setup.py
	@bash launch/setup.sh "$(PYTHON)" "$(VENV)" gemma,math,peers,dev
	@touch $@ $(VENV)/.installed

quickstart: setup
	@bash launch/quickstart.sh "$(RUN)" "$(RUNDIR)" "$(SEED)"

test: setup-test
	$(RUN) -m pytest -m 'not slow and not gpu'

test-slow: setup-test
	$(RUN) -m pytest -m slow

lint: setup-test
	$(VENV)/bin/ruff check .

clean:
	rm -rf $(VENV) runs build *.egg-info
