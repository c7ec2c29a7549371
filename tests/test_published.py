import pytest

from benign_attention import published


@pytest.mark.parametrize("source", ["mnist", "cifar10", "pneumoniamnist", "breastmnist", "ag_news", "trec"])
def test_a_published_sweep_goes_from_no_noise_to_a_fifth(source):
    log = published.noise_sweep(source)
    assert len(log.label_noise) == 21 and log.label_noise[0] == 0 and log.label_noise[-1] == 0.2
    assert ((log.test_accuracy > 0.5) & (log.test_accuracy < 1)).all() and (log.train_loss >= 0).all()


def test_what_was_not_published_is_an_error():
    with pytest.raises(KeyError, match="news4"):
        published.noise_sweep("news4")
