# Two commands: `make train` runs the main job, `make test` runs lint, types and all tests.
# Both create .venv on first use; later calls install nothing. `make check` is the fast half of
# `make test`: no test of it starts a process. TORCH=2.11.0 takes another torch than constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test check lint types bench-step bench-checkpoint bench-strategies bench-checks bench-start bench-supervision bench-false-alarms house docs gpu clean

train: .venv/.installed
	$(BIN)/lockstep run --nproc 2 examples/digits/train.py

test: lint types
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder  # most wait for processes, not for a core

check: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile -m unit

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

bench-step: .venv/.installed-bench
	$(BIN)/python benchmarks/bench_step.py

bench-checkpoint: .venv/.installed
	$(BIN)/python benchmarks/bench_checkpoint.py --out benchmarks/results/checkpoint.json

bench-strategies: .venv/.installed
	$(BIN)/python benchmarks/bench_strategies.py --out benchmarks/results/strategies.json

bench-checks: .venv/.installed
	$(BIN)/python benchmarks/bench_checks.py --out benchmarks/results/checks.json

bench-start: .venv/.installed
	$(BIN)/python benchmarks/bench_start.py

bench-supervision: .venv/.installed
	$(BIN)/python benchmarks/bench_supervision.py

bench-false-alarms: .venv/.installed
	$(BIN)/python benchmarks/bench_supervision.py --false-alarms

house:
	$(PYTHON) tools/house.py

docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

gpu: .venv/.installed
	$(BIN)/python benchmarks/gpu.py

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/',cat) constraints.txt > .venv/constraints.txt
	$(BIN)/python -m pip install --quiet -c .venv/constraints.txt -e '.[examples,dev]'
	touch $@

.venv/.installed-bench: .venv/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@

.venv/.installed-docs: .venv/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf .venv runs build
