"""Step 8: the exported weights are all there, and none of them is empty."""

import numpy as np

from jspec_train.check.finding import Finding, failed, passed
from jspec_train.check.subject import Subject

WEIGHTS = 8


def weights_step(subject: Subject) -> Finding:
    """Loading has accounted for every tensor; here are their values."""
    if subject.drafter is None:
        return failed(WEIGHTS, subject.refusal)
    leaves = subject.method.leaves()
    untrained = []
    for leaf, values in zip(leaves, subject.drafter.params, strict=True):
        held = np.asarray(values)
        if not np.isfinite(held).all():
            count = int((~np.isfinite(held)).sum())
            return failed(
                WEIGHTS, f"{leaf.path} has {count} values that are not finite; export an earlier checkpoint"
            )
        if not held.any():
            if not leaf.path.endswith(subject.method.may_be_zero):
                return failed(WEIGHTS, f"{leaf.path} is all zero; export the drafter again")
            untrained.append(leaf.path)
    size = sum(values.size for values in subject.drafter.params)
    said = f"{len(leaves)} tensors, {size:,} values, all finite"
    if untrained:
        said += f"; still zero as at the start: {', '.join(untrained)}"
    return passed(WEIGHTS, said, tensors=len(leaves), values=size, zero=untrained)
