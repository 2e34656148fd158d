"""BLIP-2 with its two retrieval heads, as in Hugging Face transformers: `Blip2ForImageTextRetrieval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor
from transformers import Blip2ForImageTextRetrieval, Blip2Processor

from vlcam.adapter import Inputs
from vlcam.anatomy import Anatomy
from vlcam.targets import HeadKind
from vlcam_adapters.blip2_parts import HEADS, LACKS, MISSING, NOTES, TARGETS, QFormer, pooler
from vlcam_adapters.blip_parts import BlipAdapter, Opening, own_rows


class Blip2RetrievalHF(BlipAdapter):
    """Adapter for `transformers.Blip2ForImageTextRetrieval`."""

    family: ClassVar[Any] = Blip2ForImageTextRetrieval
    processor: ClassVar[Any] = Blip2Processor
    architectures: ClassVar[tuple[str, ...]] = ("Blip2ForImageTextRetrieval",)
    heads: Mapping[str, HeadKind] = HEADS
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
        layers, count = self.module.qformer.encoder.layer, self.module.config.num_query_tokens
        streams = {
            "vision": self.vision_stream(),
            "pooler": pooler(layers, "attention", self.text_config, count),
        }
        return Anatomy(type(self.module).__name__, streams, TARGETS, NOTES, lacks=LACKS)

    def head(self, name: str, shared: Tensor, inputs: Inputs) -> Tensor:
        """`itm`: logits [P, 2] of (no match, match), mean over queries. `contrastive`: the best query's cosine [P]."""
        ids, mask = own_rows(inputs.texts, inputs.text_of, self.opening, MISSING)
        module = self.module
        former = QFormer(
            self._run, module.query_tokens, module.itm_head, module.vision_projection, module.text_projection
        )
        return former.head(name, shared.to(module.query_tokens.dtype), ids, mask)

    def _run(self, ids: Tensor | None, queries: Tensor | None, mask: Tensor | None, **image: Tensor) -> Tensor:
        """The Q-Former on texts, queries or both; it takes them embedded."""
        embedded = queries if ids is None else self.module.embeddings(input_ids=ids, query_embeds=queries)
        count = 0 if queries is None else queries.shape[1]
        made = self.module.qformer(query_embeds=embedded, query_length=count, attention_mask=mask, **image)
        rows: Tensor = made.last_hidden_state
        return rows
