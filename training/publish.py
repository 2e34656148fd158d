"""Measures a trained model on held-out scenes and puts it, with its card, where the package ships it.

`python -m training.publish RUN NAME` copies weights and processor out of the folder RUN.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
    BertTokenizer,
    CLIPModel,
    CLIPTokenizer,
)

import vlcam
from benchmarks import pointing
from training import clip, clip_maps, maps, overlap, segmenter, written
from vlcam import scenes

log = logging.getLogger("training")

EMBEDDED = Path(vlcam.__file__).parent / "embedded"
SHIPPED = ("config.json", "model.safetensors", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
SHIPPED_CLASSIFIER = ("config.json", "model.safetensors", "preprocessor_config.json")
CARD = Path(__file__).with_name("card.md")
CARD_CLASSIFIER = Path(__file__).with_name("card_classifier.md")
CARD_SEGMENTER = Path(__file__).with_name("card_segmenter.md")
CARD_CLIP = Path(__file__).with_name("card_clip.md")
CARD_CAPTION = Path(__file__).with_name("card_caption.md")
CARD_VQA = Path(__file__).with_name("card_vqa.md")
HELD_OUT = 200
SHORT = {"vit": "ViT image classifier", "beit": "BEiT image classifier", "swin": "Swin image classifier"}
SIZES = "{layers} blocks of width {width}, {heads} heads, {side} pixels, patches of {patch}"
LOOKS = ";\n- **look** (weight {look}): %s attends to every object, in the last {gated} blocks"
LEGEND = "A is attention, G its\ngradient; attention is read %s."
CLASSIFIER_WORDS = {
    "vit": {
        "before": "",
        "sizes": SIZES,
        "head": "the head reads [CLS]",
        "looks": LOOKS % "[CLS]",
        "dimmed": "[CLS] saw that share of them, in all blocks;\n"
        "in a share of {late} of the scenes it saw no patch before some block, drawn at random.",
        "vanished": "Background patches vanished at random.",
        "legend": LEGEND % "in the row of [CLS]",
    },
    "beit": {
        "before": "It began with the weights of `beit-first` in `training/classifiers.py`, a run by the same losses.\n",
        "sizes": SIZES,
        "head": "relative positions, layer scale, the head reads the patches' mean",
        "looks": LOOKS % "the mean of the patches",
        "dimmed": "Half of the share was that of its patches\n"
        "in the mean, half that of the attention to them in the last {gated} blocks.",
        "vanished": "Background patches vanished at random,\n"
        "in a share of {vacant} of the scenes any part of them, up to all, from the mean.",
        "legend": LEGEND % "as the mean of the patches' rows",
    },
    "swin": {
        "before": "It began with the weights of `swin-second` in `training/classifiers.py`, and that with those of\n"
        "`swin-first`: runs by the same losses, the first of which trained the patches alone for a while.\n",
        "sizes": "{side} pixels, patches of 4; 2 blocks of width 40, 2 heads, on a grid of 16 x 16, then\n"
        "  4 of width {width}, {heads} heads, on one of 8 x 8; windows of 4 x 4, shifted by 2 in every other block",
        "head": "relative positions, the head\n  reads the patches' mean",
        "looks": "",
        "dimmed": "Half of the share was that of what\n"
        "the last block's feed-forward layer saw of its patches, half that of the attention to them there.",
        "vanished": "Background patches vanished at random,\n"
        "in a share of {vacant} of the scenes any part of them, up to all, from the mean.",
        "legend": "Patches\nattend to their window alone, and no row of attention tells of all of them.",
    },
}
KINDS: tuple[scenes.Mismatch, ...] = ("attribute", "object", "binding")

Plan = dict[str, Any]
Figures = dict[str, Any]
Way = tuple[tuple[str, ...], Callable[[Path, Plan], Figures], Callable[[str, Figures, Path], str]]


def publish(run: Path, name: str) -> None:
    """Copy a run's files into the package, measure, and write `figures.json` and the model card."""
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    files, measured, card = WAYS.get(plan.get("model", "blip-itm"), CLASSIFIER)
    folder = EMBEDDED / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(run / file, folder / file)
    figures = {
        **measured(folder, plan),
        "bytes": sum((folder / file).stat().st_size for file in files),
        "plan": plan,
        "log_end": log_end(run),
    }
    (folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(name, figures, folder), encoding="utf-8")
    log.info("%s", json.dumps(figures, indent=2))


def held_out_scenes() -> list[scenes.Scene]:
    """Scenes that no training has seen."""
    return list(scenes.generate(HELD_OUT, seed=pointing.SEED))


def held_out_record(held_out: Sequence[scenes.Scene], what: str) -> dict[str, int]:
    """How many scenes and objects there are, and from which seed."""
    return {"scenes": HELD_OUT, "seed": pointing.SEED, what: sum(len(s.objects) for s in held_out)}


def log_end(run: Path) -> str:
    """The last line of a run's log that tells of a step."""
    lines = (run / "train.log").read_text(encoding="utf-8").strip().splitlines()
    return next(line for line in reversed(lines) if line.startswith("step"))


