"""What fine-tuning the last query and key costs: beside two loops through the whole backbone, and at reader scale."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from benign_attention.realdata import finetune as ft
from benign_attention.realdata import last_layer

DIM, HEADS, WIDTH, LAYERS, TOKENS, CLASSES = 384, 12, 1536, 6, 64, 4
N_TRAIN, N_EPOCHS, RATE = 200, 100, 5e-4


def seconds(work: Callable[[], object]) -> float:
    """Wall time of `work`."""
    start = perf_counter()
    work()
    return perf_counter() - start


class Sentences:
    """A random BERT of MiniLM's size on random words, the states below its last layer, and a run of one label noise."""

    def __init__(self, n_samples: int):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=1000,
            hidden_size=DIM,
            num_attention_heads=HEADS,
            num_hidden_layers=LAYERS,
            intermediate_size=WIDTH,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = BertForSequenceClassification(config).eval().requires_grad_(False)
        bert = self.model.bert
        attention = bert.encoder.layer[-1].attention.self
        self.parameters = [attention.query.weight, attention.query.bias, attention.key.weight, attention.key.bias]
        self.layer = last_layer.from_bert(bert.encoder.layer[-1])
        self.head = ft.Head(
            self.model.classifier.weight.detach(),
            self.model.classifier.bias.detach(),
            (bert.pooler.dense.weight.detach(), bert.pooler.dense.bias.detach()),
        )
        rng = np.random.default_rng(0)
        self.words = torch.tensor(rng.integers(0, 1000, (n_samples, TOKENS)))
        self.mask = torch.tensor(np.arange(TOKENS) < rng.integers(TOKENS // 2, TOKENS + 1, (n_samples, 1)))
        given = rng.integers(0, CLASSES, (1, n_samples))
        start = last_layer.draw(DIM, [rng])
        self.run = ft.Run(np.arange(n_samples), given, np.zeros_like(given, bool), start, 0)
        self.labels = torch.tensor(given[0])

    @torch.no_grad()
    def hidden(self) -> np.ndarray:
        chunks = zip(self.words.split(50), self.mask.split(50), strict=True)
        states = [self.model.bert(w, m, output_hidden_states=True).hidden_states[-2] for w, m in chunks]
        return torch.cat(states).numpy()

    def restart(self) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, vars(self.run.start).values(), strict=True):
                parameter.copy_(value[0])
                parameter.requires_grad_()

    def own_loop(self, n_epochs: int) -> float:
        """Full-batch gradient descent through every layer, fifty samples at a time; the loss at the end of training."""
        self.restart()
        method = torch.optim.SGD(self.parameters, lr=RATE)
        for _ in range(n_epochs):
            method.zero_grad()
            for rows in torch.arange(len(self.labels)).split(50):
                logits = self.model(self.words[rows], self.mask[rows]).logits
                (cross_entropy(logits, self.labels[rows], reduction="sum") / len(self.labels)).backward()
            method.step()
        with torch.no_grad():
            return cross_entropy(self.model(self.words, self.mask).logits, self.labels).item()

    def trainer(self, n_epochs: int, batch_size: int, folder: str) -> Trainer:
        self.restart()
        data = [
            {"input_ids": words, "attention_mask": mask.long(), "labels": label}
            for words, mask, label in zip(self.words, self.mask, self.labels, strict=True)
        ]
        arguments = TrainingArguments(
            folder,
            num_train_epochs=n_epochs,
            per_device_train_batch_size=batch_size,
            learning_rate=RATE,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(self.model, arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        return trainer


def beside_the_whole_backbone(folder: str, rounds: int = 2) -> None:
    """In turn: one epoch of each loop, scaled to all epochs, and all epochs of ours; the ratio of each round."""
    sentences = Sentences(N_TRAIN)
    hidden, mask = sentences.hidden(), sentences.mask.numpy()
    nobody = np.arange(1), np.zeros(1, int)

    def ours(optimizer: str, batch_size: int, n_epochs: int = N_EPOCHS) -> ft.Trained:
        schedule = ft.Schedule(optimizer, RATE, (n_epochs,), batch_size)
        return ft.finetune(
            sentences.layer, sentences.head, hidden, mask, [sentences.run], schedule, *nobody, "cpu", progress=False
        )[0]

    print(f"phase 2, n = {N_TRAIN}, {N_EPOCHS} epochs, one model, d = {DIM}, T = {TOKENS}, one thread: seconds")
    print(f"  states below the last layer, once: {seconds(sentences.hidden):.1f} (in none of the numbers below)")
    both = ours("gd", 0, 1).history.train_loss[0, -1], sentences.own_loop(1)
    print(f"  loss after one epoch: ours {both[0]:.6f}, own loop through the unmodified model {both[1]:.6f}")
    for name, theirs, mine in (
        ("full batch, own loop", lambda: sentences.own_loop(1), lambda: ours("gd", 0)),
        (
            "batches of 16, transformers.Trainer",
            lambda: sentences.trainer(1, 16, folder).train(),
            lambda: ours("adamw", 16),
        ),
    ):
        times = [(N_EPOCHS * seconds(theirs), seconds(mine)) for _ in range(rounds)]
        ratios = sorted(a / b for a, b in times)
        print(f"  {name}")
        print(f"    theirs {median(a for a, _ in times):.0f} (extrapolated: {N_EPOCHS} times one epoch)")
        print(f"    ours   {median(b for _, b in times):.2f} (target: at most 15)")
        print(f"    ratio  {median(ratios):.0f} ({ratios[0]:.0f} to {ratios[-1]:.0f} by round; target: 30)")


def products_per_second() -> float:
    """Multiplications and additions a second of one thread in the MLP's product, on a block of samples."""
    states, weights = torch.randn(384, DIM), torch.randn(WIDTH, DIM)
    best = min(seconds(lambda: [states @ weights.T for _ in range(20)]) for _ in range(5))
    return 2 * 20 * 384 * DIM * WIDTH / best


def at_reader_scale(n_runs: int = 3, n_noises: int = 3) -> None:
    """Seconds an epoch, full batch and mini batches, beside the products of matrices that an epoch is made of.

    A sample and model takes, forward, d^2 multiplications each for the query, W_K^T q, W_O and the pooler, T H d for
    the logits, T d for the averages and 2 d WIDTH for the MLP; backward the same and d^2 more.
    """
    forward = 4 * DIM**2 + TOKENS * HEADS * DIM + TOKENS * DIM + 2 * DIM * WIDTH
    operations = 2 * (2 * forward + DIM**2)
    torch.set_num_threads(1)
    rate = products_per_second()
    torch.set_num_threads(2)
    sentences = Sentences(1)
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((1000, TOKENS, DIM), dtype=np.float32)
    mask = np.arange(TOKENS) < rng.integers(TOKENS // 2, TOKENS + 1, (1000, 1))
    print(f"\n{n_runs} runs of {n_noises} label noises, two threads: seconds an epoch")
    print(f"  floor: {operations / 1e6:.1f} million operations a sample and model at {rate / 1e9:.0f} G/s a thread")
    total = 0.0
    for n_train, n_epochs in ((20, 60), (200, 12), (1000, 3)):
        given = rng.integers(0, CLASSES, (n_noises, n_train))
        runs = [
            ft.Run(rng.permutation(1000)[:n_train], given, given == 0, last_layer.draw(DIM, [rng]), 0)
            for _ in range(n_runs)
        ]

        def train(n_epochs: int, batch_size: int = 0, runs: list[ft.Run] = runs) -> list[ft.Trained]:
            schedule = ft.Schedule("adamw", RATE, (n_epochs,), batch_size)
            nobody = np.arange(1), np.zeros(1, int)
            layer, head = sentences.layer, sentences.head
            return ft.finetune(layer, head, hidden, mask, runs, schedule, *nobody, "cpu", progress=False)

        train(1)
        by_batch = {}
        for batch_size in (0, 16):
            epochs = n_epochs if batch_size == 0 else max(1, n_epochs // 2)
            times = [
                (seconds(lambda b=batch_size, k=epochs: train(k, b)) - seconds(lambda b=batch_size: train(0, b)))
                / epochs
                for _ in range(2)
            ]
            by_batch[batch_size] = min(times)
        floor = n_runs * n_noises * n_train * operations / rate / 2
        total += by_batch[0]
        print(
            f"  n = {n_train:<5} full batch {by_batch[0]:.4f}, batches of 16 {by_batch[16]:.4f}, floor {floor:.4f} "
            f"(full batch / floor {by_batch[0] / floor:.2f})"
        )
    print(f"  all three, full batch: {total:.3f}, that is {55 / total:.0f} epochs in 55 seconds")


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.utils.data")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        beside_the_whole_backbone(folder)
    torch.set_num_threads(threads)
    at_reader_scale()
