"""Real data: where it comes from, and the models that are trained on it."""

import warnings

with warnings.catch_warnings():  # transformers imports it; in a notebook without ipywidgets that warns, quoting a path
    warnings.simplefilter("ignore")
    import tqdm.auto  # noqa: F401