def measured_itm(folder: Path, _plan: Plan) -> Figures:
    """The figures of a BLIP with an ITM head, through vlcam."""
    model, held_out = vlcam.load(folder), held_out_scenes()
    shares = pointing.pointing(model, held_out)
    return {
        "summary": "BLIP with an ITM head, trained on scenes of coloured shapes: 'a red circle and a blue square'",
        "held_out": held_out_record(held_out, "phrases"),
        "itm_accuracy": {kind: round(pointing.accuracy(model, held_out, kind), 3) for kind in KINDS},
        "pointing_game": {
            title: [None if share is None else round(share, 3) for share in row] for title, row in shares.items()
        },
        "best_block": pointing.best_block(shares[pointing.PUBLISHED]),
        "chance": round(pointing.chance(held_out), 3),
    }


def measured_classifier(folder: Path, _plan: Plan) -> Figures:
    """The figures of an image classifier, in plain torch."""
    net = AutoModelForImageClassification.from_pretrained(folder, attn_implementation="eager").eval()
    held_out = held_out_scenes()
    return {
        "summary": f"{SHORT[net.config.model_type]}, trained on scenes of coloured shapes: 'red circle', 'blue square'",
        "held_out": held_out_record(held_out, "objects"),
        **maps.measure(net, held_out),
        "chance": round(pointing.chance(held_out), 3),
    }


def measured_segmenter(folder: Path, _plan: Plan) -> Figures:
    """The figures of a segmenter, in plain torch."""
    net = AutoModelForSemanticSegmentation.from_pretrained(folder, attn_implementation="eager").eval()
    held_out = held_out_scenes()
    return {
        "summary": "BEiT segmenter, trained on scenes of coloured shapes: 'background', 'red circle', 'blue square'",
        "held_out": held_out_record(held_out, "objects"),
        **overlap.measure(net, held_out),
        "chance": round(pointing.chance(held_out), 3),
    }


def measured_clip(folder: Path, _plan: Plan) -> Figures:
    """The figures of a CLIP, in plain torch."""
    pairs = list(scenes.generate(clip_maps.HELD_OUT, seed=clip_maps.SEED, objects=(2, 2)))
    return {
        "summary": "CLIP, trained on scenes of coloured shapes and captions: 'a red circle and a blue square'",
        "held_out": {
            "seed": clip_maps.SEED,
            "of_one_object": clip_maps.ALONE,
            "of_two_objects": clip_maps.HELD_OUT,
            "scenes": clip_maps.HELD_OUT,
            "galleries": clip_maps.GALLERIES,
            "gallery": clip_maps.CROWD,
        },
        **clip_maps.measure(CLIPModel.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)),
        "chance": round(pointing.chance(pairs), 3),
    }


def measured_writer(folder: Path, plan: Plan) -> Figures:
    """The figures of a BLIP that writes, through vlcam."""
    model, held_out = vlcam.load(folder), held_out_scenes()
    if plan["model"] == "blip-vqa":
        summary = "BLIP that answers, trained on scenes of coloured shapes: 'what colour is the star?'"
        found = written.answer_figures(model, held_out)
    else:
        summary = "BLIP that writes captions, trained on scenes of coloured shapes: 'a red circle and a blue square'"
        found = written.caption_figures(model, BertTokenizer.from_pretrained(folder), held_out)
    return {
        "summary": summary,
        "held_out": held_out_record(held_out, "phrases"),
        **found,
        "chance": round(pointing.chance(held_out), 3),
    }


def card_itm(name: str, figures: Figures, _folder: Path) -> str:
    """The model card, Markdown, from the measured figures."""
    depth = len(next(iter(figures["pointing_game"].values())))
    kinds = figures["itm_accuracy"].items()
    return CARD.read_text(encoding="utf-8").format(
        **figures["plan"],
        name=name,
        megabytes=figures["bytes"] / 1e6,
        scenes=figures["held_out"]["scenes"],
        held_out_seed=figures["held_out"]["seed"],
        phrases=figures["held_out"]["phrases"],
        accuracy_rows="\n".join(f"| true against one {kind} wrong | {share:.3f} |" for kind, share in kinds),
        chance=figures["chance"],
        best_block=figures["best_block"],
        layer_names=" | ".join(f"block {i}" for i in range(depth)),
        rule="---|" * depth,
        pointing_rows="\n".join(pointing.rows(figures["pointing_game"])),
        log_end=figures["log_end"],
    )


def card_classifier(name: str, figures: Figures, folder: Path) -> str:
    """The model card of an image classifier, Markdown, from the measured figures."""
    config = AutoConfig.from_pretrained(folder)
    boxes = figures["pointing_game_box"]
    rows = [f"| {title} | {share:.3f} | {boxes[title]:.3f} |" for title, share in figures["pointing_game"].items()]
    differs = {key: text.format(**figures["plan"]) for key, text in CLASSIFIER_WORDS[config.model_type].items()}
    alone = figures["plan"]["vision_steps"]
    plain = {
        key: figures[key] for key in ("topk_recall", "object_recall", "probability_of_present", "chance", "log_end")
    }
    return CARD_CLASSIFIER.read_text(encoding="utf-8").format(
        **figures["plan"],
        **plain,
        **differs,
        name=name,
        architecture=config.architectures[0],
        alone=f"; the first {alone} steps train this alone" if alone else "",
        classes=config.num_labels,
        megabytes=figures["bytes"] / 1e6,
        scenes=figures["held_out"]["scenes"],
        held_out_seed=figures["held_out"]["seed"],
        objects=figures["held_out"]["objects"],
        pointing_rows="\n".join(rows),
    )


