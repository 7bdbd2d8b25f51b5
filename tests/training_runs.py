"""What tests of whole training runs share: words as data, and a watcher that remembers."""

import signal

import jax
import numpy as np

from jspec.text.tokenizer import load_tokenizer
from jspec_train.sample import Sample
from jspec_train.sample_header import Header
from jspec_train.samples import SampleWriter

MASK = 60


def write_data(folder, target, count, seed, *, longest=24):
    rng = np.random.default_rng(seed)
    tokenizer = load_tokenizer(target).identity
    with SampleWriter(
        folder, Header(kind="samples", tokenizer=tokenizer, template="", max_length=64)
    ) as writer:
        for number in range(count):
            ids = rng.integers(3, MASK, rng.integers(12, longest + 1)).astype(np.int32)
            mask = np.arange(len(ids)) >= 4
            writer.write(
                Sample(id=f"s{number}", ids=ids, loss_mask=mask, task="odd" if number % 2 else "even")
            )
        return writer.finish()


class Figures:
    """Remembers what it is told; `stop_at` presses Ctrl-C at an update."""

    def __init__(self, stop_at=None):
        self.losses, self.evaluations, self.stop_at = {}, {}, stop_at

    def on_update(self, step, values):
        self.losses[step] = values["loss"]
        if step == self.stop_at:
            signal.raise_signal(signal.SIGINT)

    def on_evaluation(self, step, values):
        self.evaluations[step] = values


def leaves_of(outcome):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(outcome.state)]
