"""Chapter `real_text`: pretrained BERT models fine-tuned on texts with flipped labels, in the last layer's attention."""

from __future__ import annotations

from pydantic import Field

from benign_attention.experiments import finetuning
from benign_attention.experiments.finetuning import FinetuneParams
from benign_attention.records import Metric


class Params(FinetuneParams):
    source: str = Field("news4", description="texts: news4, r8, or from the hub ag_news, trec")
    backbone: str = Field("minilm", description="minilm, or from the hub bert-base-uncased")
    max_tokens: int = Field(64, ge=8, le=512, description="longer texts are cut, word pieces")
    special_tokens: bool = Field(True, description="read position 0 at a [CLS] put before the text, not at its first word")

    def reading(self) -> dict:
        return {"max_tokens": self.max_tokens, "special_tokens": self.special_tokens}


def measure(params: Params) -> dict[str, Metric]:
    """The metrics of `finetuning.measure`."""
    return finetuning.measure(params)
