"""All steps in the order of cause: data, features, training code, files, decoding."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jspec_train.check.code_steps import CODE, DRAFTED, accepted, code_step, drafted_step
from jspec_train.check.data_steps import FEATURES, features_step, misfit, tokenizer_step
from jspec_train.check.decoded_step import DECODED, Answers, answer, commit_length, decoded_step
from jspec_train.check.diagnosis import diagnosis
from jspec_train.check.finding import STEPS, Finding, not_checkable
from jspec_train.check.method import Drafted
from jspec_train.check.perturbation import ALIGNMENT, LEAK, ORDER, ROPE, nearby_states, perturbation_steps
from jspec_train.check.perturbed import Pass
from jspec_train.check.subject import Subject
from jspec_train.check.texts import Texts, choose_samples, random_samples, read_texts
from jspec_train.check.weights_step import WEIGHTS, weights_step
from jspec_train.decoding import prompts_of
from jspec_train.sample import Sample

_OF_DATA = (ORDER, ALIGNMENT, LEAK, ROPE, DRAFTED, DECODED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """All findings in order, and what they come to."""

    findings: tuple[Finding, ...]
    diagnosis: str

    @property
    def failed(self) -> bool:
        """Whether a step found a fault."""
        return any(finding.status == "fail" for finding in self.findings)

    def json(self) -> dict[str, Any]:
        """For a file."""
        steps = [
            {
                "step": finding.step,
                "name": finding.name,
                "status": finding.status,
                "said": finding.said,
                "figures": _finite(dict(finding.figures)),
            }
            for finding in self.findings
        ]
        return {"steps": steps, "diagnosis": self.diagnosis}


def _finite(value: Any) -> Any:
    """JSON knows no NaN: null where nothing was counted."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is looked at."""

    samples: int = 8
    tokens: int = 48  # answer tokens of each, and tokens to decode
    decode: bool = True

    def __post_init__(self) -> None:
        """Refuses what leaves nothing to look at."""
        for name, least in (("samples", 1), ("tokens", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")


def check(
    subject: Subject,
    extent: Extent,
    dtype: str = "float32",
    said: Callable[[int], None] = lambda step: None,
) -> Verdict:
    """Runs every step that the files allow.

    Args:
      subject: from `open_subject`.
      extent: how much is looked at.
      dtype: that the target was opened in.
      said: called with the number of each step that begins.
    """
    said(1)
    findings = [tokenizer_step(subject), weights_step(subject)]
    if subject.drafter is None:
        reason = f"the drafter did not load (step {WEIGHTS})"
        findings += [not_checkable(step, reason) for step in (FEATURES, *_OF_DATA, CODE)]
    else:
        findings += _with_drafter(subject, extent, dtype, said)
    findings.sort(key=lambda finding: finding.step)
    assert [finding.step for finding in findings] == list(range(1, len(STEPS) + 1))
    return Verdict(findings=tuple(findings), diagnosis=diagnosis(findings))


def _with_drafter(subject: Subject, extent: Extent, dtype: str, said: Callable[[int], None]) -> list[Finding]:
    said(FEATURES)
    if misfit(subject):
        reason = f"the drafter does not fit the target (step {FEATURES})"
        return [features_step(subject, None), *_none((*_OF_DATA, CODE), reason)]
    texts = texts_of_data(subject, extent)
    findings = [features_step(subject, texts)]
    no_texts = "no data given" if subject.source is None else "no sample has an answer that fits a block"
    method = subject.method
    try:
        method.check_objective()
        whole = Pass(method=method, params=subject.drafter_params, tables=subject.tables())
    except ValueError as problem:  # of a kind that is not trained here
        findings += _none((ORDER, ALIGNMENT, LEAK, ROPE, CODE, DRAFTED), str(problem))
        expected = None
    else:
        if texts is None:
            findings += _none((ORDER, ALIGNMENT, LEAK, ROPE, DRAFTED), no_texts)
        else:
            rope, layers = subject.loaded.target.config.full_rope, subject.loaded.target.num_layers
            findings += perturbation_steps(whole, texts, rope, layers, said)
        said(CODE)
        shown = random_texts(subject, extent) if texts is None else texts
        paged = drafts_of(subject, shown)
        findings.append(code_step(method, whole.params, whole.tables, shown, paged))
        if texts is not None:
            said(DRAFTED)
            findings.append(drafted_step(method, whole.params, whole.tables, texts, paged))
        expected = None if texts is None else _commit_length(subject, texts, paged, extent)
    if texts is None or not extent.decode:
        return [*findings, not_checkable(DECODED, no_texts if texts is None else "left out on request")]
    said(DECODED)
    return [*findings, _decoded(subject, extent, dtype, texts, expected)]


def _decoded(subject: Subject, extent: Extent, dtype: str, texts: Texts, along_data: float | None) -> Finding:
    limit = _limit(subject)
    prompts = [p for p in prompts_of(texts.samples) if len(p.ids) + extent.tokens <= limit]
    if not prompts:
        return not_checkable(
            DECODED, f"no sample has a prompt that leaves room for {extent.tokens} tokens of {limit}"
        )
    answers = answer(subject, prompts, extent.tokens, dtype)
    along_answers = None
    own = _own_answers(answers) if along_data is not None else []
    if own:
        shown = _read(subject, own, extent)
        along_answers = _commit_length(subject, shown, drafts_of(subject, shown), extent)
    return decoded_step(answers, exact=dtype == "float32", along_answers=along_answers, along_data=along_data)


def _own_answers(answers: Answers) -> list[Sample]:
    """The target's answers as texts, where they have a place for a block."""
    samples = []
    for number, result in enumerate(answers.plain):
        ids = np.asarray([*result.prompt_ids, *result.token_ids], np.int32)
        if len(result.token_ids) > 1:
            mask = np.arange(ids.size) >= len(result.prompt_ids)
            samples.append(Sample(id=f"answer {number + 1}", ids=ids, loss_mask=mask))
    return samples


def _commit_length(subject: Subject, texts: Texts, paged: Drafted, extent: Extent) -> float | None:
    """Tokens a round that decoding would have along the first answer of each text."""
    lengths = accepted(texts, paged, subject.method.block_size)
    anchors, keep = np.asarray(texts.blocks.anchors), np.asarray(texts.blocks.keep)
    rows = []
    for places, kept, row in zip(anchors, keep, lengths, strict=True):
        first = keep_together(places[kept])[: extent.tokens - 1]
        rows.append(row[: first.size])
    return commit_length(rows, paged.tokens.shape[2], extent.tokens)


def keep_together(places: np.ndarray) -> np.ndarray:
    """The leading places that follow one another."""
    return places[: int(np.argmax(np.append(np.diff(places) != 1, True))) + 1] if places.size else places


def texts_of_data(subject: Subject, extent: Extent) -> Texts | None:
    """Samples of the data with features; None if there are none that a block fits in."""
    if subject.source is None:
        return None
    samples = choose_samples(
        subject.source,
        count=extent.samples,
        block_size=subject.method.block_size,
        tokens=extent.tokens,
        limit=_limit(subject),
    )
    return _read(subject, samples, extent, nearby=True) if samples else None


def random_texts(subject: Subject, extent: Extent) -> Texts:
    """Texts for what needs no data."""
    length = min(2 * extent.tokens, _limit(subject))
    vocab_size = subject.loaded.target.vocab_size
    return _read(subject, random_samples(vocab_size, count=2, length=length), extent)


def _read(subject: Subject, samples: Sequence[Sample], extent: Extent, *, nearby: bool = False) -> Texts:
    extra: tuple[str, ...] = ()
    if nearby:
        extra = (*nearby_states(subject.names, subject.loaded.target.num_layers), *subject.method.captured)
    return read_texts(
        subject.loaded,
        samples,
        subject.names,
        extra=extra,
        block_size=subject.method.block_size,
        tokens=extent.tokens,
        limit=_limit(subject),
    )


def drafts_of(subject: Subject, texts: Texts) -> Drafted:
    """What the decoding code drafts in the texts."""
    target = subject.loaded
    return subject.method.drafts(subject.drafter_params, target.target, target.params, texts)


def _limit(subject: Subject) -> int:
    """Tokens that drafter and target can place."""
    return min(subject.method.decoder.max_context, subject.loaded.target.max_context)


def _none(steps: Sequence[int], reason: str) -> list[Finding]:
    return [not_checkable(step, reason) for step in steps]
