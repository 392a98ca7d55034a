# make train [ARGS="model=bert dataset=squad"]   trains; make test   runs the suite; both install what they need first.
# make test-all   runs the further rows of each test too; all targets below do, each for its files.
# make docs   builds the site into site/; make docs SERVE=1 serves it at http://127.0.0.1:8000 while you write.
# make fuzz   damages the files that are read back, a thousand times each.
# make chaos [KILLS=100]   kills ranks and whole runs at random; make resume-matrix   resumes at every step in every world.
# make matrix   compares plans of every kind and family, signals and peers with one process, and runs under any two options;
#               make mesh-matrix   compares plans on meshes.
# make gpu   runs what is for a GPU, on one.
# make hostgpu   runs it on a device of torch's own kind in host memory, as strict as a GPU; needs a compiler.
# make test-isa   runs the tests of rounding as on older x86 processors: oneDNN and ATen keep to fewer instructions.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
KILLS  ?= 100
SERVE  ?=
PYTEST := $(VENV)/bin/python -m pytest --thorough

ISAS   ?= SSE41:default AVX:default AVX2:avx2 AVX512_CORE:avx2 DEFAULT:avx2
ROUNDS ?= tests/models/test_contract.py tests/runtime/test_precision.py tests/runtime/test_elastic.py \
          tests/runtime/test_fsdp.py tests/runtime/test_tied.py tests/runtime/test_devices.py

.PHONY: train test test-all test-isa gpu hostgpu fuzz chaos matrix mesh-matrix resume-matrix check docs clean

train: $(VENV)/.train
	$(VENV)/bin/python train.py $(ARGS)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(VENV)/.dev
	$(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder --timeout 900 $(ARGS)

test-isa: $(VENV)/.dev
	for isa in $(ISAS); do \
	  echo "oneDNN $${isa%:*}, ATen $${isa#*:}"; \
	  ONEDNN_MAX_CPU_ISA=$${isa%:*} ATEN_CPU_CAPABILITY=$${isa#*:} \
	    $(PYTEST) --numprocesses 2 --dist loadfile $(ROUNDS) $(ARGS) || exit 1; \
	done

gpu: $(VENV)/.dev
	$(PYTEST) tests/runtime/test_devices.py tests/training/test_device_runs.py $(ARGS)

hostgpu: $(VENV)/.dev
	$(VENV)/bin/python -m tests.hostgpu $(ARGS)

fuzz: $(VENV)/.dev
	FUZZ_EXAMPLES=1000 $(PYTEST) --timeout 0 tests/test_fuzz.py $(ARGS)

matrix: $(VENV)/.dev
	MATRIX=1 $(PYTEST) --numprocesses 2 tests/runtime/test_matrix.py tests/runtime/test_families.py \
	  tests/runtime/test_signals.py tests/experiments/test_peers.py tests/test_option_pairs.py $(ARGS)

mesh-matrix: $(VENV)/.dev
	MESH_MATRIX=1 $(PYTEST) --numprocesses 2 tests/runtime/test_mesh_matrix.py tests/runtime/test_mesh_plans.py $(ARGS)

resume-matrix: $(VENV)/.dev
	RESUME_MATRIX=1 $(PYTEST) --numprocesses 2 tests/training/test_resume.py \
	  tests/training/test_policies_anywhere.py -k in_any_world $(ARGS)

chaos: $(VENV)/.dev
	CHAOS_KILLS=$(KILLS) $(PYTEST) --timeout 0 -s tests/test_chaos.py tests/test_mesh_changes.py $(ARGS)

check: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python
	$(VENV)/bin/lint-imports
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs $(if $(SERVE),serve --livereload,build --strict)

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@ $(VENV)/.train

$(VENV):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	  "Python %d.%d does not fit: Python 3.11 to 3.13 is needed; name one with make PYTHON=python3.12 ..." % v)'
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) outputs multirun site
