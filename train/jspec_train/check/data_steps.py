"""Steps 1 and 2: the data, the target and the drafter are of one kind."""

import math

import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.features import CONTRACT_FILE
from jspec.targets.view import TargetView
from jspec_train.check.finding import Finding, failed, not_checkable, passed
from jspec_train.check.perturbation import shifted
from jspec_train.check.subject import Subject, read_contract
from jspec_train.check.texts import Texts
from jspec_train.data.chat import Chat

TOKENIZER, FEATURES = 1, 2
_LOOKED_AT = 1000
_TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-3}  # relative; sums are taken in another order elsewhere


def tokenizer_step(subject: Subject) -> Finding:
    """Ids and chat template of the data are those that the target is served with."""
    source, tokenizer = subject.source, subject.tokenizer
    if source is None:
        return not_checkable(TOKENIZER, "no data given")
    header = source.header
    template = Chat(tokenizer=tokenizer).template_hash if tokenizer.chat_templates else ""
    figures = {
        "tokenizer": [header.tokenizer, tokenizer.identity],
        "template": [header.template, template],
    }
    if header.tokenizer != tokenizer.identity:
        said = (
            f"tokenizer {header.tokenizer[:12]} in the data, {tokenizer.identity[:12]} of the target; "
            "prepare the data with this target's tokenizer"
        )
        return failed(TOKENIZER, said, **figures)
    if header.template and header.template != template:
        said = (
            f"chat template {header.template[:12]} in the data, {template[:12] or 'none'} of the target; "
            "prepare the data with the template that is served, or serve with the data's"
        )
        return failed(TOKENIZER, said, **figures)
    wrong = _wrong_id(subject)
    if wrong:
        return failed(TOKENIZER, wrong, **figures)
    shown = header.template[:12] if header.template else "none used"
    return passed(TOKENIZER, f"tokenizer {tokenizer.identity[:12]}, template {shown}, as served", **figures)


def _wrong_id(subject: Subject) -> str:
    source, vocab_size = subject.source, subject.loaded.target.vocab_size
    assert source is not None
    mask_token_id = None if subject.drafter is None else subject.method.mask_token_id
    for index in range(min(len(source), _LOOKED_AT)):
        sample = source[index]
        if sample.ids.min() < 0 or sample.ids.max() >= vocab_size:
            return f"sample {sample.id} has id {int(sample.ids.max())}, the target {vocab_size}; prepare it again"
        if mask_token_id is not None and np.any(sample.ids == mask_token_id):
            return (
                f"the drafter's mask token {mask_token_id} is in sample {sample.id}; train with an unused one"
            )
    return ""


def misfit(subject: Subject) -> str:
    """Why the drafter cannot serve the target; "" if it can."""
    nothing = Cache(groups=(), lengths=jnp.zeros((0,), jnp.int32))  # only the sizes are looked at
    view = TargetView(params=(), cache=nothing, target=subject.loaded.target)
    try:
        subject.method.check_target(view)
    except ValueError as problem:
        return str(problem)
    return ""


def features_step(subject: Subject, texts: Texts | None) -> Finding:
    """What was captured is what the drafter reads, and what this target gives now.

    Args:
      subject: the drafter has to be loaded.
      texts: samples of the data with fresh features; None if there are none.
    """
    target = subject.loaded.target
    problem = misfit(subject)
    if problem:
        return failed(FEATURES, problem)
    try:
        contract = read_contract(subject.folder)
        if contract is not None:
            contract.check(target)
    except ValueError as problem:
        return failed(FEATURES, str(problem))
    key = subject.method.layers_key
    figures: dict[str, object] = {"reads": list(subject.names)}
    if contract is not None and contract.names != subject.names:
        said = (
            f"{list(contract.names)} in {CONTRACT_FILE}, {list(subject.names)} by {key}; "
            f"set {key} to the layers that it was trained on"
        )
        return failed(FEATURES, said, **figures, contract=list(contract.names))
    said = f"{', '.join(subject.names)}: the target has them" + (
        ", and the contract says so" if contract is not None else f"; no {CONTRACT_FILE} to compare with"
    )
    source = subject.source
    if source is None or source.header.features is None or texts is None:
        return passed(FEATURES, f"{said}; no stored features to compare", **figures)
    stored = source.header.features
    if stored.target != target.identity:
        return failed(FEATURES, f"features of ({stored.target}) in the data; capture them again", **figures)
    if stored.names != subject.names:
        said = (
            f"{list(stored.names)} in the data, {list(subject.names)} by {key}; "
            f"set {key} to the layers that it was trained on, or capture the features again"
        )
        return failed(FEATURES, said, **figures, stored=list(stored.names))
    return _stored_step(texts, stored.names, _TOLERANCE[stored.dtype], said, figures)


def _stored_step(
    texts: Texts, names: tuple[str, ...], tolerance: float, said: str, figures: dict[str, object]
) -> Finding:
    differences = {name: 0.0 for name in names}
    held = np.zeros(texts.batch.features.shape, np.float32)
    for row, sample in enumerate(texts.samples):
        assert sample.features is not None
        held[row, : sample.ids.size] = sample.features
    parts = np.split(held, len(names), axis=2)
    lengths = [sample.ids.size for sample in texts.samples]
    for name, part in zip(names, parts, strict=True):
        differences[name] = _difference(part, texts.states[name], lengths)
    worst = max(differences, key=lambda name: differences[name])
    figures |= {"differences": differences}
    if differences[worst] <= tolerance:
        said = f"{said}; stored features differ from fresh ones by {differences[worst]:.1e}"
        return passed(FEATURES, said, **figures)
    said = f"stored features of {worst} differ from fresh ones by {differences[worst]:.1e}, expected {tolerance:.0e}"
    part, fresh = parts[names.index(worst)], texts.states[worst]
    for off, where in ((1, "later"), (-1, "earlier")):
        moved = np.asarray(shifted(jnp.asarray(fresh), off))
        inner = [length - 1 for length in lengths]
        if _difference(part[:, 1:], moved[:, 1:], [length - 1 for length in inner]) <= tolerance:
            said += f"; they are those of one token {where}"
    return failed(FEATURES, f"{said}; capture them again with this target", **figures)


def _difference(a: np.ndarray, b: np.ndarray, lengths: list[int]) -> float:
    """The greatest relative difference of a text."""
    ratios = [
        float(np.linalg.norm(x[:n] - y[:n]) / max(float(np.linalg.norm(y[:n])), 1e-30))
        for x, y, n in zip(a, b, lengths, strict=True)
    ]
    return math.inf if any(math.isnan(ratio) for ratio in ratios) else max(ratios)
