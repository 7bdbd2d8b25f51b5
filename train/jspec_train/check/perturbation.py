"""Steps 3 to 6: would the drafter predict better if its input were other than the files say?

A drafter trained with a fault is right where the fault is repeated. So each step repeats the likely
faults on texts that were not trained on, and compares the accuracy of the drafted rows, text by text.

How much better is a fault, measured on tiny drafters (accuracy as the files say it -> with the change):

| drafter                      | other layers | labels +1 | features later | anchor visible | other theta |
|------------------------------|--------------|-----------|----------------|----------------|-------------|
| sound, learned its text      | .98 -> .67   | -> .01    | -> .02         | -> .95         | -> .84      |
| sound, hardly trained        | .24 -> .24   | -> .19    | -> .26         | -> .26         | -> .24      |
| trained on labels +1         | .00 -> .13   | -> .98    | -> .00         | -> .00         | -> .05      |
| trained with the leak        | .89 -> .65   | -> .01    | -> .07         | -> .99         | -> .76      |
| EAGLE-3, sound               | .97 -> .86   | -> < .61  | -> .61         | -> .95         | -> .94      |
| EAGLE-3, labels +1           | .03 -> .08   | -> .96    | -> < .96       | -> .00         | -> .05      |
| EAGLE-3, file says theta 10  | .30 -> .25   | -> < .21  | -> .21         | -> .31         | -> .97      |

Hence a change has to win 0.02, and 0.05 where it shows the drafter a feature more, which may help a sound
one as well; and it has to win half of what the best change wins, since for a drafter that predicts
nothing as it stands any disturbance is an improvement.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.features import layer_outputs
from jspec.objectives.batch import TrainBatch
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope
from jspec_train.check.finding import STEPS, Finding, failed, not_checkable, passed
from jspec_train.check.method import Input
from jspec_train.check.perturbed import LEAST, Change, Pass, Rows, change
from jspec_train.check.texts import Texts

ORDER, ALIGNMENT, LEAK, ROPE = 3, 4, 5, 6
LEAST_TEXTS = 4
_SHOWS_MORE = 0.05  # what may help a sound drafter, too
_NOTHING = 0.05  # accuracy below which there is nothing to compare
_THETAS = (1e4, 1e5, 5e5, 1e6)
_REMEDY = {
    ORDER: "state the layers in that order in config.json, or capture the features again and retrain",
    ALIGNMENT: "training paired other rows: correct the pairing in the training code and retrain",
    LEAK: "training showed a feature that decoding does not have: correct its context mask and retrain",
    ROPE: "state the rope that it was trained with in config.json",
}


def perturbation_steps(
    whole: Pass, texts: Texts, target_rope: Rope, num_target_layers: int, said: Callable[[int], None]
) -> list[Finding]:
    """Findings of steps 3 to 6.

    Args:
      whole: the drafter and the target's tables.
      texts: held-out texts, with those of `nearby_states`.
      target_rope: of the target's full layers.
      num_target_layers: of the target.
      said: called with the number of each step that begins.
    """
    if len(texts.samples) < LEAST_TEXTS:
        reason = f"expected at least {LEAST_TEXTS} samples with an answer, got {len(texts.samples)}"
        return [not_checkable(step, reason) for step in (ORDER, ALIGNMENT, LEAK, ROPE)]
    base = whole.rows(texts.batch, texts.blocks)
    tried: dict[int, list[Change]] = {}
    for step, changes in (
        (ORDER, lambda: _orders(whole, texts, base, num_target_layers)),
        (ALIGNMENT, lambda: _alignments(whole, texts, base)),
        (LEAK, lambda: _leaks(whole, texts, base)),
        (ROPE, lambda: _ropes(whole, texts, base, target_rope)),
    ):
        said(step)
        tried[step] = changes()
    return judge(tried)


def nearby_states(names: Sequence[str], num_target_layers: int) -> tuple[str, ...]:
    """States that could have been captured by mistake, besides those that the config names."""
    last = num_target_layers - 1
    ids = _layer_ids(names)
    if ids is None:
        return layer_outputs(range(max(last - 1, 0), last + 1))
    states = [i + step for i in ids for step in (-1, 1)]
    nearby = layer_outputs(sorted({i for i in states if -1 <= i <= last}))
    return (*nearby, "final_norm") if last in ids else nearby


def _layer_ids(names: Sequence[str]) -> tuple[int, ...] | None:
    """Layers that return these states, -1 the embedding; None if they are what the head reads (EAGLE)."""
    if "final_norm" in names:
        return None
    return tuple(-1 if name == "embedding" else int(name.partition(".")[2]) for name in names)


def judge(tried: Mapping[int, Sequence[Change]]) -> list[Finding]:
    """A finding for each step from the changes that it tried."""
    best = {step: max(changes, key=_merit) for step, changes in tried.items() if changes}
    most = max((one.gain for one in best.values() if one.clear), default=0.0)
    guilty = next((step for step, one in best.items() if one.clear and one.gain == most), None)
    findings = []
    for step, changes in tried.items():
        if not changes:
            findings.append(
                not_checkable(step, "a single captured layer has no neighbour and no other order")
            )
            continue
        one, count = best[step], len(changes)
        figures = {"changes": [tried_one.figures() for tried_one in changes]}
        numbers = f"accuracy {one.accuracy_before:.3f} as stated, {one.accuracy:.3f} with {one.name}"
        if one.clear and one.gain >= most / 2:
            findings.append(failed(step, f"{numbers}; {_REMEDY[step]}", **figures))
        elif one.clear:
            assert guilty is not None
            reason = f"{numbers}, but step {guilty} ({STEPS[guilty - 1]}) hides it; mend that first"
            findings.append(dataclasses.replace(not_checkable(step, reason), figures=figures))
        elif max(one.accuracy, one.accuracy_before) < _NOTHING:
            reason = f"{numbers}: it predicts nothing yet"
            findings.append(dataclasses.replace(not_checkable(step, reason), figures=figures))
        else:
            numbers += "" if count == 1 else f", the best of {count} changes"
            findings.append(passed(step, numbers, **figures))
    return findings


def _merit(one: Change) -> tuple[bool, float]:
    return one.clear, one.gain


def _orders(whole: Pass, texts: Texts, base: Rows, num_target_layers: int) -> list[Change]:
    """The captured layers in another order, each of them off by one, and a norm too many or too few."""
    names = whole.method.names
    ids = _layer_ids(names)
    wanted: list[tuple[str, tuple[str, ...]]] = []
    if ids is None:
        wanted += [
            (f"the output of {name} in place of the final norm", (name,))
            for name in nearby_states(names, num_target_layers)
        ]
    else:
        wanted += [(f"layers {list(order)}", layer_outputs(order)) for order in other_orders(ids)]
        for off in (-1, 1):
            moved = [i + off for i in ids]
            if min(moved) >= -1 and max(moved) < num_target_layers:
                wanted.append((f"layers {moved}", layer_outputs(moved)))
    if ids is not None and num_target_layers - 1 in ids:
        last = f"layer.{num_target_layers - 1}"
        wanted.append(
            (
                "the final norm applied to the last layer",
                tuple("final_norm" if name == last else name for name in names),
            )
        )
    return [
        change(label, base, whole.rows(_with(texts.batch, texts.features(names)), texts.blocks))
        for label, names in wanted
    ]


def other_orders(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """All other orders of up to three layers; of more, two exchanged, turned around, and rotated."""
    ids = tuple(ids)
    if len(ids) <= 3:
        orders = list(itertools.permutations(ids))
    else:
        orders = [ids[::-1], ids[1:] + ids[:1], ids[-1:] + ids[:-1]]
        for a, b in itertools.combinations(range(len(ids)), 2):
            swapped = list(ids)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            orders.append(tuple(swapped))
    return [order for order in dict.fromkeys(orders) if order != ids]


def _alignments(whole: Pass, texts: Texts, base: Rows) -> list[Change]:
    """Features of the tokens beside, labels of the tokens beside, and other tokens beside the features."""
    changes = []
    for off, where in ((1, "later"), (-1, "earlier")):
        labels = whole.rows(texts.batch, texts.blocks, Input(labels=off))
        changes.append(change(f"labels one token {where}", base, labels))
        least = _SHOWS_MORE if off == 1 else LEAST
        if whole.method.reads_tokens:
            tokens = whole.rows(texts.batch, texts.blocks, Input(tokens=off))
            changes.append(change(f"tokens one {where} beside the features", base, tokens, least=least))
        features = _with(texts.batch, shifted(texts.batch.features, off))
        rows = whole.rows(features, texts.blocks)
        changes.append(change(f"features of one token {where}", base, rows, least=least))
    return changes


def shifted(features: jax.Array | np.ndarray, off: int) -> jnp.ndarray:
    """Row t holds what belongs to token t + off; zeros where there is none."""
    rolled = np.roll(np.asarray(features), -off, axis=1)
    if off > 0:
        rolled[:, -off:] = 0
    else:
        rolled[:, :-off] = 0
    return jnp.asarray(rolled)


def _leaks(whole: Pass, texts: Texts, base: Rows) -> list[Change]:
    """The anchor's own feature in sight: on the first draft token, which it nearly spells out, and on all."""
    seen = whole.rows(texts.batch, texts.blocks, Input(ahead=1))
    name = "the anchor's feature visible"
    return [
        change(f"{name} (draft token 1)", base, seen, least=_SHOWS_MORE, position=1),
        change(f"{name} (all)", base, seen, least=_SHOWS_MORE),
    ]


def _ropes(whole: Pass, texts: Texts, base: Rows, target_rope: Rope) -> list[Change]:
    return [
        change(_rope_name(rope), base, whole.rows(texts.batch, texts.blocks, Input(rope=rope)))
        for rope in other_ropes(whole.method.decoder, target_rope)
    ]


def other_ropes(decoder: DecoderConfig, target_rope: Rope) -> list[Rope]:
    """What all layers could turn by instead: the target's whole rule, and their own with other bases."""
    stated = {decoder.rope(kind) for kind in decoder.windows}
    ropes = [target_rope]
    for kind in decoder.windows:
        own = decoder.rope(kind)
        ropes += [dataclasses.replace(own, theta=theta) for theta in (*_THETAS, target_rope.theta)]
        ropes.append(dataclasses.replace(own, scaling=None))
    return [rope for rope in dict.fromkeys(ropes) if stated != {rope}]


def _rope_name(rope: Rope) -> str:
    scaling = "" if rope.scaling is None else f" and {type(rope.scaling).__name__.lower()} scaling"
    return f"theta {rope.theta:g}{scaling}"


def _with(batch: TrainBatch, features: jnp.ndarray) -> TrainBatch:
    return dataclasses.replace(batch, features=features)
