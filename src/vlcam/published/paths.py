"""Attention carried through the blocks, weighted by gradients that are integrated over images."""

from __future__ import annotations

from vlcam import citations
from vlcam.published.bases import WEIGHTED, entry

__all__ = ["ENTRIES"]

ENTRIES = (
    entry(
        WEIGHTED.replace(
            name="tam-transition",
            layers="all",
            layer_rule="transition",
            gradient_path="integrated",
            relu="gradient",
        ),
        citations.TRANSITION,
        "XianrenYty/Transition_Attention_Maps 8329327, generate_transition_attention_maps",
        departs="All blocks, the default of the authors' function; their scripts start at block 4 of 12: layers=(4, "
        "..., 11).",
        notes="Twenty backward passes.",
    ),
    entry(
        WEIGHTED.replace(
            name="beyond-intuition-headwise",
            layers="all",
            layer_rule="headwise",
            gradient_path="integrated",
            relu="gradient",
        ),
        citations.BEYOND,
        "jiaminchen-1031/transformerinterp a76854a, generate_ours",
        departs="All blocks; the authors' scripts start at their block 4, counted from 1: layers=(3, ..., 11).",
        notes="Twenty backward passes. Heads are weighted by the gradient at the image itself.",
    ),
    entry(
        WEIGHTED.replace(
            name="beyond-intuition-tokenwise",
            layers="all",
            layer_rule="tokenwise",
            gradient_path="integrated",
            relu="gradient",
        ),
        citations.BEYOND,
        "jiaminchen-1031/transformerinterp a76854a, generate_ours_c",
        departs="All blocks; the authors' scripts start at their block 7, counted from 1: layers=(6, ..., 11).",
        notes="Twenty backward passes. The values are read inside fused attention; a model with explicit attention "
        "does not show them.",
    ),
)
