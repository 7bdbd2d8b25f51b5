"""Steps 7 and 9: the training code and the decoding code compute and accept the same."""

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash_net import DFlashConfig
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.block_pass import training_hidden
from jspec.objectives.blocks import Blocks, block_targets
from jspec.objectives.dflash import DFlashObjective
from jspec.objectives.frozen import Tables
from jspec_train.check.finding import Finding, failed, passed
from jspec_train.check.paged import Drafted
from jspec_train.check.perturbed import embedding_of
from jspec_train.check.texts import Texts

CODE, DRAFTED = 7, 9
_TOLERANCE = 1e-4  # of float32 hidden states, relative to the greatest one where that is above 1
_SAME = 0.05  # tokens of accept length: ties and rounding


def code_step(config: DFlashConfig, params: Params, tables: Tables, texts: Texts, paged: Drafted) -> Finding:
    """Hidden states of every block: dense attention over known text against pages."""
    dense = np.asarray(_dense_hidden(config, params, tables, texts.batch, texts.blocks))
    keep = np.asarray(texts.blocks.keep)
    a, b = dense[keep], paged.hidden[keep]
    difference, size = float(np.abs(a - b).max()), float(np.abs(a).max())
    allowed = _TOLERANCE * max(1.0, size)
    said = f"hidden states differ by {difference:.1e} at {int(keep.sum())} anchors, expected at most {allowed:.0e}"
    if difference <= allowed:  # not if it is NaN
        return passed(CODE, said, difference=difference)
    row = int(np.abs(a - b).max(axis=(0, 2)).argmax())
    said += f"; row {row} of the block most: masks, positions or rope of the two differ"
    return failed(CODE, said, difference=difference)


@functools.partial(jax.jit, static_argnums=0)
def _dense_hidden(
    config: DFlashConfig, params: Params, tables: Tables, batch: TrainBatch, blocks: Blocks
) -> Float[Array, "texts anchors block hidden"]:
    net = dflash_net(config, params)
    embed = embedding_of(net, tables)

    def one(text: tuple[TrainBatch, Blocks]) -> Array:
        batch, blocks = jax.tree.map(lambda a: a[None], text)
        targets = block_targets(batch, blocks, block_size=config.block_size)
        return training_hidden(net, embed, batch, blocks, targets)[0]

    return jax.lax.map(one, (batch, blocks))


def accepted(texts: Texts, paged: Drafted, block_size: int) -> np.ndarray:
    """Accept length [texts, anchors] of what decoding drafts, against the text as far as it is an answer."""
    targets = block_targets(texts.batch, texts.blocks, block_size=block_size)
    labels, mask = np.asarray(targets.labels)[:, :, 1:], np.asarray(targets.mask)[:, :, 1:]
    drafts = paged.tokens.shape[2]
    same = (paged.tokens == labels[:, :, :drafts]) & mask[:, :, :drafts]
    return np.logical_and.accumulate(same, axis=2).sum(axis=2)


def drafted_step(
    objective: DFlashObjective, params: Params, tables: Tables, texts: Texts, paged: Drafted
) -> Finding:
    """The metric of training against the tokens that decoding drafts, anchor by anchor."""
    terms = jax.jit(objective.terms)(params, tables, texts.batch, texts.blocks)
    figures: dict[str, Any] = {name: np.asarray(value).tolist() for name, value in terms.means().items()}
    second = "walk_accept_length" in figures
    trained = figures["walk_accept_length" if second else "accept_length"]
    keep = np.asarray(texts.blocks.keep)
    lengths = accepted(texts, paged, objective.config.block_size)[keep]
    walked = float(lengths.mean())
    positions = [float((lengths >= j).mean()) for j in range(1, paged.tokens.shape[2] + 1)]
    figures |= {"drafted_accept_length": walked, "accepted_by_position": positions}
    said = f"accept length {trained:.2f} by the training metric, {walked:.2f} drafted; by position {_row(positions)}"
    if second:
        said += (
            f"; coverage {_row(figures['coverage'])}, selector accuracy {_row(figures['selector_accuracy'])}"
            f", accept length {figures['oracle_accept_length']:.2f} with the best choice of candidates"
        )
    if abs(trained - walked) <= _SAME:
        return passed(DRAFTED, said, **figures)
    return failed(DRAFTED, f"{said}; drafting does not do what was trained", **figures)


def _row(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
