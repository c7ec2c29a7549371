"""Metrics, intervals, scales and the file that a record leaves."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from scipy import stats

from benign_attention import paths, records
from benign_attention.parameters import ChapterParams, ParameterError
from benign_attention.records import (
    Metric,
    fraction_metric,
    make_record,
    read_record,
    require_writable,
    scale_of,
    scale_values,
    seed_metric,
    write_json,
)


class Params(ChapterParams):
    n_train: int = Field(200, description="training samples")


@pytest.fixture
def scales(tmp_path, monkeypatch):
    """Scale files of a chapter named `demo`."""
    monkeypatch.setattr(paths, "SCALES", tmp_path / "scales")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    for scale, text in {"smoke": "n_train: 10\n", "paper": "n_train: 1000\nn_seeds: 20\n"}.items():
        (tmp_path / "scales" / scale).mkdir(parents=True)
        (tmp_path / "scales" / scale / "demo.yml").write_text(text)


def test_interval_is_students():
    values = [1.0, 2.0, 4.0]
    metric = seed_metric(values)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert (metric.value, metric.low, metric.high) == pytest.approx((np.mean(values), low, high))
    assert metric.per_seed == values and metric.n_seeds == 3


def test_interval_covers_as_often_as_it_says():
    """2000 intervals over 5 normal seeds: 95 % ± 4 standard errors (false alarm rate 6e-5; seed fixed)."""
    draws = np.random.default_rng(0).standard_normal((2000, 5))
    covered = np.mean([metric.low < 0 < metric.high for metric in map(seed_metric, draws)])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_one_seed_has_no_interval_and_none_is_undefined():
    assert (seed_metric([2.0]).value, seed_metric([2.0]).low) == (2.0, None)
    undefined = seed_metric([math.nan, math.inf])
    assert (undefined.value, undefined.low, undefined.per_seed) == (None, None, [None, None])
    assert seed_metric([math.nan, 1.0, 3.0]).value == 2.0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_intervals_of_fractions_stay_in_bounds_and_hold_the_mean(values):
    metric = fraction_metric(values)
    assert 0 <= metric.low <= metric.value + 1e-12 and metric.value - 1e-12 <= metric.high <= 1


def test_scale_is_named_only_when_it_matches_exactly(scales):
    assert scale_of("demo", Params()) == "reader"
    assert scale_of("demo", Params(n_train=10, device="auto", record_path="x.json")) == "smoke"
    assert scale_of("demo", Params(n_train=1000, n_seeds=20)) == "paper"
    assert scale_of("demo", Params(n_train=1000)) == "custom"
    assert scale_of("demo", Params(seed=1)) == "custom"


def test_unknown_scales_are_refused_in_one_line(scales):
    with pytest.raises(ParameterError, match=r"^scale must be one of smoke, reader, paper, got 'huge'$"):
        scale_values("demo", "huge")
    with pytest.raises(ParameterError, match=r"^scale must be one that other has a file for, got 'smoke'"):
        scale_values("other", "smoke")


def test_a_record_survives_its_file_and_the_file_is_strict_json(scales, tmp_path):
    path = tmp_path / "new folder" / "demo.json"
    metrics = {"accuracy": fraction_metric([0.9, 1.0]), "nothing": seed_metric([math.nan])}
    record = make_record("demo", Params(record_path=str(path)), metrics)
    assert read_record(path) == record
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert record.scale == "reader"
    assert record.parameters == {k: v for k, v in Params().model_dump().items() if k != "record_path"}
    assert {"made", "seconds", "peak_memory_mb", "python", "machine", "versions"} <= set(record.provenance)
    assert [file.name for file in path.parent.iterdir()] == ["demo.json"]


def test_the_same_run_makes_the_same_record_apart_from_provenance(scales):
    first, second = (make_record("demo", Params(), {"x": seed_metric([1.0, 2.0])}) for _ in range(2))
    assert {**first.as_json(), "provenance": None} == {**second.as_json(), "provenance": None}


def test_a_path_that_cannot_be_written_is_refused_and_named(tmp_path):
    (tmp_path / "file").write_text("")
    for write in (lambda path: write_json(path, {}, "record_path"), lambda path: require_writable(path, "record_path")):
        for path in (tmp_path / "file" / "record.json", tmp_path):
            with pytest.raises(ParameterError, match=r"^record_path must be a file that can be written, got '[^\n]*$"):
                write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("data", [{"x": math.nan}, {"x": object()}])
def test_a_record_that_cannot_be_json_leaves_the_old_file(tmp_path, data):
    path = tmp_path / "record.json"
    write_json(path, {"old": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(path, data)
    assert json.loads(path.read_text()) == {"old": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write_json(path, {"old": 1})
    monkeypatch.setattr(records.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_metrics_print_value_and_interval():
    assert str(Metric(0.5, 0.25, 0.75, 3, [], "")) == "0.5 [0.25, 0.75]"
    assert str(Metric(0.5, None, None, 1, [], "")) == "0.5"
    assert str(Metric(None, None, None, 0, [], "")) == "undefined"
