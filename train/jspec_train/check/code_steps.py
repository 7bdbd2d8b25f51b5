"""Steps 7 and 9: the training code and the decoding code compute and accept the same."""

import numpy as np

from jspec.net import Params
from jspec.objectives.blocks import block_targets
from jspec.objectives.frozen import Tables
from jspec_train.check.finding import Finding, failed, passed
from jspec_train.check.method import CheckedMethod, Drafted
from jspec_train.check.texts import Texts

CODE, DRAFTED = 7, 9
_TOLERANCE = 1e-4  # of float32 values, relative to the greatest one where that is above 1
_SAME = 0.05  # tokens of accept length: ties and rounding


def code_step(
    method: CheckedMethod, params: Params, tables: Tables, texts: Texts, drafted: Drafted
) -> Finding:
    """What the two compute at every anchor: dense attention over known text against pages."""
    dense = np.asarray(method.computed(params, tables, texts, drafted))
    keep = np.asarray(texts.blocks.keep)
    a, b = dense[keep], drafted.compared[keep]
    difference, size = float(np.abs(a - b).max()), float(np.abs(a).max())
    allowed = _TOLERANCE * max(1.0, size)
    said = f"{method.compared} differ by {difference:.1e} at {int(keep.sum())} anchors, expected at most {allowed:.0e}"
    if difference <= allowed:  # not if it is NaN
        return passed(CODE, said, difference=difference)
    row = int(np.abs(a - b).max(axis=(0, 2)).argmax())
    said += f"; {method.row_name(row)} most: masks, positions or rope of the two differ"
    return failed(CODE, said, difference=difference)


def accepted(texts: Texts, drafted: Drafted, block_size: int) -> np.ndarray:
    """Accept length [texts, anchors] of what decoding drafts, against the text as far as it is an answer."""
    targets = block_targets(texts.batch, texts.blocks, block_size=block_size)
    labels, mask = np.asarray(targets.labels)[:, :, 1:], np.asarray(targets.mask)[:, :, 1:]
    drafts = drafted.tokens.shape[2]
    same = (drafted.tokens == labels[:, :, :drafts]) & mask[:, :, :drafts]
    return np.logical_and.accumulate(same, axis=2).sum(axis=2)


def drafted_step(
    method: CheckedMethod, params: Params, tables: Tables, texts: Texts, drafted: Drafted
) -> Finding:
    """The metric of training against the tokens that decoding drafts, anchor by anchor."""
    trained = method.trained(params, tables, texts)
    keep = np.asarray(texts.blocks.keep)
    lengths = accepted(texts, drafted, method.block_size)[keep]
    walked = float(lengths.mean())
    positions = [float((lengths >= j).mean()) for j in range(1, drafted.tokens.shape[2] + 1)]
    figures = {
        **trained.figures,
        "trained_accept_length": trained.accept_length,
        "drafted_accept_length": walked,
        "accepted_by_position": positions,
    }
    by_position = " ".join(f"{value:.2f}" for value in positions)
    said = (
        f"accept length {trained.accept_length:.2f} by the training metric, {walked:.2f} drafted; by position "
        f"{by_position}" + (f"; {trained.said}" if trained.said else "")
    )
    if abs(trained.accept_length - walked) <= _SAME:
        return passed(DRAFTED, said, **figures)
    return failed(DRAFTED, f"{said}; drafting does not do what was trained", **figures)
