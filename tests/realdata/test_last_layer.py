"""The folded last layer against unmodified models of `transformers` that carry the same query and key."""

import numpy as np
import pytest
import torch
from tiny_transformers import CLASSES, DIM, HEADS, SAMPLES, some_maps, tiny
from torch.nn.functional import cross_entropy

from benign_attention import devices
from benign_attention.parameters import ParameterError
from benign_attention.realdata import last_layer

ALL = np.arange(SAMPLES)
KINDS = pytest.mark.parametrize("kind", ["bert", "vit"])


@KINDS
def test_class_vectors_and_attention_equal_the_unmodified_model_for_every_set(kind):
    full, maps = tiny(kind), some_maps(3)
    tokens = full.last.tokens(full.hidden, full.mask, ALL)
    vectors, attention = full.last.outputs(maps, tokens)
    assert vectors.shape == (3, SAMPLES, DIM)
    assert attention.shape == (3, SAMPLES, HEADS, full.hidden.shape[1])
    for i in range(3):
        full.put(maps, i)
        with torch.no_grad():
            theirs = full.forward(output_attentions=True)
        torch.testing.assert_close(vectors[i], theirs.last_hidden_state[:, 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(attention[i], theirs.attentions[-1][:, :, 0], rtol=1e-5, atol=1e-6)
    assert attention.max(-1).values.mean() > 2 / full.hidden.shape[1]


@KINDS
def test_the_pretrained_set_gives_the_model_as_it_was_loaded(kind):
    full = tiny(kind)
    with torch.no_grad():
        theirs = full.forward().last_hidden_state[:, 0]
    ours = full.last.class_vectors(full.last.pretrained, full.last.tokens(full.hidden, full.mask, ALL))
    torch.testing.assert_close(ours[0], theirs, rtol=1e-5, atol=1e-5)


def test_padding_gets_no_attention_and_its_content_does_not_matter():
    full, maps = tiny("bert"), some_maps(1)
    assert not full.mask.all()
    changed = np.where(full.mask[..., None], full.hidden, np.float32(7))
    tokens = [full.last.tokens(hidden, full.mask, ALL) for hidden in (full.hidden, changed)]
    attention = full.last.attention(maps, tokens[0])[0]
    assert (attention.transpose(0, 1)[:, ~torch.tensor(full.mask)] == 0).all()
    torch.testing.assert_close(attention.sum(-1), torch.ones(SAMPLES, HEADS))
    torch.testing.assert_close(*(full.last.class_vectors(maps, t) for t in tokens), rtol=0, atol=0)


@KINDS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gradients_equal_autograd_through_the_unmodified_model_and_the_key_bias_has_none(kind, dtype, tolerance):
    full, maps = tiny(kind, dtype), some_maps(2, dtype)
    readout = torch.randn(CLASSES, DIM, dtype=dtype, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(SAMPLES) % CLASSES
    leaves = [part.requires_grad_() for part in maps.trained()]
    vectors = full.last.class_vectors(maps, full.last.tokens(full.hidden, full.mask, ALL))
    ours = torch.autograd.grad(sum(cross_entropy(v @ readout.T, labels) for v in vectors), leaves)
    for i in range(2):
        parameters = full.put(maps, i)
        loss = cross_entropy(full.forward().last_hidden_state[:, 0] @ readout.T, labels)
        query, query_bias, key, key_bias = torch.autograd.grad(loss, parameters)
        for mine, theirs in zip(ours, (query, query_bias, key), strict=True):
            assert torch.linalg.norm(mine[i] - theirs) <= tolerance * torch.linalg.norm(theirs)
        assert torch.linalg.norm(key_bias) <= tolerance * torch.linalg.norm(query_bias)


def test_rows_of_a_memory_map_are_taken_in_the_order_asked_for(tmp_path):
    full, maps = tiny("bert"), some_maps(1)
    np.save(tmp_path / "hidden.npy", full.hidden)
    mapped = np.load(tmp_path / "hidden.npy", mmap_mode="r")
    rows = np.array([7, 2, 2, 11])
    whole = full.last.class_vectors(maps, full.last.tokens(full.hidden, full.mask, ALL))
    torch.testing.assert_close(full.last.class_vectors(maps, full.last.tokens(mapped, full.mask, rows)), whole[:, rows])


@pytest.mark.parametrize("device", devices.available())
def test_every_device_gives_the_same_class_vectors(device):
    full, maps = tiny("vit"), some_maps(2)
    place = devices.resolve(device)
    there = full.last.to(place)
    theirs = there.class_vectors(maps.map(lambda part: part.to(place)), there.tokens(full.hidden, None, ALL))
    ours = full.last.class_vectors(maps, full.last.tokens(full.hidden, None, ALL))
    assert theirs.device.type == place.type
    torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-5, atol=1e-5)


def test_sets_are_drawn_like_a_fresh_linear_layer_and_do_not_depend_on_each_other():
    def rngs(n):
        return [np.random.default_rng(seed) for seed in range(n)]

    dim = 100
    three, two = last_layer.draw(dim, rngs(3)), last_layer.draw(dim, rngs(2))
    fresh = torch.nn.Linear(dim, dim)
    for name, like in (("query", fresh.weight), ("query_bias", fresh.bias), ("key", fresh.weight)):
        part = getattr(three, name)
        assert part.shape == (3, *like.shape)
        assert part.dtype == torch.float32
        assert torch.equal(part[:2], getattr(two, name))
        assert part.abs().max() <= dim**-0.5
    for part in (three.query, three.key):  # 30000 numbers: 7 standard errors of mean and second moment
        assert abs(part.mean()) < 7 * (3e4 * 3 * dim) ** -0.5
        assert abs(part.square().mean() * 3 * dim - 1) < 7 * 0.9 / 3e4**0.5
    assert torch.linalg.norm(three.query - three.key) > 0.5 * torch.linalg.norm(three.query)


def test_hidden_states_that_the_layer_cannot_read_are_refused():
    full = tiny("bert")
    with pytest.raises(ParameterError, match=r"mask .* position 0"):
        full.last.tokens(full.hidden, np.zeros_like(full.mask), ALL)
    for hidden in (full.hidden[..., :-1], full.hidden[0]):
        with pytest.raises(ParameterError, match=rf"hidden must be \(samples, tokens, {DIM}\)"):
            full.last.tokens(hidden, full.mask, ALL)
    with pytest.raises(ParameterError, match="mask must be "):
        full.last.tokens(full.hidden, full.mask[:, :-1], ALL)
    for rows in ([-1], [SAMPLES]):
        with pytest.raises(ParameterError, match=rf"samples must be rows in 0\.\.{SAMPLES - 1}"):
            full.last.tokens(full.hidden, full.mask, np.array(rows))
