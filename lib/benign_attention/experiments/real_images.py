"""Chapter `real_images`: transformers on real images with flipped labels. Part one is `one_layer_images`."""

from __future__ import annotations

from benign_attention.experiments import one_layer_images
from benign_attention.experiments.one_layer_images import OneLayerParams
from benign_attention.records import Metric


class Params(OneLayerParams):
    def one_layer(self) -> OneLayerParams:
        """What part one reads. Its random numbers depend on nothing else."""
        return OneLayerParams(**{name: getattr(self, name) for name in OneLayerParams.model_fields})


def measure(params: Params) -> dict[str, Metric]:
    """The metrics of `one_layer_images.measure`."""
    return one_layer_images.measure(params.one_layer())


def explore(params: Params) -> one_layer_images.Exploration:
    """The controls of `one_layer_images.explore`."""
    return one_layer_images.explore(params.one_layer())
