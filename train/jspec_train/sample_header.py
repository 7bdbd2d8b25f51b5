"""What a folder of samples says about itself: header, counts, and the JSON file that holds them."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.features import FeatureContract
from jspec_train.sample import Sample

FORMAT, VERSION = "jspec samples", 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What all samples of a folder share; two folders with equal headers were made alike."""

    kind: str  # "samples", or "features" if every sample has them
    tokenizer: str  # identity of the tokenizer: jspec.text.tokenizer.Tokenizer.identity
    template: str  # SHA-256 of the chat template; "" if none was used
    max_length: int  # no sample is longer
    target: str | None = None  # identity of the target that made the answers or the features
    features: FeatureContract | None = None  # of kind "features"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON: whatever else shaped them

    def __post_init__(self):
        """Refuses a kind that does not go with the contract.

        Raises:
          ValueError: naming both.
        """
        if self.kind not in ("samples", "features"):
            raise ValueError(f"kind: expected 'samples' or 'features', got {self.kind!r}")
        if (self.kind == "features") != (self.features is not None):
            raise ValueError(
                f"features: expected a contract exactly for kind 'features', got {self.features} for {self.kind!r}"
            )

    def check_same(self, other: "Header", folder: Path) -> None:
        """Refuses samples made in another way, naming the first difference.

        Raises:
          ValueError: naming the field and both values.
        """
        mine, theirs = flat_header(self), flat_header(other)
        for name in sorted({*mine, *theirs}):
            if mine.get(name) != theirs.get(name):
                raise ValueError(
                    f"{folder}: expected samples with {name} {mine.get(name)!r}, got {theirs.get(name)!r}; "
                    "use the settings it was begun with, or another folder"
                )


def flat_header(header: Header) -> dict[str, Any]:
    """Fields by name, those of settings and of the contract one by one; as JSON reads them back."""
    values = json.loads(json.dumps(dataclasses.asdict(header)))
    nested = {key: values.pop(key) or {} for key in ("settings", "features")}
    return values | {f"{key}.{name}": value for key, part in nested.items() for name, value in part.items()}


def header_of(values: Mapping[str, Any]) -> Header:
    features = values["features"]
    if features is not None:
        features = FeatureContract(**features | {"names": tuple(features["names"])})
    return Header(**{**values, "features": features})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Over the samples of a folder."""

    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    content: str = ""  # chain of SHA-256 over the samples' content, in order: names the data

    def plus(self, sample: Sample) -> "Counts":
        """The counts with one more sample at the end."""
        return Counts(
            samples=self.samples + 1,
            tokens=self.tokens + sample.ids.size,
            supervised_tokens=self.supervised_tokens + int(sample.loss_mask.sum()),
            longest=max(self.longest, sample.ids.size),
            content=hashlib.sha256((self.content + sample.content).encode()).hexdigest(),
        )


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text("utf-8"))
        known = state["format"] == FORMAT
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(
            f"samples: expected {path} of format {FORMAT!r}, got another file ({problem!r}); check the path"
        ) from problem
    if not known or state["version"] != VERSION:
        raise ValueError(
            f"samples: expected {path} of format {FORMAT!r} version {VERSION}, got {state['format']!r} version {state.get('version')}; prepare the folder with this version"
        )
    return state


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all, and on disk before the next step."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
