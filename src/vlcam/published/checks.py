"""What backs each named recipe: re-derivations, maps of the authors' own code, peers, relations; each with its test."""

from __future__ import annotations

from types import MappingProxyType

from vlcam.entry import Check

__all__ = ["CHECKS"]

_PGC = "grad-cam 1.5.7"
_TORCHCAM = "torchcam 0.5.0"


def _derived(test: str) -> Check:
    """The formula written again, slowly, in float64."""
    return Check("re-derivation in float64", f"tests/{test}")


def _authors(golden: str, test: str) -> Check:
    """The map that the authors' own code gave on a tiny random model, kept as data."""
    return Check(f"the authors' code, golden {golden}", f"tests/{test}")


def _peer(name: str, test: str, folder: str = "tests") -> Check:
    """Another library, run beside ours on the same model."""
    return Check(f"parity with {name}", f"{folder}/{test}")


def _related(how: str, test: str) -> Check:
    """A relation between maps that must hold exactly."""
    return Check(f"relation: {how}", f"tests/{test}")


_CROSS_BY_HAND = _derived("test_catalogue.py::test_recipes_on_the_rows_of_a_text_are_those_of_their_formula")
_ATTENTION_BY_HAND = _derived("test_catalogue.py::test_attention_of_a_classifier_follows_the_formula")
_BIMODAL = _derived("test_bimodal.py::test_the_row_of_the_opening_token_and_of_every_word")
_FLOWS = _derived("test_maps.py::test_flows_read_the_mean_of_their_rows")
_QUERIES = _derived("test_blip2_hf.py::test_the_mean_over_queries_by_hand")
_GRAD_CAM = _peer(_PGC, "test_peers.py::test_grad_cam")
_TORCH_CAM = _peer(_TORCHCAM, "test_peers.py::test_torchcam")
_COMPONENTS = _peer(f"{_PGC}, up to the sign", "test_peers.py::test_grad_cam_principal_components_up_to_their_sign")
_VALUES = _derived("test_maps.py::test_the_first_component_is_that_of_a_singular_value_decomposition")
_DENOMINATOR = _peer(_TORCHCAM, "test_peers.py::test_torchcam_gradcampp_leaves_its_denominator_out")
_SCORED = _derived("test_asking.py::test_scorecam_follows_the_formula")
_POOLED = _derived("test_contrastive.py::test_the_pooler_of_siglip_reads_each_block_in_turn")
_TEXT_VALUES = _derived("test_text_maps.py::test_grad_eclip_text_weights_values_by_the_gradient_at_the_pooled_token")
_ON_EVERY_SCALE = _derived("test_contrastive.py::test_maps_on_every_scale_are_weighted_by_the_gradient_of_that_scale")

