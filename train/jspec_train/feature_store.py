"""Captures the features of a folder of samples into another folder: what to expect, then the work."""

import collections
import dataclasses
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.capture import Capture, capture_one
from jspec_train.sample import Sample
from jspec_train.sample_header import Header
from jspec_train.samples import SampleSource, SampleWriter

SHARD_BYTES = 1 << 28
_RECORD_BYTES = 1024  # of a record beside its arrays: names, hashes, framing; seen are 500 to 700
_SHARD_BYTES = 3 << 16  # of a shard beside its records: array_record's index and padding
_AHEAD = 2  # samples that the device works on while the host writes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """What a capture will take."""

    samples: int
    tokens: int
    width: int  # of the features
    size: int  # bytes that are still to be written, at most
    free: int  # bytes on the disk
    seconds: float  # estimated from one sample of mean length
    programs: int  # sizes that texts are padded to, at most

    def check(self, out: Path) -> None:
        """Refuses a disk that is too small.

        Raises:
          OSError: naming both sizes.
        """
        if self.size > self.free:
            raise OSError(
                f"out: expected {self.size / 1e9:.2f} GB free for features of {self.tokens} tokens in {out}, got "
                f"{self.free / 1e9:.2f} GB; make room, capture fewer states, or train with in-process capture"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureTally:
    """How far a capture is."""

    samples: int  # of the source
    done: int  # samples looked at, in earlier runs, too
    tokens: int  # captured in this run
    dropped: tuple[str, ...] = ()  # ids whose features are not finite, in this run


def feature_header(capture: Capture, params: Any, source: SampleSource) -> Header:
    """What a folder of features says about itself: equal headers hold equal features."""
    return dataclasses.replace(
        source.header,
        kind="features",
        target=capture.target.identity,
        features=capture.contract,
        settings={
            **source.header.settings,
            "capture_buckets": list(capture.buckets),
            "source_content": source.counts.content,
            "target_weights": weights_fingerprint(params),
        },
    )


def weights_fingerprint(params: Any) -> str:
    """SHA-256 over shape, dtype and up to 1024 evenly spaced values of every leaf: tells fine-tunes apart."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        values = leaf.reshape(-1)[:: max(leaf.size // 1024, 1)][:1024]
        digest.update(f"{leaf.shape} {leaf.dtype}".encode())
        digest.update(np.asarray(values.astype(jnp.float32)).tobytes())
    return digest.hexdigest()


def plan_capture(
    capture: Capture,
    params: Any,
    source: SampleSource,
    out: str | Path,
    *,
    measure: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> CapturePlan:
    """Says what a capture will take; captures one sample twice for it, if `measure`.

    Args:
      capture: what to capture.
      params: of the target.
      source: a finished folder.
      out: the folder to be written; what an interrupted run left there is counted as written.
      measure: False = the plan's `seconds` are NaN.
      shard_bytes: size at which a shard is closed.

    Raises:
      ValueError: a sample that is longer than the target's context, or folders with features already.
    """
    if source.header.kind != "samples":
        raise ValueError(
            f"samples: expected a folder without features, got one of {source.header.features}; pass its source"
        )
    if source.counts.longest > capture.target.max_context:
        raise ValueError(
            f"samples: expected at most {capture.target.max_context} tokens (the target's context), got a sample of "
            f"{source.counts.longest}; prepare them with a smaller max_length"
        )
    out, contract = Path(out), capture.contract
    per_token = contract.width * jnp.dtype(contract.dtype).itemsize + 4 + 1
    size = source.counts.tokens * per_token + len(source) * _RECORD_BYTES
    size += (size // shard_bytes + 1) * _SHARD_BYTES
    written = sum(path.stat().st_size for path in out.glob("shard-*.array_record")) if out.is_dir() else 0
    existing = next(place for place in (out, *out.absolute().parents) if place.exists())
    return CapturePlan(
        samples=len(source),
        tokens=source.counts.tokens,
        width=contract.width,
        size=max(size - written, 0),
        free=shutil.disk_usage(existing).free,
        seconds=_measure(capture, params, source) if measure else float("nan"),
        programs=len(capture.sizes(source.counts.longest)),
    )


def capture_to_store(
    capture: Capture,
    params: Any,
    source: SampleSource,
    out: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_progress: Callable[[CaptureTally], None] = lambda _: None,
) -> SampleSource:
    """Writes `source` with features to the folder `out`, in the same order.

    It may be stopped at any time: run again, it goes on behind the last finished shard. A sample whose features
    are not finite is left out, counted in the report under "dropped".

    Args:
      capture: what to capture.
      params: of the target.
      source: a finished folder of samples without features.
      out: a new folder, or one that an interrupted run of the same capture left.
      shard_bytes: size at which a shard is closed.
      on_progress: called after each sample.

    Raises:
      ValueError: `out` is finished or was begun with another target, contract or source; a sample does
        not fit the target.
      OSError: the disk cannot hold it; said before anything is captured, if it can be foreseen.
    """
    out = Path(out)
    plan_capture(capture, params, source, out, measure=False, shard_bytes=shard_bytes).check(out)
    header = feature_header(capture, params, source)
    with SampleWriter(out, header, shard_bytes=shard_bytes) as writer:
        first, dropped = writer.cursor or [0, []]
        tally = CaptureTally(samples=len(source), done=first, tokens=0)
        on_progress(tally)
        for index, sample in _with_features(capture, params, source, first):
            if _finite(sample):
                writer.write(sample, [index + 1, dropped])
            else:
                dropped = [*dropped, sample.id]
                writer.mark([index + 1, dropped])
            tally = CaptureTally(
                samples=len(source),
                done=index + 1,
                tokens=tally.tokens + sample.ids.size,
                dropped=tuple(dropped),
            )
            on_progress(tally)
        return writer.finish({**source.report, "dropped_not_finite": dropped})


def _with_features(
    capture: Capture, params: Any, source: SampleSource, first: int
) -> Iterator[tuple[int, Sample]]:
    """(index, sample with features) from `first` on; the device runs ahead of the reader."""
    running: collections.deque[tuple[int, Sample, jax.Array]] = collections.deque()

    def finished() -> tuple[int, Sample]:
        index, sample, features = running.popleft()
        return index, dataclasses.replace(sample, features=np.asarray(features)[: sample.ids.size])

    for index in range(first, len(source)):
        sample = source[index]
        running.append((index, sample, _capture(capture, params, sample, source.counts.longest)))
        if len(running) > _AHEAD:
            yield finished()
    while running:
        yield finished()


def _capture(capture: Capture, params: Any, sample: Sample, longest: int) -> jax.Array:
    length, vocabulary = sample.ids.size, capture.target.vocab_size
    if sample.ids.min() < 0 or sample.ids.max() >= vocabulary:
        wrong = sample.ids[(sample.ids < 0) | (sample.ids >= vocabulary)][0]
        raise ValueError(
            f"sample {sample.id}: expected ids below the target's vocabulary of {vocabulary}, got {wrong}; "
            "prepare the samples with the tokenizer of this target"
        )
    size = next(size for size in capture.sizes(longest) if length <= size)
    return capture_one(capture, params, np.pad(sample.ids, (0, size - length)), np.int32(length))


def _finite(sample: Sample) -> bool:
    return bool(np.isfinite(sample.features.astype(np.float32)).all())  # type: ignore[union-attr]


def _measure(capture: Capture, params: Any, source: SampleSource) -> float:
    """Seconds for all of `source`, from the second run of one sample of about mean length."""
    mean = source.counts.tokens / len(source)
    looked_at = (source[index] for index in range(min(len(source), 64)))
    sample = min(looked_at, key=lambda sample: abs(sample.ids.size - mean))
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(_capture(capture, params, sample, source.counts.longest))
    return (time.perf_counter() - start) * source.counts.tokens / sample.ids.size