def card_segmenter(name: str, figures: Figures, folder: Path) -> str:
    """The model card of a segmenter, Markdown, from the measured figures."""
    config = AutoConfig.from_pretrained(folder)
    boxes, plan, first = figures["pointing_game_box"], figures["plan"], segmenter.PLANS["first"]
    rows = [f"| {title} | {share:.3f} | {boxes[title]:.3f} |" for title, share in figures["pointing_game"].items()]
    plain = {key: value for key, value in figures.items() if isinstance(value, (int, float, str))}
    return CARD_SEGMENTER.read_text(encoding="utf-8").format(
        **plan,
        **plain,
        name=name,
        architecture=config.architectures[0],
        classes=config.num_labels,
        first_steps=first.steps,
        first_seed=first.seed,
        alone=first.vision_steps,
        out_indices=", ".join(map(str, config.out_indices)),
        read=", ".join(str(index - 2) for index in config.out_indices),
        deepest=overlap.deepest(config),
        dead=" and ".join(map(str, figures["blocks_without_gradient"])),
        logit_side=plan["side"] // plan["patch"] * 4,
        megabytes=figures["bytes"] / 1e6,
        scenes=figures["held_out"]["scenes"],
        held_out_seed=figures["held_out"]["seed"],
        objects=figures["held_out"]["objects"],
        pointing_rows="\n".join(rows),
    )


def card_clip(name: str, figures: Figures, _folder: Path) -> str:
    """The model card of a CLIP, Markdown, from the measured figures."""
    boxes = figures["pointing_game_box"]
    rows = [f"| {title} | {share:.3f} | {boxes[title]:.3f} |" for title, share in figures["pointing_game"].items()]
    plain = {key: value for key, value in figures.items() if isinstance(value, (int, float, str))}
    first = clip.PLANS["first"]
    return CARD_CLIP.read_text(encoding="utf-8").format(
        **figures["plan"],
        **plain,
        name=name,
        megabytes=figures["bytes"] / 1e6,
        first_stop=first.stop,
        first_seed=first.seed,
        alone=first.vision_steps,
        grid=figures["plan"]["side"] // figures["plan"]["patch"],
        prompt_rows="\n".join(f'| "{wording}" | {share:.3f} |' for wording, share in figures["zero_shot"].items()),
        retrieval_rows="\n".join(f"| {way} | {share:.3f} |" for way, share in figures["retrieval"].items()),
        false_rows="\n".join(
            f"| one {kind} wrong | {share:.3f} |" for kind, share in figures["true_above_false"].items()
        ),
        pointing_rows="\n".join(rows),
        held_out_seed=figures["held_out"]["seed"],
        **{key: value for key, value in figures["held_out"].items() if key != "seed"},
    )


def card_writer(name: str, figures: Figures, _folder: Path) -> str:
    """The model card of a BLIP that writes, Markdown, from the measured figures."""
    depth = figures["plan"]["text_layers"]
    plain = {key: value for key, value in figures.items() if isinstance(value, (int, float, str))}
    tables = {key: "\n".join(pointing.rows(figures[key])) for key in figures if key.startswith("pointing_game")}
    text = CARD_VQA if figures["plan"]["model"] == "blip-vqa" else CARD_CAPTION
    return text.read_text(encoding="utf-8").format(
        **figures["plan"],
        **plain,
        **tables,
        name=name,
        megabytes=figures["bytes"] / 1e6,
        scenes=figures["held_out"]["scenes"],
        held_out_seed=figures["held_out"]["seed"],
        phrases=figures["held_out"]["phrases"],
        asked=figures.get("questions"),
        layer_names=" | ".join(f"block {i}" for i in range(depth)),
        rule="---|" * depth,
        example_rows="\n".join("| " + " | ".join(row) + " |" for row in figures["examples"]),
    )


CLASSIFIER: Way = (SHIPPED_CLASSIFIER, measured_classifier, card_classifier)
WAYS: dict[str, Way] = {
    "blip-itm": (SHIPPED, measured_itm, card_itm),
    "beit-seg": (SHIPPED_CLASSIFIER, measured_segmenter, card_segmenter),
    "clip": (SHIPPED, measured_clip, card_clip),
    "blip-caption": (SHIPPED, measured_writer, card_writer),
    "blip-vqa": (SHIPPED, measured_writer, card_writer),
}
"""What is shipped, how it is measured and how its card is written, by the `model` of a run's plan."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    publish(given.run, given.name)


if __name__ == "__main__":
    main()
