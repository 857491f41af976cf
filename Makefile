# Everything runs in .venv, which `make env` sets up (see scripts/make_env.py).
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
PORT ?= 30000
ARGS ?=
PY := .venv/bin/python

.PHONY: help env model serve test test-all test-fast demo bench fidelity soak lint format clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12
	@echo 'ARGS="..." passes more flags to serve, the tests, demo, bench, fidelity and soak.'

env: ## set up the environment; prints its Python as the last line (make -sC DIR env)
	@$(PYTHON) scripts/make_env.py

model: env
	@$(PY) -m sglang_vericache.embedded_model

serve: env ## start the OpenAI-compatible server on 127.0.0.1:30000 (or PORT=...)
	@$(PY) scripts/announce_server.py http://127.0.0.1:$(PORT) & \
	exec $(PY) -m sglang_vericache.launch_server --host 127.0.0.1 --port $(PORT) $(ARGS)

test: model ## the tests, but for the longest server tests (see test/server/conftest.py)
	@$(PY) -m pytest -m "not long" $(ARGS)

test-all: model ## every test
	@$(PY) -m pytest $(ARGS)

test-fast: model ## the tests that need no server
	@$(PY) -m pytest -m "not slow" $(ARGS)

demo: model ## the proof on one screen: full KV, compressed only and VeriCache, compared
	@$(PY) benchmark/demo.py $(ARGS)

bench: model ## decode throughput: stock SGLang, VeriCache off, VeriCache on
	@$(PY) benchmark/decode.py $(ARGS)

fidelity: model ## how well each compressor drafts on six tasks of real text, off the server
	@$(PY) benchmark/fidelity.py $(ARGS)

soak: model ## 30 minutes of mixed load on the host tier: every answer, memory and slots checked
	@$(PY) benchmark/soak.py $(ARGS)

lint: env ## ruff (format and lint), mypy, hadolint
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@.venv/bin/hadolint docker/Dockerfile.*

format: env ## rewrite the sources as `make lint` wants them
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

clean: ## remove what was built in this checkout (the shared cache stays)
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache build sgl-kernel-ext/build
	rm -rf python/*.egg-info sgl-kernel-ext/*.egg-info sgl-kernel-ext/sgl_kernel_ext/_C*.so
