"""BLIP-2 with its two retrieval heads, as in Hugging Face transformers: `Blip2ForImageTextRetrieval`.

The Q-Former's learned queries look at the image, in every second block; words never do. In the matching head words and
queries attend to each other, in the contrastive one they meet in a cosine alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import Blip2ForImageTextRetrieval, Blip2Processor

from vlcam.adapter import Inputs
from vlcam.anatomy import Anatomy, Block, Reading, StreamAnatomy
from vlcam.targets import HeadKind
from vlcam_adapters.blip_blocks import POST_NORM
from vlcam_adapters.blip_parts import BlipAdapter, Opening, own_rows

_MISSING = "BLIP-2 scores an image with a text, but no text was given"
_NO_WORDS = (
    "no word of BLIP-2 looks at the image: its cross-attention is that of learned queries, stream 'pooler', and there "
    "is no map per word"
)


class Blip2RetrievalHF(BlipAdapter):
    """Adapter for `transformers.Blip2ForImageTextRetrieval`."""

    family: ClassVar[Any] = Blip2ForImageTextRetrieval
    processor: ClassVar[Any] = Blip2Processor
    architectures: ClassVar[tuple[str, ...]] = ("Blip2ForImageTextRetrieval",)
    heads: Mapping[str, HeadKind] = MappingProxyType({"itm": "binary", "contrastive": "cosine"})
    module: Blip2ForImageTextRetrieval

    def __init__(self, module: Blip2ForImageTextRetrieval, processor: Blip2Processor, **options: Any) -> None:
        """Hold a loaded model; [CLS] opens texts in both heads, options as in `BlipAdapter`."""
        super().__init__(module, processor, **options)
        self.opening: Opening = ("[CLS]", int(self._tokenizer.cls_token_id))

    @property
    def text_config(self) -> Any:
        """The Q-Former's, which also reads the text."""
        return self.module.config.qformer_config

    @property
    def fusion_blocks(self) -> Sequence[Any]:
        """The blocks in which queries look at the image."""
        return [layer for layer in self.module.qformer.encoder.layer if hasattr(layer, "crossattention")]

    @property
    def projections(self) -> Sequence[Any]:
        """What projects image tokens to keys and values."""
        inner = (layer.crossattention.attention for layer in self.fusion_blocks)
        return [projection for attention in inner for projection in (attention.key, attention.value)]

    @cached_property
    def anatomy(self) -> Anatomy:
        """`vision`, pre-norm, and `pooler`, the Q-Former."""
        config, count = self.text_config, self.module.config.num_query_tokens
        streams = {
            "vision": self.vision_stream(),
            "pooler": StreamAnatomy(
                "pooler",
                tuple(_block(layer) for layer in self.module.qformer.encoder.layer),
                config.hidden_size,
                config.num_attention_heads,
                f"{count} learned queries, then word pieces; rows of CROSS: the queries; keys of CROSS: image tokens",
                trunk=False,
                queries=count,
            ),
        }
        return Anatomy(
            type(self.module).__name__,
            streams,
            ("itm: logit, probability, log-probability, margin", "contrastive: cosine of the query that fits best"),
            (
                _NO_WORDS,
                "itm averages over the queries; of contrastive only the best one has a gradient behind the last block",
                "F2 of pooler belongs to itm: contrastive runs the Q-Former twice, on the image and on the text",
            ),
            lacks={"fusion": _NO_WORDS, "text": "the Q-Former reads the text, together with its queries"},
        )

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """`itm`: logits [P, 2] of (no match, match), mean over queries. `contrastive`: the best query's cosine [P]."""
        ids, mask = own_rows(inputs.texts, inputs.text_of, self.opening, _MISSING)
        module, tokens = self.module, shared.to(self.module.query_tokens.dtype)
        queries = module.query_tokens.expand(len(tokens), -1, -1)
        seen = {
            "encoder_hidden_states": tokens,
            "encoder_attention_mask": torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device),
        }
        if name == "itm":
            joint = torch.cat((torch.ones(queries.shape[:2], dtype=mask.dtype, device=mask.device), mask), 1)
            embedded = module.embeddings(input_ids=ids, query_embeds=queries)
            made = module.qformer(query_embeds=embedded, query_length=queries.shape[1], attention_mask=joint, **seen)
            logits: Tensor = module.itm_head(made.last_hidden_state[:, : queries.shape[1]]).mean(1)
            return logits
        images = module.qformer(query_embeds=queries, **seen).last_hidden_state
        words = module.qformer(
            query_embeds=module.embeddings(input_ids=ids), query_length=0, attention_mask=mask
        ).last_hidden_state[:, 0]
        text = normalize(module.text_projection(words), dim=-1)
        cosines = torch.einsum("pqe,pe->pq", normalize(module.vision_projection(images), dim=-1), text)
        return cosines.amax(1)


def _block(layer: Any) -> Block:
    sites = {
        "F2": Reading(layer.attention.attention, "attention"),
        "F3_HEADS": Reading(layer.attention.attention, "output"),
        "F3": Reading(layer.attention.output.dense, "output"),
        "F6": Reading(layer, "output"),
    }
    lacks = {"F1": POST_NORM, "F4": POST_NORM, "F5": "queries and words have an FFN each"}
    if hasattr(layer, "crossattention"):
        sites["CROSS"] = Reading(layer.crossattention.attention, "attention")
        sites["CONTEXT"] = Reading(layer.crossattention.attention, "keyword", "encoder_hidden_states")
    else:
        lacks |= dict.fromkeys(("CROSS", "CONTEXT"), "this block has no cross-attention")
    return Block(sites, lacks)
