# make demo | test | check | format | bench: each prepares .venv by itself and installs again only when the pins change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test check format bench clean

help:
	@echo "make demo    train five sizes of a ResNet on the embedded digits (runs/demo)"
	@echo "make test    run the tests"
	@echo "make check   format, lint, types: what CI runs before the tests"
	@echo "make format  mend format and lint where that can be done"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove .venv"

demo: $(READY)
	rm -rf runs/demo
	$(BIN)/incofl run demo --out runs/demo

test: $(READY)
	$(BIN)/pytest -n 2

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/server_step.py

clean:
	rm -rf .venv

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "incofl needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)
