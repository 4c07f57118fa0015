# make setup   the virtual environment, with a llama.cpp that runs on this CPU (compiled once, about ten minutes)
# make demo    a prompt answered with and without drafting: same text, two speeds
# make readme  the commands' help in README.md, brought up to date
# make test    linters and tests, as CI runs them

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
RACER := $(VENV)/bin/racer-local

.PHONY: setup demo readme test tools lint clean distclean

setup:
	@$(PYTHON) -m racer_local.bootstrap --venv $(VENV) --extras test

# Exact: a batch of rows equals single ones to the bit, so the ids must agree.
demo: setup
	$(RACER) models fetch smollm2-135m
	$(RACER) generate -m smollm2-135m --compare --exact --max-tokens 200 \
		-p - < examples/rewrite.txt

readme: setup
	$(RUN) racer_local.cli.manual README.md

# Screenshots of the page go into artefacts/.
test: export RACER_LOCAL_ARTEFACTS ?= $(CURDIR)/artefacts
test: lint tools
	$(RACER) models fetch smollm2-135m
	-$(RACER) models fetch gemma3-270m
	$(RUN) pytest

# The page's tests drive a real browser, the chat's a real terminal; without them they are skipped.
tools:
	@for tool in chromium tmux; do command -v $$tool >/dev/null \
		|| { apt-get update -qq && apt-get install -yqq --no-install-recommends $$tool; } >/dev/null 2>&1 \
		|| echo "no $$tool, so the tests that drive it are skipped; install it with: sudo apt install $$tool"; done

lint: setup
	$(RUN) ruff check
	$(RUN) mypy

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
