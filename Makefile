# Everything anyone types: make demo, make test. The rest is for people who work on trtpipe.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
CONFIG := build_configs/smollm2-135m/int8-wo-openvino-cpu.yaml
REPOSITORY := build/smollm2-135m-int8

.PHONY: demo test test-fast lint format clean

.venv/.installed: requirements.lock pyproject.toml setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-deps --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: .venv/.installed  ## build the embedded model for the CPU, serve it on Triton, ask it one question
	$(BIN)/trtpipe build $(CONFIG) --output $(REPOSITORY)
	$(BIN)/trtpipe serve $(REPOSITORY) --ask "What is the capital of France?"

# Two processes on two cores: more threads would only wait for each other.
test: export OMP_NUM_THREADS = 1
test: .venv/.installed lint test-fast  ## every test that can run on this machine
	$(BIN)/pytest -m heavy -n 2 --dist loadfile
	$(BIN)/pytest -m server

test-fast: .venv/.installed  ## under two minutes: no ModelOpt, no OpenVINO, no server
	$(BIN)/pytest -m fast -n 2

lint: .venv/.installed  ## style, types and the walls between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build .trtpipe .mypy_cache .ruff_cache .pytest_cache
