# make train [ARGS="model=bert dataset=squad"]   trains; make test   runs the suite; both install what they need first.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

.PHONY: train test check clean

train: $(VENV)/.train
	$(VENV)/bin/python train.py $(ARGS)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python
	$(VENV)/bin/lint-imports

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@ $(VENV)/.train

$(VENV):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	  "Python %d.%d does not fit: Python 3.11 to 3.13 is needed; name one with make PYTHON=python3.12 ..." % v)'
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) outputs multirun
