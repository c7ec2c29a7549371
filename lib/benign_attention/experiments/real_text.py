"""Chapter `real_text`: pretrained BERT models, fine-tuned in the last layer's attention on flipped labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from benign_attention.experiments import finetuning
from benign_attention.experiments.finetuning import FinetuneParams, Study
from benign_attention.parameters import ParameterError
from benign_attention.records import Metric, fraction_metric, seed_metric

OTHER_SOURCE = {"news4": "r8", "r8": "news4", "ag_news": "trec", "trec": "ag_news"}
AUTHORS_LEARNING_RATE = 5e-5
HIGHEST_RATE = 1e14  # three times as much is tried too


class Params(FinetuneParams):
    source: str = Field("news4", description="texts: news4, r8, or from the hub ag_news, trec")
    backbone: str = Field("minilm", description="minilm, or from the hub bert-base-uncased")
    max_tokens: int = Field(64, ge=8, le=512, description="longer texts are cut, word pieces")
    special_tokens: bool = Field(True, description="whether [CLS] is read, not the first word")

    def __init__(self, **values):
        super().__init__(**values)
        if self.learning_rate > HIGHEST_RATE:
            raise ParameterError(f"learning_rate must be at most {HIGHEST_RATE:g}, got {self.learning_rate:g}")
        if self.source in OTHER_SOURCE and self.explores:
            try:
                self.contrast()
            except ParameterError as error:
                raise ParameterError(
                    f"{error} (the second set of texts, {OTHER_SOURCE[self.source]}; sections point leaves it out)"
                ) from None

    def contrast(self) -> FinetuneParams:
        """Phase 2 on the other set of texts, at the two largest n, the lowest label noise above 0 and without it."""
        values = {name: getattr(self, name) for name in FinetuneParams.model_fields}
        return FinetuneParams(
            **values
            | {
                "source": OTHER_SOURCE[self.source],
                "label_noise_grid": [0.0, self.label_noise],
                "finetune_n_train_grid": self.finetune_n_train_grid[-2:],
            }
        )

    def reading(self) -> dict:
        return {"max_tokens": self.max_tokens, "special_tokens": self.special_tokens}


@dataclass(frozen=True)
class Sentence:
    """One training text. words: (T,) word pieces; before, after: (T,) attention of position 0, mean over heads, from
    the initial and the trained query and key; label, given: class names."""

    words: list[str]
    before: np.ndarray
    after: np.ndarray
    label: str
    given: str


@dataclass(frozen=True)
class Exploration:
    """Studies behind the figures: the chapter's, more label noise, another source, the other reading of position 0,
    other learning rates. kept, flipped: texts of run 0 at the largest n, lowest label noise above 0 (None if none)."""

    main: Study
    sweep: Study
    other: Study
    reading: Study
    rates: dict[float, Study]
    kept: Sentence | None
    flipped: Sentence | None
    metrics: dict[str, Metric]


def measure(params: Params) -> dict[str, Metric]:
    """The metrics of `finetuning.measure`; and `test_change_noise<e>_<source>_<backbone>`, the same number under the
    name of what was run, since claims are about one set of texts and one model."""
    if params.explores:
        params.contrast().check_pool()
    metrics = finetuning.measure(params)
    named = {
        f"test_change_noise{e:g}_{params.source}_{params.backbone}": metrics[f"test_change_noise{e:g}"]
        for e in params.label_noise_grid
    }
    return metrics | named


def explore(params: Params) -> Exploration:
    """The controls, at label noise e, the lowest above 0, and the largest n where nothing else is said.

    `extra_cost_of_more_noise`: test accuracy at e minus that at the highest label noise.
    `sweep_test_accuracy_noise<e>`, `sweep_noisy_train_accuracy_noise<e>` at `sweep_n`.

    On the other source, the two largest n: `other_test_accuracy_n<k>_noise<e>`, `other_noisy_train_accuracy_n<k>`,
    `other_noise_cost_n<k>`. `snr`, `other_snr`: `finetuning.token_snr`. `extra_cost_at_low_snr` and
    `extra_fitted_at_low_snr`: noise cost, and share of flipped labels fitted, on the source with the smaller SNR minus
    that on the other one.

    At `sweep_n`: `cls_noise_cost`, `first_word_noise_cost` by what position 0 holds, `extra_cost_first_word` between
    them, run by run, `cls_untrained`, `first_word_untrained`: test accuracy before training;
    `noisy_train_accuracy_rate<r>`, `noise_cost_rate<r>` at other learning rates. And `finetuning.attention_shifts`.
    """
    main, sweep = finetuning.study(params), finetuning.noise_sweep(params)
    grid, noise, n_sweep = params.finetune_n_train_grid, params.label_noise, params.sweep_n
    few = params.replace(label_noise_grid=[0.0, noise])
    small = few.replace(finetune_n_train_grid=[n_sweep])
    other = finetuning.study(
        few.replace(source=OTHER_SOURCE[params.source], finetune_n_train_grid=grid[-2:]), followed=False
    )
    reading = finetuning.study(small.replace(special_tokens=not params.special_tokens), followed=False)
    rates = {
        rate: finetuning.study(small.replace(learning_rate=rate), followed=False)
        for rate in (AUTHORS_LEARNING_RATE, 3 * params.learning_rate)
    }
    metrics = {"extra_cost_of_more_noise": seed_metric(_differences(main, grid[-1], 1, -1), (-1, 1))}
    for place, level in enumerate(finetuning.SWEEP_LEVELS):
        for name, what in (("test_accuracy", "test_accuracy"), ("noisy_train_accuracy", "flipped_fitted")):
            metrics[f"sweep_{name}_noise{level:g}"] = fraction_metric(sweep.last(what)[0, :, place])
    for n in grid[-2:]:
        for place, level in enumerate((0.0, noise)):
            metrics[f"other_test_accuracy_n{n:g}_noise{level:g}"] = fraction_metric(
                other.history("test_accuracy", n)[:, place, -1]
            )
        metrics[f"other_noisy_train_accuracy_n{n:g}"] = fraction_metric(other.history("flipped_fitted", n)[:, 1, -1])
        metrics[f"other_noise_cost_n{n:g}"] = seed_metric(noise_costs(other, n), (-1, 1))
    snr, other_snr = finetuning.token_snr(main), finetuning.token_snr(other)
    metrics["snr"], metrics["other_snr"] = seed_metric([snr], (0, np.inf)), seed_metric([other_snr], (0, np.inf))
    low, high = (main, other) if snr < other_snr else (other, main)
    extra_cost = noise_costs(low, grid[-1]) - noise_costs(high, grid[-1])
    fitted = [study.history("flipped_fitted", grid[-1])[:, 1, -1] for study in (low, high)]
    metrics["extra_cost_at_low_snr"] = seed_metric(extra_cost, (-1, 1))
    metrics["extra_fitted_at_low_snr"] = seed_metric(fitted[0] - fitted[1], (-1, 1))
    by_reading = {params.special_tokens: main, not params.special_tokens: reading}
    for special, name in ((True, "cls"), (False, "first_word")):
        metrics[f"{name}_noise_cost"] = seed_metric(noise_costs(by_reading[special], n_sweep), (-1, 1))
        untrained = by_reading[special].history("test_accuracy", n_sweep)[:, 0, 0]
        metrics[f"{name}_untrained"] = fraction_metric(untrained)
    metrics["extra_cost_first_word"] = seed_metric(
        noise_costs(by_reading[False], n_sweep) - noise_costs(by_reading[True], n_sweep), (-1, 1)
    )
    for rate, found in rates.items():
        metrics[f"noisy_train_accuracy_rate{rate:g}"] = fraction_metric(found.last("flipped_fitted")[0, :, 1])
        metrics[f"noise_cost_rate{rate:g}"] = seed_metric(noise_costs(found, n_sweep), (-1, 1))
    metrics |= finetuning.attention_shifts(main)
    flipped = main.runs[grid[-1]][0].flipped[1]
    return Exploration(
        main,
        sweep,
        other,
        reading,
        rates,
        kept=None if flipped.all() else _sentence(main, int(np.flatnonzero(~flipped)[0])),
        flipped=_sentence(main, int(np.flatnonzero(flipped)[0])) if flipped.any() else None,
        metrics=metrics,
    )


def noise_costs(found: Study, n_train: int) -> np.ndarray:
    """(runs,): test accuracy without label noise minus that at the lowest level above 0."""
    return _differences(found, n_train, 0, 1)


def _differences(found: Study, n_train: int, first: int, second: int) -> np.ndarray:
    test = found.history("test_accuracy", n_train)[:, :, -1]
    return test[:, first] - test[:, second]


def _sentence(found: Study, place: int) -> Sentence:
    """The training text at `place` of run 0 at the largest n."""
    n_train = found.params.finetune_n_train_grid[-1]
    run, trained = found.runs[n_train][0], found.trained[n_train][0]
    row = run.samples[place]
    words = found.backbone.words(found.dataset.inputs[found.rows[row]])
    tokens = found.backbone.last.tokens(found.hidden.hidden, found.hidden.mask, np.array([row]))
    before = found.backbone.last.attention(run.start, tokens)[0, 0].mean(0).cpu().numpy()
    names = found.dataset.source.class_names
    return Sentence(
        words,
        before[: len(words)],
        trained.attention[1, place].mean(0)[: len(words)],
        names[found.dataset.labels[found.rows[row]]],
        names[run.given[1, place]],
    )
