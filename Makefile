# Two commands: `make train` runs the main job, `make test` runs lint, types and all tests but those
# that take long and see what others see too: `make thorough`.
# Both create .venv on first use; later calls install nothing. `make check` is the fast half of
# `make test`: no test of it starts a process. TORCH=2.11.0 takes another torch than constraints.txt,
# in an environment of its own. `make real` runs programs of other libraries, in .venv-real, and
# `make extras` what needs Ray, Jupyter, debugpy, Hydra, Optuna or a tracker, in .venv-extras.
PYTHON ?= python3
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
TYPED := $(shell sed -n 's/^torch==//p' constraints.txt)
NEXT := $(BIN)/lockstep run --nproc 2 examples/digits/train.py --epochs 24

.PHONY: train test check thorough real extras clusters browser lint types bits bench-step bench-bits bench-collectives bench-checkpoint bench-strategies bench-checks bench-compile bench-start bench-supervision bench-network bench-order bench-scale bench-false-alarms bench-report bench-journal bench-deferred bench-recovery house messages docs gpu gpu-table clean

train: $(VENV)/.installed
	$(BIN)/lockstep run --nproc 2 examples/digits/train.py
	@case "$${LOCKSTEP_LANG:-$${LC_ALL:-$${LC_MESSAGES:-$$LANG}}}" in \
	zh*) echo "接着可以试：$(NEXT)（从检查点继续）；或加上 --nproc 1、--precision bf16、--shares 1:2";; \
	*) echo "try next: $(NEXT), which continues from the checkpoint; or --nproc 1, --precision bf16, --shares 1:2";; \
	esac

test: lint types
	$(BIN)/python -m pytest -m "not thorough" -n 5 --dist loadfile --no-loadscope-reorder  # most wait for processes, not for a core

check: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "unit and not (ranks or launcher or netns)"

thorough: $(VENV)/.installed
	$(BIN)/python -m pytest -m thorough -n 4

real: .venv-real/.installed
	.venv-real/bin/python -m pytest -n 2 tests/real

clusters: $(VENV)/.installed-clusters
	$(BIN)/python -m pytest -rs tests/clusters  # needs root, openssh-server, rsync, nftables, slurm-wlm, munge

extras: .venv-extras/.installed
	.venv-extras/bin/python -m pytest -rs -n 2 --dist loadfile --no-loadscope-reorder tests/launcher/test_ray.py tests/launcher/test_notebook.py tests/launcher/test_other_tools.py tests/report/test_trackers.py

browser: $(VENV)/.installed-browser
	$(BIN)/python -m pytest -rs tests/report/test_browser.py  # needs chromium and fonts-noto-cjk of Debian

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(if $(filter-out $(TYPED),$(TORCH)),,$(BIN)/mypy)

bench-step: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/bench_step.py

bench-bits: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_bits.py --out benchmarks/results/bits.json

bits: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.bits --out benchmarks/results/same_bits.md

bench-collectives: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_collectives.py --out benchmarks/results/collectives.json

bench-checkpoint: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_checkpoint.py --out benchmarks/results/checkpoint.json

bench-strategies: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_strategies.py --out benchmarks/results/strategies.json

bench-checks: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_checks.py --out benchmarks/results/checks.json

bench-compile: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_compile.py --out benchmarks/results/compile.json

bench-start: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_start.py

bench-supervision: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_supervision.py

bench-network: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_network.py --out benchmarks/results/network.json
	$(BIN)/python benchmarks/bench_slow_network.py resnet18 --out benchmarks/results/slow_resnet18.json
	$(BIN)/python benchmarks/bench_slow_network.py gpt --out benchmarks/results/slow_gpt.json --picture docs/assets/slow_network.svg

bench-order: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_order.py

bench-scale: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_scale.py

bench-false-alarms: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_supervision.py --false-alarms

bench-report: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_report.py --out benchmarks/results/report.json

bench-deferred: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_deferred.py --out benchmarks/results/deferred.json

bench-recovery: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_recovery.py --out benchmarks/results/recovery.json

bench-journal: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_journal.py --out benchmarks/results/journal.json

messages: $(VENV)/.installed
	$(BIN)/python tools/message_catalogue.py

house: $(VENV)/.installed
	$(BIN)/python tools/house.py
	$(BIN)/python tools/density.py src/lockstep

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# A machine with a GPU has a torch of its own and perhaps no network: that Python runs it. Elsewhere, .venv.
GPU_PYTHON = $(shell $(PYTHON) -c "import torch" 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)
DEVICE ?= cuda

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.installed)
	$(GPU_PYTHON) -m benchmarks.gpu --device $(DEVICE) --stages "$(STAGES)"

gpu-table: $(VENV)/.installed
	$(BIN)/python -m benchmarks.gpu.table

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/',cat) constraints.txt > $(VENV)/constraints.txt
	@echo "Installing torch and the other packages into $(VENV): this takes some minutes, and pip prints nothing."
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[examples,dev]'
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[bench]'
	touch $@

$(VENV)/.installed-clusters: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[clusters]'
	touch $@

$(VENV)/.installed-browser: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[browser]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[docs]'
	touch $@

.venv-extras/.installed: pyproject.toml constraints.txt
	test -x .venv-extras/bin/python || $(PYTHON) -m venv .venv-extras
	.venv-extras/bin/python -m pip install --quiet -c constraints.txt -e '.[examples,dev,notebook,tools,ray,trackers]'
	touch $@

.venv-real/.installed: pyproject.toml constraints.txt
	test -x .venv-real/bin/python || $(PYTHON) -m venv .venv-real
	.venv-real/bin/python -m pip install --quiet -c constraints.txt -e '.[real]'
	# Its metadata ask for numpy<2.2 and transformers<5, which the others here do not; it runs with later ones.
	.venv-real/bin/python -m pip install --quiet --no-deps mosaicml-streaming==0.13.0
	# litdata brings torchvision, whose wheels do not load beside a CPU build of torch; transformers would import it.
	.venv-real/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

clean:
	rm -rf .venv .venv-* runs build
