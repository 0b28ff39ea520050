BIN := .venv/bin

.PHONY: test quick demo demo-smollm2 demo-agent demo-images gpu-check gpu-bench bench lint

# pip changes .venv one call at a time
.NOTPARALLEL:

# the CPU environment, with Python 3.11 to 3.13: make test PYTHON=python3.12
# on GPUs make .venv by hand: python3.11 -m venv --clear .venv && .venv/bin/pip install -r requirements.txt && touch .venv/installed
.venv/installed: requirements-cpu.txt
	sh install.sh

.venv/installed-%: requirements-%.txt | .venv/installed
	sh install.sh $<

# many short-lived processes on few cores: threads that wait must not spin
test quick gpu-check: export OMP_WAIT_POLICY := PASSIVE
test quick gpu-check: export GOMP_SPINCOUNT := 0
# and what one has compiled the next ones read
test quick: export PYTHONDONTWRITEBYTECODE :=

# three files at a time: half of a test is a start, which takes one core (on a GPU: pytest without -n)
test: .venv/installed-extra .venv/installed-reasoning-gym .venv/installed-quantize lint
	$(BIN)/python -m pytest -n 3 --dist loadfile

# what a change to a formula needs: tables, gradients, docs
quick: .venv/installed lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -k "not (grpo_gradients and dapo or two_ranks)" \
	    tests/test_*_gradients.py tests/test_*_math.py tests/test_checkpoints.py tests/test_updates.py \
	    tests/test_scripts.py tests/test_docs.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/check.py

demo: .venv/installed
	$(BIN)/python benchmarks/demo.py

demo-smollm2: .venv/installed-extra
	$(BIN)/python benchmarks/demo.py --size smollm2 --output_dir runs/demo-smollm2

demo-agent: .venv/installed
	$(BIN)/python benchmarks/demo_agent.py

demo-images: .venv/installed
	$(BIN)/python benchmarks/demo_images.py

# what could go wrong on GPUs, as a table; on a CPU the same with a tiny model, in about two minutes
gpu-check: .venv/installed
	$(BIN)/python benchmarks/gpu_check.py

# how fast each part is on one GPU, in ten minutes; on a CPU in one, with a tiny model
gpu-bench: .venv/installed
	$(BIN)/python benchmarks/gpu_bench.py

# by hand, on a quiet machine: the figures of docs/results/speed.md
bench: .venv/installed-extra .venv/installed-bench
	$(BIN)/python data_prep/tiny_model.py --local_save_dir models/tiny
	$(BIN)/python data_prep/smollm2.py --local_save_dir models/smollm2
	cd benchmarks && sh all.sh ../$(BIN)/python