CHECKS = MappingProxyType(
    {
        "lavis-itm": (
            _derived("test_blip_formulas.py::test_lavis_itm_is_the_head_mean_of_attention_times_positive_gradient"),
            _authors(
                "r50-lavis-blip-itm",
                "test_blip_formulas.py::test_maps_equal_those_that_lavis_computes_on_a_padded_batch",
            ),
            _peer(
                "LAVIS 1.0.2",
                "test_blip_itm.py::test_maps_equal_those_of_compute_gradcam_on_a_padded_batch",
                "tests_lavis",
            ),
        ),
        "albef-itm": (
            _derived("test_blip_formulas.py::test_albef_itm_also_averages_the_special_tokens"),
            Check(
                "the authors' code, golden r49-albef-itm",
                "tests_lavis/test_albef.py::test_maps_equal_those_of_grounding_on_a_padded_batch",
            ),
        ),
        "pnp-vqa": (_CROSS_BY_HAND,),
        "pnp-vqa-as-written": (_CROSS_BY_HAND,),
        "omnixai-itm": (_CROSS_BY_HAND,),
        "blip2-itm": (_QUERIES,),
        "blip2-itc": (_QUERIES,),
        "attention-cross": (_derived("test_blip_formulas.py::test_attention_cross_is_the_attention_alone"),),
        "context-gradcam": (
            _derived(
                "test_blip_formulas.py::test_context_gradcam_sums_the_gradient_of_every_block_that_reads_the_tokens"
            ),
            _related(
                "the maps of single blocks add up to it",
                "test_blip_formulas.py::test_context_maps_of_single_blocks_add_up_to_the_shared_one",
            ),
        ),
        "blip-caption": (
            _derived(
                "test_blip_writing.py::"
                "test_the_map_of_a_caption_is_that_of_its_formula_with_every_word_at_the_row_before_it"
            ),
        ),
        "blip-vqa": (
            _derived(
                "test_blip_writing.py::test_the_map_of_an_answer_is_that_of_its_formula_over_the_words_of_the_question"
            ),
        ),
        "chefer-bimodal": (_BIMODAL,),
        "chefer-bimodal-words": (_BIMODAL,),
        "clip-gradcam": (
            _ON_EVERY_SCALE,
            _related(
                "logit and cosine give one map, at any temperature",
                "test_contrastive.py::test_logit_and_cosine_give_the_same_map_and_the_temperature_changes_nothing",
            ),
        ),
        "pgc-clip-softmax": (
            _derived("test_contrastive.py::test_pgc_clip_softmax_is_grad_cam_of_the_softmax_over_the_prompts"),
        ),
        "clip-es": (
            _ON_EVERY_SCALE,
            _authors("r14-clip-es", "test_golden_clip.py::test_clip_es_reads_the_probability_of_the_mean_patch"),
        ),
        "albef-itc": (
            _derived(
                "test_contrastive.py::test_albef_itc_is_attention_times_its_positive_gradient_in_the_class_tokens_row"
            ),
            Check(
                "the authors' code, golden r49-albef-itm",
                "tests_lavis/test_albef.py::test_maps_of_the_contrastive_score_equal_those_of_grounding",
            ),
        ),
        "chefer-clip": (
            _authors("r34-chefer-clip", "test_golden_clip.py::test_chefer_clip"),
            _related(
                "equals albef-itc at the last block",
                "test_contrastive.py::test_chefer_clip_equals_albef_itc_at_the_last_block",
            ),
        ),
        "chefer-clip-text": (
            _derived("test_text_maps.py::test_chefer_clip_text_is_the_pooled_tokens_row_of_weighted_attention"),
            _authors("r34-chefer-clip", "test_golden_clip.py::test_chefer_clip_text"),
        ),
        "grad-eclip": (
            _derived("test_contrastive.py::test_grad_eclip_weights_values_by_the_gradient_of_what_heads_make_of_them"),
        ),
        "grad-eclip-as-coded": (
            _derived("test_attention_forms.py::test_grad_eclip_as_coded_explains_the_last_block_with_one_head"),
            _authors("r17-r19-r57-grad-eclip", "test_golden_clip.py::test_grad_eclip_as_coded"),
            _authors("r21-grad-eclip-blip", "test_golden_blip.py::test_grad_eclip_as_the_notebook_for_blip_makes_it"),
        ),
        "grad-eclip-text": (_TEXT_VALUES,),
        "grad-eclip-text-as-coded": (
            _TEXT_VALUES,
            _authors("r20-grad-eclip-text", "test_golden_clip.py::test_grad_eclip_text_as_coded"),
        ),
        "legrad-pooler": (_POOLED,),
        "legrad-pooler-as-coded": (
            _POOLED,
            _authors("r43-legrad-coca", "test_golden_clip.py::test_legrad_of_a_pooler_with_several_queries"),
            _authors("r43-legrad-siglip", "test_golden_clip.py::test_legrad_of_siglips_pooler"),
        ),
        "maskclip": (
            _derived("test_attention_forms.py::test_identity_lets_every_token_keep_its_own_value"),
            _authors("r17-r19-r57-grad-eclip", "test_golden_clip.py::test_maskclip_as_in_grad_eclip"),
        ),
        "clip-surgery": (
            _authors("r58-clip-surgery", "test_golden_clip.py::test_clip_surgery"),
            _related(
                "what all texts share adds to nothing over them",
                "test_similarity.py::test_what_all_texts_share_adds_to_nothing_over_texts",
            ),
        ),
        "coca-caption": (_derived("test_catalogue.py::test_a_caption_of_coca_is_carried_on_through_the_slots"),),
        "pgc-gradcam": (
            _derived("test_blip_formulas.py::test_pgc_gradcam_weights_channels_by_their_mean_gradient"),
            _GRAD_CAM,
            _TORCH_CAM,
            _peer("captum 0.9.0", "test_peers.py::test_captum_layer_gradcam"),
        ),
        "pgc-swin": (_peer(_PGC, "test_catalogue.py::test_the_site_of_the_example_for_swin_is_that_of_pgc_swin"),),
        "pgc-gradcam++": (_GRAD_CAM, _derived("test_peers.py::test_grad_cam_plus_plus_near_its_poles")),
        "pgc-xgradcam": (
            _GRAD_CAM,
            _TORCH_CAM,
            _related(
                "the map sums to gradient times activation",
                "test_maps.py::test_xgradcam_conserves_gradient_times_activation",
            ),
        ),
        "pgc-hirescam": (
            _GRAD_CAM,
            _related(
                "summed over all tokens it is gradient times activation",
                "test_maps.py::test_hirescam_summed_over_all_tokens_is_gradient_times_activation",
            ),
        ),
        "pgc-layercam": (_GRAD_CAM, _TORCH_CAM),
        "pgc-elementwise": (_GRAD_CAM,),
        "pgc-eigencam": (_COMPONENTS, _VALUES),
        "pgc-eigengradcam": (_COMPONENTS, _VALUES),
        "pgc-finercam": (_peer(_PGC, "test_peers.py::test_grad_cam_finer"),),
        "torchcam-gradcam++": (_DENOMINATOR,),
        "torchcam-gradcam++-as-coded": (_TORCH_CAM, _DENOMINATOR),
        "gscorecam-gradcam": (
            _derived("test_contrastive.py::test_gscorecams_grad_cam_weights_channels_by_the_class_tokens_gradient"),
            _authors("r16b-r34-gscorecam", "test_golden_clip.py::test_gscorecam_gradcam"),
        ),
        "gradeclip-gradcam-baseline": (
            _derived("test_contrastive.py::test_grad_eclips_baseline_reads_the_last_blocks_input_over_all_tokens"),
        ),
        "gradeclip-gradcam-baseline-as-coded": (
            _derived(
                "test_attention_forms.py::test_the_baseline_of_grad_eclip_as_coded_changes_the_block_behind_its_site"
            ),
            _authors(
                "r17-r19-r57-grad-eclip",
                "test_golden_clip.py::test_gradeclips_gradcam_runs_the_last_block_with_one_head",
            ),
        ),
        "raw-attention": (
            _derived("test_contrastive.py::test_raw_attention_reads_the_attention_that_the_library_returns"),
            _authors("r29-r24-r33-vit-14x14", "test_golden_vit.py::test_raw_attention_of_the_class_token"),
        ),
        "attention-rollout": (
            _FLOWS,
            _authors("r25-bt-baselines", "test_golden_vit.py::test_rollout_from_the_first_or_the_second_block"),
            _related("rows sum to 1", "test_maps.py::test_half_identity_half_attention_is_the_same_rollout"),
        ),
        "vitexplain-rollout": (_FLOWS,),
        "vitexplain-rollout-as-coded": (
            _FLOWS,
            _authors("r27-r28-vitexplain", "test_golden_vit.py::test_vitexplain_rollout_as_coded"),
        ),
        "vitexplain-grad-rollout": (_FLOWS,),
        "vitexplain-grad-rollout-as-coded": (
            _derived("test_maps.py::test_gradient_rollout_as_coded_is_vit_explains"),
            _authors("r27-r28-vitexplain", "test_golden_vit.py::test_vitexplain_grad_rollout_as_coded"),
        ),
        "attn-gradcam": (
            _ATTENTION_BY_HAND,
            _authors("r29-r24-r33-vit-14x14", "test_golden_vit.py::test_attention_gradcam_of_the_class_token"),
        ),
        "attn-gradcam-full": (_ATTENTION_BY_HAND,),
        "chefer-generic": (
            _derived("test_contrastive.py::test_relevance_through_all_blocks_is_the_product_of_their_matrices"),
            _authors("r33-chefer-vit", "test_golden_vit.py::test_chefer_generic"),
            _authors("r16b-r34-gscorecam", "test_golden_clip.py::test_hilacam_is_relevance_over_all_blocks"),
        ),
        "chefer-generic-heads-first": (
            _FLOWS,
            _authors("r25-bt-baselines", "test_golden_vit.py::test_relevance_with_the_mean_over_heads_first"),
        ),
        "agcam": (
            _derived("test_maps.py::test_agcam_is_a_sum_over_heads_and_layers_of_sigmoid_times_positive_gradient"),
            _authors("r41-agcam", "test_golden_vit.py::test_agcam"),
        ),
        "legrad": (
            _derived("test_contrastive.py::test_legrad_reads_each_block_as_the_mean_of_its_tokens"),
            _authors("r42-legrad-clip", "test_golden_clip.py::test_legrad"),
            _peer(f"{_TORCHCAM}, with layer_rule='mean'", "test_peers.py::test_torchcam_legrad_averages_the_layers"),
        ),
        "grad-sam": (_ATTENTION_BY_HAND,),
        "grad-sam-queries": (_ATTENTION_BY_HAND,),
        "pgc-scorecam": (_SCORED, _peer(_PGC, "test_asking.py::test_scorecam_is_that_of_pytorch_grad_cam")),
        "torchcam-scorecam": (_SCORED, _peer(_TORCHCAM, "test_asking.py::test_scorecam_is_that_of_torchcam")),
        "ablationcam": (Check("re-derivation", "tests/test_asking.py::test_ablationcam_follows_the_formula"),),
        "vit-reciprocam": (
            _authors("r61-vit-reciprocam", "test_asking.py::test_reciprocam_maps_are_the_authors_for_every_class"),
        ),
        "tam-transition": (_authors("r38-tam-transition", "test_asking.py::test_transition_maps_are_the_authors"),),
        "beyond-intuition-headwise": (
            _authors("r39-bt-headwise", "test_asking.py::test_headwise_maps_are_the_authors"),
            _authors("r34-r39-bt-clip", "test_golden_clip.py::test_beyond_intuition_headwise_on_clip"),
        ),
        "beyond-intuition-tokenwise": (
            _authors("r40-bt-tokenwise", "test_asking.py::test_tokenwise_maps_are_the_authors"),
        ),
    }
)
