"""Bad input gives one line that names the parameter and says what is allowed."""

import math

import numpy as np
import pytest
from pydantic import Field

from benign_attention.parameters import (
    ChapterParams,
    Dimension,
    FlipProbability,
    ParameterError,
    Positive,
    SamplesCount,
    TokensCount,
)


class Params(ChapterParams):
    n_train: SamplesCount = Field(200, description="training samples")
    dim: Dimension = Field(40_000, description="token dimension")
    n_tokens: TokensCount = Field(2, description="tokens")
    label_noise: FlipProbability = Field(0.05, description="flip probability")
    step_size: Positive = Field(0.025, description="step size")
    n_train_grid: list[SamplesCount] = Field([20, 40], min_length=1, description="a grid")
    slope_grid: list[Positive] = Field([1.0, 2.0], min_length=2, description="a grid of at least two")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"slope_grid": [1.0]}, "slope_grid must be a list of at least 2 numbers, got [1.0]"),
        ({"label_noise": 0.5}, "label_noise must be a number in [0, 0.5), got 0.5"),
        ({"label_noise": 0.7}, "label_noise must be a number in [0, 0.5), got 0.7"),
        ({"label_noise": -0.1}, "label_noise must be a number in [0, 0.5), got -0.1"),
        ({"n_tokens": 1}, "n_tokens must be a whole number of at least 2, got 1"),
        ({"dim": 2}, "dim must be a whole number in [3, 1e+15], got 2"),
        ({"step_size": math.inf}, "step_size must be a number in [1e-15, 1e+15], got inf"),
        ({"step_size": math.nan}, "step_size must be a number in [1e-15, 1e+15], got nan"),
        ({"label_noise": math.nan}, "label_noise must be a number in [0, 0.5), got nan"),
        ({"dim": 4e4}, "dim must be a whole number in [3, 1e+15], got 40000.0"),
        ({"n_seeds": True}, "n_seeds must be a whole number of at least 1, got True"),
        ({"n_seeds": 0}, "n_seeds must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"device": "gpu"}, "device must be one of auto, cpu, cuda, mps, got 'gpu'"),
        ({"sections": "some"}, "sections must be one of all, point, got 'some'"),
        ({"n_train_grid": []}, "n_train_grid must be a non-empty list of whole numbers, got []"),
        ({"n_train_grid": 20}, "n_train_grid must be a non-empty list of whole numbers, got 20"),
        ({"n_train_grid": [20, 1]}, "n_train_grid[1] must be a whole number in [2, 1e+09], got 1"),
        ({"n_train_grid": [20, "a"]}, "n_train_grid[1] must be a whole number in [2, 1e+09], got 'a'"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(change, line):
    with pytest.raises(ParameterError) as refusal:
        Params(**change)
    assert str(refusal.value) == line


def test_text_where_a_list_belongs_says_how_to_pass_a_list():
    with pytest.raises(ParameterError, match=r"n_train_grid must be .* got '\[20, 40\]' \(this is text, not a list"):
        Params(n_train_grid="[20, 40]")


def test_text_where_a_number_belongs_says_how_yaml_reads_it():
    with pytest.raises(
        ParameterError, match=r"step_size must be .* got '1e-3' \(this is text: YAML reads 1e-3 as text"
    ):
        Params(step_size="1e-3")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ParameterError, match=r"n_trian is not a parameter; the parameters are .*n_train"):
        Params(n_trian=10)


def test_parameters_are_frozen_and_replace_checks_again():
    params = Params()
    with pytest.raises(ValueError, match="frozen"):
        params.n_train = 3
    assert params.replace(n_train=3).n_train == 3
    with pytest.raises(ParameterError, match="n_train"):
        params.replace(n_train=1)


def first_draw(params, run=0, **point):
    return params.generator(run, **point).standard_normal(4).tolist()


@pytest.mark.parametrize(
    "change", [{"n_seeds": 9}, {"device": "auto"}, {"record_path": "x"}, {"sections": "point"}, {"n_train_grid": [7]}]
)
def test_housekeeping_and_grids_leave_the_random_streams(change):
    assert first_draw(Params(**change)) == first_draw(Params())


def test_every_run_point_seed_and_parameter_has_its_own_stream():
    """128-bit hashes: a false alarm has probability below 1e-15."""
    draws = [
        *(first_draw(Params(), run) for run in range(5)),
        *(first_draw(Params(seed=seed)) for seed in (1, 2)),
        *(first_draw(Params(), step_size=size) for size in (0.1, 0.2)),
        first_draw(Params(dim=50)),
        first_draw(Params(label_noise=0.1)),
    ]
    assert len(np.unique(draws, axis=0)) == len(draws)


def test_a_point_that_restates_a_parameter_shares_its_stream():
    assert first_draw(Params(), n_train=300) == first_draw(Params(n_train=300))
