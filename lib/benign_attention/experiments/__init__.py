"""What each chapter measures, one module a chapter: `Params`, `measure(params)`, `explore(params)`."""

from importlib import import_module
from types import ModuleType

CHAPTERS = (
    "data_model",
    "two_step_gd",
    "multi_step_dynamics",
    "max_margin",
    "baselines",
    "token_selection",
    "delayed_generalization",
    "real_images",
    "real_text",
)


def load(chapter: str) -> ModuleType:
    """The module that measures `chapter`; imported on demand, so that torch is only loaded where it is needed."""
    return import_module(f"benign_attention.experiments.{chapter}")
