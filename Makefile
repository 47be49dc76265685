# make demo | test | check | format | bench: each prepares .venv by itself and installs again only when the pins change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test test-slow test-workers test-flower test-executorch check format docs wheel bench clean

help:
	@echo "make demo    try what a small fleet of unequal devices can do, on the embedded digits (runs/fleet)"
	@echo "make test    run the tests; make test-slow: the slower ones, end to end"
	@echo "             make test-workers: in worker processes; make test-flower: with Flower's processes"
	@echo "             make test-executorch: exports for phones, with its packages"
	@echo "make check   format, lint, types: what CI runs before the tests"
	@echo "make format  fix format and lint where possible"
	@echo "make docs    build the documentation as a site (build/site)"
	@echo "make wheel   build the wheel, and try it in an environment of its own"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove .venv"

demo: $(READY)
	rm -rf runs/fleet
	$(BIN)/incofl advise fleet --devices examples/fleet.toml --try --seeds 0 --jobs 2 --out runs/fleet
	$(BIN)/incofl report runs/fleet -o runs/fleet/report.html

test: $(READY)
	$(BIN)/pytest -n 2 --dist loadgroup -m "not flower and not slow"

# Those that take longer than a few seconds.
test-slow: $(READY)
	$(BIN)/pytest -n 2 --dist loadgroup -m "slow and not flower"

# Those that start Flower's own processes, one after the other.
test-flower: $(READY)
	$(BIN)/pytest -m flower

# Exports for phones, with the twenty packages that this takes.
test-executorch: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[executorch]'
	$(BIN)/pytest tests/export -k executorch

# The whole suite once more with every federation in worker processes.
test-workers: $(READY)
	INCOFL_WORKERS=2 $(BIN)/pytest -n 2 --dist loadgroup -m "not flower"

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Without warnings, or not at all (with --quiet mkdocs would not count them).
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html; with its search: python3 -m http.server -b 127.0.0.1 -d build/site"

# Built, installed with its dependencies into an environment of its own, and used there, away from the repository.
wheel: $(READY)
	rm -rf build/wheel && mkdir -p build/wheel/source/src
	cp -r src/incofl build/wheel/source/src && cp pyproject.toml README.md LICENSE build/wheel/source
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel build/wheel/source
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build/wheel/incofl-*.whl
	cd build/wheel && env -u PYTHONPATH env/bin/python -m incofl run fleet --rounds 1 --out run
	cd build/wheel && env -u PYTHONPATH env/bin/incofl export run --level 0 --out export

# Nearly an hour; make bench ROOT=DIR takes CIFAR-10 from DIR, and otherwise noise of its shape.
bench: $(READY)
	$(BIN)/python benchmarks/efficiency.py $(if $(ROOT),--root $(ROOT))
	$(BIN)/python benchmarks/efficiency.py $(if $(ROOT),--root $(ROOT)) --rows vit,lstm,transformer --name efficiency-models
	$(BIN)/python benchmarks/efficiency.py --rows lora,lora-svd --name efficiency-lora
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/server_step.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/compile.py
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/ray_overhead.py
	$(BIN)/python benchmarks/peers.py $(if $(ROOT),--root $(ROOT))
	$(BIN)/python benchmarks/peers.py --small --work 20x1,20x5,200x1 --clients 2000 --cohort 1000 --only incofl,flower,pfl
	$(BIN)/python benchmarks/small_clients.py
	$(BIN)/python benchmarks/start.py

clean:
	rm -rf .venv

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "incofl needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# An oracle for the robust rules; without what it depends on (torchvision), which they do not need.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps byzfl==0.0.11
	touch $(READY)
