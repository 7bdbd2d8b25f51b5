"""Which hidden states of a target a drafter is given: their names, and the contract beside the arrays."""

import dataclasses
from collections.abc import Sequence

from jspec.targets.target import Target

CONTRACT_FILE = (
    "feature_contract.json"  # in a trained drafter's folder: the `FeatureContract` it was trained on
)


def layer_outputs(layer_ids: Sequence[int]) -> tuple[str, ...]:
    """Feature names of layer ids as checkpoints list them: -1 the embedding, i the output of layer i."""
    return tuple("embedding" if i == -1 else f"layer.{i}" for i in layer_ids)


def check_names(names: Sequence[str], num_layers: int) -> None:
    """Refuses a feature that a model of `num_layers` decoder layers does not have.

    The names: "embedding" (as layer 0 reads it), "layer.i" (the residual stream after decoder layer
    i, 0-based, before the final norm), "final_norm" (what the head reads).

    Raises:
      ValueError: naming the feature and what there is.
    """
    for name in names:
        if name in ("embedding", "final_norm"):
            continue
        kind, _, number = name.partition(".")
        if kind != "layer" or not number.isdecimal() or str(int(number)) != number:
            raise ValueError(f"features: expected 'embedding', 'layer.<i>' or 'final_norm', got {name!r}")
        if int(number) >= num_layers:
            raise ValueError(
                f"features: layer {number} does not exist; the model has {num_layers} layers, "
                f"0 to {num_layers - 1}: pass other layers, or the target that the drafter was trained for"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureContract:
    """What an array of features holds; written beside the features and into drafter checkpoints."""

    names: tuple[str, ...]  # side by side in this order along the last axis
    width: int  # of the last axis: number of names times the target's hidden size
    dtype: str  # "float32", "bfloat16", ...
    target: str  # identity of the target that made them

    def check(self, target: Target) -> None:
        """Refuses a target that cannot produce these features.

        Raises:
          ValueError: naming both sides.
        """
        if self.target != target.identity:
            raise ValueError(
                f"features: expected the target ({self.target}), got ({target.identity}); "
                "load that target, or features and drafter made for this one"
            )
        check_names(self.names, target.num_layers)
        if self.width != len(self.names) * target.hidden_size:
            raise ValueError(
                f"features: expected width {len(self.names) * target.hidden_size} for {len(self.names)} "
                f"states of {target.hidden_size}, got {self.width}; capture them again"
            )

    def check_same(self, other: "FeatureContract") -> None:
        """Refuses features that were made under another contract, naming the first difference.

        Raises:
          ValueError: naming the field and both values.
        """
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                raise ValueError(f"features: expected {field.name} {mine}, got {theirs}; capture them again")


def feature_contract(target: Target, names: Sequence[str], dtype: str) -> FeatureContract:
    """The contract of capturing `names` from `target`.

    Raises:
      ValueError: if the target has no such state.
    """
    check_names(names, target.num_layers)
    return FeatureContract(
        names=tuple(names), width=len(names) * target.hidden_size, dtype=dtype, target=target.identity
    )
