# make setup   the virtual environment, with a llama.cpp that runs on this CPU (compiled once, about ten minutes)
# make demo    a prompt answered with and without drafting: same text, two speeds
# make test    linters and tests, as CI runs them

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
RACER := $(VENV)/bin/racer-local

.PHONY: setup demo test lint clean distclean

setup:
	@$(PYTHON) -m racer_local.bootstrap --venv $(VENV) --extras test

# With flash attention and a q8_0 cache a row of a batch equals a single one to the bit, so the ids must agree.
demo: setup
	$(RACER) models fetch smollm2-135m
	$(RACER) generate -m smollm2-135m --compare --flash-attn on --kv-type q8_0 --max-tokens 200 \
		-p - < examples/rewrite.txt

test: lint
	$(RACER) models fetch smollm2-135m
	$(RUN) pytest

lint: setup
	$(RUN) ruff check
	$(RUN) mypy

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
