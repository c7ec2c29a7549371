import itertools

import numpy as np
import pytest
import torch
from torch import nn

from benign_attention import devices, encoder
from benign_attention.data import TokenSelectionParams, draw_token_selection
from benign_attention.encoder import Architecture, EncoderJob
from benign_attention.parameters import ParameterError
from benign_attention.selection import ROLES

POINT = TokenSelectionParams(n_train=10, dim=24, n_tokens=5, signal_norm=4.0, weak_ratio=0.2, label_noise=0.2)
SWITCHES = [
    Architecture(layer_norm=norm, mlp=mlp, skip=skip, mlp_dim=17)
    for norm, mlp, skip in itertools.product([True, False], repeat=3)
]
NAMES = {  # ours: the plain network's
    "class_token": "class_token",
    "query": "query.weight",
    "key": "key.weight",
    "value": "value.weight",
    "readout": "head.weight",
    "readout_bias": "head.bias",
    "mlp_in": "inner.weight",
    "mlp_in_bias": "inner.bias",
    "mlp_out": "outer.weight",
    "mlp_out_bias": "outer.bias",
    **{f"{norm}_{ours}": f"{norm}_norm.{theirs}" for norm in ("attention", "mlp", "readout")
       for ours, theirs in (("gain", "weight"), ("shift", "bias"))},
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """A second thread costs more than it gives on matrices of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class PlainEncoder(nn.Module):
    """Every token is normalised, asks, answers and is mapped; only then is the class token looked at."""

    def __init__(self, architecture: Architecture, dim: int):
        super().__init__()
        self.architecture = architecture
        self.class_token = nn.Parameter(torch.randn(dim))
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.head = nn.Linear(dim, 1)
        norms = ["attention", "readout"]
        if architecture.mlp:
            self.inner, self.outer = nn.Linear(dim, architecture.mlp_dim), nn.Linear(architecture.mlp_dim, dim)
            norms.append("mlp")
        for name in norms:
            setattr(self, f"{name}_norm", nn.LayerNorm(dim) if architecture.layer_norm else nn.Identity())

    def forward(self, tokens):
        x = torch.cat([self.class_token.expand(len(tokens), 1, -1), tokens], dim=1)
        normal = self.attention_norm(x)
        scores = self.query(normal) @ self.key(normal).transpose(1, 2) / x.shape[-1] ** 0.5
        attention = scores.softmax(dim=-1)
        attended = attention @ self.value(normal)
        x = x + attended if self.architecture.skip else attended
        if self.architecture.mlp:
            mapped = self.outer(nn.functional.gelu(self.inner(self.mlp_norm(x))))
            x = x + mapped if self.architecture.skip else mapped
        return self.head(self.readout_norm(x))[:, 0, 0], attention[:, 0]


def pair(architecture, seed=0, spread=0.2, dim=POINT.dim):
    """Our weights and the plain network with the same ones, float64, every gain and bias moved from where it starts."""
    rng = np.random.default_rng(seed)
    arrays = encoder.initial_weights(architecture, dim, rng)
    weights = {k: torch.tensor(a + spread * rng.normal(size=a.shape), requires_grad=True) for k, a in arrays.items()}
    return weights, plain(architecture, weights, dim)


def plain(architecture, weights, dim=POINT.dim):
    network = PlainEncoder(architecture, dim).double()
    shapes = {name: p.shape for name, p in network.named_parameters()}
    state = {NAMES[k]: w.detach().double().reshape(shapes[NAMES[k]]) for k, w in weights.items()}
    network.load_state_dict(state)
    return network


def samples(architecture, seed=1):
    data = draw_token_selection(POINT, np.random.default_rng(seed))
    tokens = torch.tensor(data.tokens)
    return tokens, encoder.normalised(architecture, tokens), torch.tensor(data.labels)


def logistic(f, y):
    return torch.log1p(torch.exp(-y * f)).mean()


@pytest.mark.parametrize("architecture", SWITCHES, ids=str)
def test_outputs_attention_and_all_gradients_are_those_of_full_attention(architecture):
    weights, network = pair(architecture)
    tokens, prepared, labels = samples(architecture)
    theirs, attention = network(tokens)
    ours = encoder.outputs(architecture, weights, prepared)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        encoder.class_attention(architecture, weights, prepared), attention, rtol=1e-12, atol=1e-14
    )
    of_ours = torch.autograd.grad(logistic(ours, labels), list(weights.values()))
    of_theirs = torch.autograd.grad(logistic(theirs, labels), list(network.parameters()))
    of_theirs = dict(zip([name for name, _ in network.named_parameters()], of_theirs, strict=True))
    assert {NAMES[name] for name in weights} == set(of_theirs)
    for name, gradient in zip(weights, of_ours, strict=True):
        expected = of_theirs[NAMES[name]].reshape(gradient.shape)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize("architecture", SWITCHES, ids=str)
def test_gradient_steps_are_those_of_torchs_sgd_on_all_weights(architecture):
    weights, network = pair(architecture)
    tokens, prepared, labels = samples(architecture)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        logistic(network(tokens)[0], labels).backward()
        optimizer.step()
        encoder.gradient_step(architecture, weights, prepared, labels, 0.05)
    for name, parameter in network.named_parameters():
        (ours,) = (weights[k] for k in weights if NAMES[k] == name)
        torch.testing.assert_close(ours.reshape(parameter.shape), parameter, rtol=1e-9, atol=1e-12, msg=name)


def test_initial_weights_follow_torchs_defaults():
    """Support of the uniform laws; second moments within 5 standard errors (false alarm 1e-5)."""
    architecture = Architecture(mlp_dim=150)
    ours = encoder.initial_weights(architecture, 100, np.random.default_rng(0))
    theirs = dict(PlainEncoder(architecture, 100).named_parameters())
    assert all(array.dtype == np.float32 for array in ours.values())
    for name, array in ours.items():
        reference = theirs[NAMES[name]].detach().numpy()
        assert array.size == reference.size
        if name.endswith(("gain", "shift")):
            np.testing.assert_array_equal(array, reference)
        elif name == "class_token":
            assert abs(array.var() - 1) < 5 * np.sqrt(2 / array.size)
        else:
            inputs = 150 if name in ("mlp_out", "mlp_out_bias") else 100
            assert np.abs(array).max() <= inputs**-0.5 and np.abs(reference).max() <= inputs**-0.5
            assert abs(inputs * (array**2).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / array.size)
            assert abs(array.mean()) < 5 / np.sqrt(3 * inputs * array.size)


def test_architectures_share_the_weights_of_the_parts_they_share():
    full = encoder.initial_weights(Architecture(mlp_dim=9), 12, np.random.default_rng(5))
    for architecture in SWITCHES:
        fewer = encoder.initial_weights(architecture.replace(mlp_dim=9), 12, np.random.default_rng(5))
        assert ("mlp_in" in fewer) == architecture.mlp and ("readout_gain" in fewer) == architecture.layer_norm
        for name, array in fewer.items():
            np.testing.assert_array_equal(array, full[name])


def job(architecture=Architecture(mlp_dim=17), **changes) -> EncoderJob:  # noqa: B008
    given = {"params": POINT, "step_size": 0.05, "steps": (0, 5, 20), "rng": np.random.default_rng(8), "n_test": 60}
    return EncoderJob(architecture=architecture, **{**given, **changes})


def replayed(one: EncoderJob):
    """Training data, fresh data and the plain network at the start of a job, drawn as its docstring says."""
    first, second, third = np.random.default_rng(8).spawn(3)
    data = draw_token_selection(one.params, first)
    fresh = draw_token_selection(one.params.replace(n_train=one.n_test, label_noise=0.0), second)
    arrays = encoder.initial_weights(one.architecture, one.params.dim, third)
    return data, fresh, plain(one.architecture, {k: torch.tensor(a) for k, a in arrays.items()})


@pytest.mark.parametrize("architecture", SWITCHES, ids=str)
def test_a_run_reports_what_the_plain_network_does_when_trained_alike(architecture):
    """In float32 against float64."""
    one = job(architecture)
    run = encoder.train(one)
    data, fresh, network = replayed(one)
    tokens, labels = torch.tensor(data.tokens), torch.tensor(data.labels)
    flipped = data.labels != data.clean_labels
    assert flipped.sum() == 2
    optimizer = torch.optim.SGD(network.parameters(), lr=one.step_size)
    done = 0
    for place, step in enumerate(one.steps):
        for _ in range(done, step):
            optimizer.zero_grad()
            logistic(network(tokens)[0], labels).backward()
            optimizer.step()
        done = step
        with torch.no_grad():
            (f, attention), (f_fresh, attention_fresh) = network(tokens), network(torch.tensor(fresh.tokens))
        fitted = (f * labels > 0).numpy()
        right = (f_fresh.numpy() * fresh.labels) > 0
        at = {name: getattr(run, name)[place] for name in encoder.EncoderRun.__dataclass_fields__}
        assert at["steps"] == step and at["train_accuracy"] == fitted.mean()
        assert at["clean_accuracy"] == fitted[~flipped].mean() and at["noisy_accuracy"] == fitted[flipped].mean()
        assert at["test_accuracy"] == right.mean()
        assert at["train_loss"] == pytest.approx(logistic(f, labels).item(), abs=1e-4)
        assert at["test_loss"] == pytest.approx(logistic(f_fresh, torch.tensor(fresh.labels)).item(), abs=1e-4)
        for kind, weights in (
            ("clean", attention[~flipped]),
            ("noisy", attention[flipped]),
            ("test", attention_fresh),
        ):
            own, *roles = weights.numpy().T
            expected = [(role / (1 - own)).mean() for role in (*roles[:3], roles[3] + roles[4])]
            np.testing.assert_allclose(at[f"{kind}_attention"], expected, atol=2e-5)
            assert at[f"{kind}_self"] == pytest.approx(own.mean(), abs=2e-5)
            assert len(expected) == len(ROLES)


def test_query_and_key_stay_where_they_were_if_they_are_not_trained():
    architecture = SWITCHES[0].replace(train_query_key=False)
    weights, network = pair(architecture)
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    tokens, prepared, labels = samples(architecture)
    trained = [p for name, p in network.named_parameters() if name not in ("query.weight", "key.weight")]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        logistic(network(tokens)[0], labels).backward()
        optimizer.step()
        encoder.gradient_step(architecture, weights, prepared, labels, 0.05)
    assert {name for name in weights if torch.equal(weights[name], start[name])} == {"query", "key"}
    with torch.no_grad():
        ours, (theirs, _) = encoder.outputs(architecture, weights, prepared), network(tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_job_can_be_run_again_and_what_is_looked_at_changes_nothing():
    one = job()
    first, again, sparse = encoder.train(one), encoder.train(one), encoder.train(job(steps=(20,)))
    other_test = encoder.train(job(n_test=40))
    for name in encoder.EncoderRun.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        np.testing.assert_array_equal(getattr(first, name)[-1:], getattr(sparse, name))
    np.testing.assert_array_equal(first.train_loss, other_test.train_loss)


def test_jobs_side_by_side_give_what_they_give_alone():
    jobs = [job(step_size=step) for step in (0.05, 0.1)]
    for one, run in zip(jobs, encoder.train_all(jobs), strict=True):
        alone = encoder.train(one)
        for name in encoder.EncoderRun.__dataclass_fields__:
            np.testing.assert_allclose(getattr(run, name), getattr(alone, name), rtol=1e-4, atol=1e-5)


def test_without_flipped_labels_their_numbers_are_undefined():
    run = encoder.train(job(params=POINT.replace(label_noise=0.0), steps=(0, 1)))
    assert np.isnan(run.noisy_accuracy).all() and np.isnan(run.noisy_attention).all()
    assert run.noisy_attention.shape == (2, 4)
    np.testing.assert_array_equal(run.train_accuracy, run.clean_accuracy)


@pytest.mark.parametrize("name", devices.available())
def test_every_device_gives_the_same_run(name):
    here, there = encoder.train(job(device="cpu")), encoder.train(job(device=name))
    for field in ("train_loss", "test_loss", "clean_attention", "test_attention", "noisy_self"):
        np.testing.assert_allclose(getattr(there, field), getattr(here, field), rtol=1e-3, atol=1e-4)


def test_it_learns_where_the_signal_is_strong_and_only_remembers_where_it_is_weak():
    """n SNR^2 = 200 and 0.1 at d = 100. At chance 2000 fresh samples pass .5 + .07 with probability 1e-9."""
    strong, weak = (
        encoder.train(
            EncoderJob(
                TokenSelectionParams(dim=100, signal_norm=norm),
                Architecture(mlp_dim=100),
                step,
                (300,),
                np.random.default_rng(0),
            )
        )
        for norm, step in ((1000**0.5, 0.05), (0.5**0.5, 0.1))
    )
    assert strong.train_accuracy == weak.train_accuracy == 1
    assert strong.test_accuracy > 0.8 and abs(weak.test_accuracy - 0.5) < 0.07


def test_rescaling_keeps_signal_to_noise_and_the_step_in_natural_units():
    params, step = encoder.rescaled(TokenSelectionParams(dim=2000, signal_norm=20.0), 5e-3, 125)
    assert params.dim == 125 and params.signal_norm**2 / 125 == pytest.approx(20.0**2 / 2000)
    assert step * 125 == pytest.approx(5e-3 * 2000)


def test_variants_leave_out_one_part_at_a_time():
    full, *others = encoder.variants(64).values()
    assert (full.layer_norm, full.mlp, full.skip, full.mlp_dim) == (True, True, True, 64)
    changed = [{k for k, v in other.model_dump().items() if v != full.model_dump()[k]} for other in others]
    assert changed == [{"skip"}, {"mlp"}, {"layer_norm"}, {"train_query_key"}]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"step_size": 0.0}, r"step_size must be a number greater than 0, got 0.0"),
        ({"step_size": float("nan")}, r"step_size must be a number greater than 0, got nan"),
        ({"steps": ()}, r"steps must be increasing whole numbers of at least 0, got \(\)"),
        ({"steps": (5, 5)}, r"steps must be increasing whole numbers of at least 0, got \(5, 5\)"),
        ({"steps": (-1, 5)}, r"steps must be increasing whole numbers of at least 0, got \(-1, 5\)"),
        ({"steps": (0, 2.5)}, r"steps must be increasing whole numbers of at least 0, got \(0, 2.5\)"),
        ({"n_test": 1}, r"n_test must be a whole number of at least 2, got 1"),
        ({"device": "tpu"}, r"device must be one of auto, cpu, cuda, mps, got 'tpu'"),
        ({"params": POINT.replace(dim=10**6)}, r"dim must be at most 20000 for an encoder, got 1000000"),
        ({"architecture": Architecture(mlp_dim=10**6)}, r"mlp_dim must be at most 20000 for an encoder, got 1000000"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_bad_input_is_one_line_that_names_the_parameter(changes, line):
    with pytest.raises(ParameterError, match=f"^{line}$"):
        job(**changes)


def test_a_switch_that_is_not_a_truth_value_is_refused():
    with pytest.raises(ParameterError, match=r"^skip must be true or false, got 'no'$"):
        Architecture(skip="no")


def test_a_step_that_makes_the_loss_infinite_is_an_error_that_says_so():
    with pytest.raises(
        encoder.DivergenceError, match=r"^the encoder's loss is nan after 5 steps of size 1e\+06 at dim \d+ \("
    ):
        encoder.train(job(Architecture(layer_norm=False, mlp_dim=17), step_size=1e6))
