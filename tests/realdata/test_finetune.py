"""Both phases against `torch.optim` on unmodified models of `transformers`, and what must not depend on batching."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from tiny_transformers import CLASSES, DIM, SAMPLES, some_maps, tiny
from torch import nn
from torch.nn.functional import cross_entropy

from benign_attention import devices
from benign_attention.parameters import ParameterError
from benign_attention.realdata import finetune as ft
from benign_attention.realdata.finetune import Run, Schedule

TEST = np.arange(9, SAMPLES)
TEST_LABELS = np.array([0, 1, 2])


def some_head(dtype: torch.dtype = torch.float32, pooler: bool = False) -> ft.Head:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    return ft.Head(normal(CLASSES, DIM), normal(CLASSES), (normal(DIM, DIM) / 5, normal(DIM)) if pooler else None)


def some_run(n_sets: int = 2, seed: int = 0, n_train: int = 9, dtype: torch.dtype = torch.float32) -> Run:
    rng = np.random.default_rng(seed)
    samples = rng.permutation(9)[:n_train]
    given, flipped = rng.integers(0, CLASSES, (5, n_train)), rng.random((5, n_train)) < 0.4
    return Run(samples, given[:n_sets], flipped[:n_sets], some_maps(1, dtype), seed)


def trained(runs, schedule, kind="bert", head=None, **options):
    full = tiny(kind)
    head = head or some_head(pooler=kind == "bert")
    return ft.finetune(full.last, head, full.hidden, full.mask, runs, schedule, TEST, TEST_LABELS, "cpu", **options)


def same(ours: ft.Trained, theirs: ft.Trained, tolerance: float, sets=slice(None)) -> None:
    for field in fields(ft.Watched)[1:]:
        a, b = (getattr(run.history, field.name) for run in (ours, theirs))
        np.testing.assert_allclose(a[sets], b, rtol=tolerance, atol=tolerance, err_msg=field.name)
    np.testing.assert_allclose(ours.attention[sets], theirs.attention, atol=tolerance)
    for a, b in zip(ours.maps.trained(), theirs.maps.trained(), strict=True):
        torch.testing.assert_close(a[sets], b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", ft.OPTIMIZERS)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_five_steps_equal_torch_optim_on_the_whole_unmodified_model(kind, optimizer):
    double = torch.float64
    full, head = tiny(kind, double), some_head(double, pooler=kind == "bert")
    rate, run = 0.01, some_run(dtype=double)
    (ours,) = ft.finetune(
        full.last, head, full.hidden, full.mask, [run], Schedule(optimizer, rate, (0, 5)), TEST, TEST_LABELS, "cpu"
    )
    for i in range(2):
        leaves = full.put(run.start)
        method = {
            "adamw": lambda x: torch.optim.AdamW(x, lr=rate, weight_decay=0.0),
            "sgd": lambda x: torch.optim.SGD(x, lr=rate, momentum=0.9),
            "gd": lambda x: torch.optim.SGD(x, lr=rate),
        }[optimizer](leaves)
        decay = torch.optim.lr_scheduler.LambdaLR(method, lambda k: 1 - k / 5 if optimizer == "adamw" else 1.0)

        def loss(i=i):
            logits = head(full.forward().last_hidden_state[run.samples, 0])
            return cross_entropy(logits, torch.tensor(run.given[i]))

        losses = [loss()]
        for _ in range(5):
            method.zero_grad()
            loss().backward()
            method.step()
            decay.step()
        losses.append(loss())
        np.testing.assert_allclose(ours.history.train_loss[i], [value.item() for value in losses], rtol=1e-9)
        for mine, theirs, start in zip(
            ours.maps.trained(), (full.query.weight, full.query.bias, full.key.weight), run.start.trained(), strict=True
        ):
            moved = torch.linalg.norm(theirs - start[0])
            assert moved > 0
            assert torch.linalg.norm(mine[i] - theirs) < 1e-6 * moved
        assert abs(losses[1] - losses[0]) > 1e-3


def test_watched_quantities_are_those_of_the_unmodified_model_and_flipped_labels_are_counted_apart():
    full, head, run = tiny("bert"), some_head(pooler=True), some_run(n_sets=3)
    (result,) = trained([run], Schedule("gd", 0.5, (0, 20)))
    history = result.history
    for i in range(3):
        full.put(result.maps, i)
        with torch.no_grad():
            out = full.forward(output_attentions=True)
            logits, largest = head(out.last_hidden_state[:, 0]), out.attentions[-1][:, :, 0].amax(-1).mean(-1)
        given, flipped = torch.tensor(run.given[i]), run.flipped[i]
        right = (logits[run.samples].argmax(-1) == given).numpy()
        expected = {
            "train_loss": cross_entropy(logits[run.samples], given),
            "train_accuracy": right.mean(),
            "kept_fitted": right[~flipped].mean(),
            "flipped_fitted": right[flipped].mean(),
            "max_attention": largest[run.samples].mean(),
            "test_loss": cross_entropy(logits[TEST], torch.tensor(TEST_LABELS)),
            "test_accuracy": (logits[TEST].argmax(-1).numpy() == TEST_LABELS).mean(),
            "test_max_attention": largest[TEST].mean(),
        }
        for name, value in expected.items():
            assert getattr(history, name)[i, -1] == pytest.approx(float(value), abs=1e-5), name
        np.testing.assert_allclose(result.attention[i], out.attentions[-1][run.samples, :, 0], atol=1e-5)
    assert (history.kept_fitted != history.flipped_fitted).any()
    assert history.epochs.tolist() == [0, 20]


def test_without_flipped_labels_their_fraction_is_undefined():
    run = some_run()
    (result,) = trained([replace(run, flipped=run.flipped & np.array([[False], [True]]))], Schedule("gd", 0.1, (0, 1)))
    assert np.isnan(result.history.flipped_fitted[0]).all()
    assert np.isfinite(result.history.flipped_fitted[1]).all()
    assert np.isfinite(result.history.kept_fitted).all()


@pytest.mark.parametrize("batch_size", [0, 4])
def test_more_label_noises_or_runs_change_nothing_and_repeats_are_bit_identical(batch_size):
    schedule = Schedule("adamw", 1e-3, (0, 2, 10), batch_size)
    few = trained([some_run(n_sets=1)], schedule)[0]
    many = trained([some_run(3, seed=1, n_train=5), some_run(n_sets=3), some_run(2, seed=2)], schedule)
    same(many[1], few, 1e-5, slice(1))
    again = trained([some_run(n_sets=3)], schedule)[0]
    same(again, many[1], 0)
    assert many[0].attention.shape[:2] == (3, 5)


def test_mini_batches_see_every_sample_once_an_epoch():
    """To first order in the rate an epoch of k equal batches moves as k full steps; a sample left out would show."""
    double = torch.float64
    full, head, run = tiny("bert", double), some_head(double, True), some_run(n_train=9, dtype=double)
    moved = []
    for batch_size in (0, 3):
        schedule = Schedule("gd", 1e-6, (0, 1), batch_size)
        (out,) = ft.finetune(full.last, head, full.hidden, full.mask, [run], schedule, TEST, TEST_LABELS, "cpu")
        moved.append(out.maps.query - run.start.query)
    torch.testing.assert_close(moved[1], 3 * moved[0], rtol=1e-3, atol=1e-3 * moved[0].abs().max().item())


def test_mini_batches_follow_the_seed_of_their_run():
    schedule = Schedule("gd", 0.1, (5,), batch_size=2)
    one, other = (trained([replace(some_run(), order=seed)], schedule)[0] for seed in (1, 2))
    assert not np.array_equal(one.history.train_loss, other.history.train_loss)


def test_a_diverged_model_is_nan_and_does_not_touch_its_neighbour():
    run, schedule = some_run(2), Schedule("gd", 0.1, (0, 3))
    start = run.start.map(lambda part: torch.cat([part, part * torch.inf]))
    (result,) = trained([replace(run, start=start)], schedule)
    alone = trained([some_run(1)], schedule)[0]
    for field in fields(ft.Watched)[1:]:
        assert np.isnan(getattr(result.history, field.name)[1]).all(), field.name
    for name in ("train_loss", "test_accuracy", "max_attention"):
        np.testing.assert_allclose(getattr(result.history, name)[:1], getattr(alone.history, name), atol=1e-5)
    (lost,) = trained([run], Schedule("gd", 1e38, (0, 3)))
    assert np.isfinite(lost.history.train_accuracy[:, 0]).all()
    assert np.isnan(lost.history.train_accuracy[:, 1]).all()


@pytest.mark.parametrize("device", devices.available())
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_every_device_trains_the_same_models(kind, device):
    full, run, schedule = tiny(kind), some_run(), Schedule("adamw", 1e-3, (0, 5), 4)
    (here,) = trained([run], schedule, kind)
    head = some_head(pooler=kind == "bert")
    (there,) = ft.finetune(full.last, head, full.hidden, full.mask, [run], schedule, TEST, TEST_LABELS, device)
    same(there, here, 1e-4)


def test_the_bar_goes_to_stderr_alone(capfd, monkeypatch):
    monkeypatch.setattr(ft, "BAR_DELAY", 0)
    trained([some_run()], Schedule("gd", 0.1, (0, 3)))
    out, err = capfd.readouterr()
    assert out == ""
    assert "fine-tuning" in err
    trained([some_run()], Schedule("gd", 0.1, (0, 3)), progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("n_classes", [2, 3])
def test_the_linear_head_is_the_minimum_of_its_stated_objective(n_classes):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % n_classes
    vectors = torch.randn(60, 5, generator=generator) + labels[:, None] * torch.tensor([1.0, -1, 0, 0.5, 0])
    head = ft.linear_head(vectors, labels.numpy(), n_classes)
    weight, bias = (part.double().requires_grad_() for part in (head.weight, head.bias))
    objective = cross_entropy(vectors.double() @ weight.T + bias, labels) + ft.L2 / 2 * weight.square().sum()
    objective.backward()
    assert weight.abs().max() > 0.5
    assert max(weight.grad.abs().max(), bias.grad.abs().max()) < 1e-5
    torch.testing.assert_close(head(vectors), vectors @ head.weight.T + head.bias)


def test_the_pooled_head_equals_torch_modules_trained_by_the_same_schedule():
    generator = torch.Generator().manual_seed(0)
    vectors, labels = torch.randn(30, DIM, generator=generator), torch.arange(30) % CLASSES
    dense, classifier = nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)
    pooler = (dense.weight.detach().clone(), dense.bias.detach().clone())
    head = ft.pooled_head(vectors, labels.numpy(), CLASSES, pooler, n_epochs=8)
    assert torch.equal(pooler[0], dense.weight)
    with torch.no_grad():
        classifier.weight.zero_(), classifier.bias.zero_()
    network = nn.Sequential(dense, nn.Tanh(), classifier)
    method = torch.optim.AdamW(network.parameters(), lr=ft.POOLED_LEARNING_RATE, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LambdaLR(method, lambda k: 1 - k / 8)
    for _ in range(8):
        method.zero_grad()
        cross_entropy(network(vectors), labels).backward()
        method.step()
        decay.step()
    torch.testing.assert_close(head(vectors), network(vectors), rtol=1e-4, atol=1e-5)
    assert cross_entropy(head(vectors), labels) < 0.995 * np.log(CLASSES)


def test_class_vectors_of_many_samples_are_those_of_the_layer():
    full = tiny("vit")
    tokens = full.last.tokens(full.hidden, None, np.tile(np.arange(SAMPLES), 50))
    maps = some_maps(2)
    whole = full.last.class_vectors(maps, tokens)
    torch.testing.assert_close(ft.class_vectors(full.last, maps, tokens), whole, rtol=1e-5, atol=1e-5)


def test_watched_epochs_are_spaced_by_their_logarithm():
    assert ft.log_spaced(100, 4) == (0, 1, 10, 100)
    assert ft.log_spaced(3, 10) == (0, 1, 2, 3)
    assert ft.log_spaced(0, 5) == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "adam"}, "optimizer must be one of adamw, sgd, gd, got 'adam'"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive"),
        ({"batch_size": -1}, "batch_size must be 0"),
        ({"watched": (3, 1)}, "watched must be increasing"),
        ({"watched": ()}, "watched must be increasing"),
    ],
)
def test_impossible_schedules_are_refused(change, message):
    with pytest.raises(ParameterError, match=message):
        replace(Schedule("gd", 0.1, (0, 1)), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": np.arange(8, 17)}, r"samples must be at least one row in 0\.\.11"),
        ({"samples": np.zeros(9, int)}, "samples of a run must be distinct"),
        ({"given": np.zeros((2, 8), int)}, "given and flipped must be"),
        ({"given": np.full((2, 9), CLASSES)}, r"given must be classes in 0\.\.2"),
        ({"start": some_maps(3)}, "start must hold one set or 2, got 3"),
    ],
)
def test_impossible_runs_are_refused(change, message):
    with pytest.raises(ParameterError, match=message):
        trained([replace(some_run(), **change)], Schedule("gd", 0.1, (0, 1)))


def test_labels_without_one_of_the_classes_are_refused():
    with pytest.raises(ParameterError, match="labels must contain each of the 3 classes"):
        ft.linear_head(torch.zeros(4, DIM), np.array([0, 0, 1, 1]), 3)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"test_labels": np.array([0, 1])}, "test_labels"),
        ({"mask": np.ones((SAMPLES, 1), bool)}, "mask"),
        ({"mask": np.ones((SAMPLES + 1, 5), bool)}, "mask"),
        ({"runs": []}, "runs"),
        ({"runs": [replace(some_run(), given=some_run().given * 1.0)]}, "given"),
        ({"runs": [replace(some_run(), samples=some_run().samples * 1.0)]}, "samples"),
    ],
)
def test_arrays_that_do_not_match_are_refused_by_name(changed, named):
    full = tiny("bert")
    arguments = {"mask": full.mask, "runs": [some_run()], "test_labels": TEST_LABELS, **changed}
    schedule = Schedule("gd", 0.1, (0, 1))
    with pytest.raises(ParameterError, match=f"^{named} must"):
        ft.finetune(
            full.last, some_head(pooler=True), full.hidden, arguments["mask"], arguments["runs"], schedule, TEST,
            arguments["test_labels"], "cpu",
        )  # fmt: skip
