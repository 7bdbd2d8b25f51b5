"""What the training program has to know of a method. All the rest is the same for every one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.checkpoints.target import LoadedTarget
from jspec.drafters.protocol import Drafter
from jspec.net import Leaf, NetConfig, Params
from jspec_train.samples import SampleSource
from jspec_train.step import Objective


class TrainedMethod(Protocol):
    """A drafter that a recipe describes, and how it is trained, started, decoded with and saved."""

    @property
    def config(self) -> NetConfig:
        """Of the network; it can name itself."""
        ...

    @property
    def captured(self) -> tuple[str, ...]:
        """States that a batch's features hold, in order."""
        ...

    @property
    def features(self) -> tuple[str, ...]:
        """Those of them that the drafter itself reads."""
        ...

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that are drafted; None = all."""
        ...

    @property
    def frozen(self) -> frozenset[str]:
        """Leaves that are not trained."""
        ...

    def leaves(self, dtype: jnp.dtype) -> tuple[Leaf, ...]:
        """The drafter's arrays."""
        ...

    def objective(self, total_steps: int) -> Objective:
        """The loss."""
        ...

    def held_out_objective(self, total_steps: int) -> Objective:
        """The same without what is only added while training."""
        ...

    def check_samples(self, source: SampleSource) -> None:
        """Finds data that cannot be meant, before hours are spent on it.

        Raises:
          ValueError: naming the setting.
        """
        ...

    def fresh(
        self, key: Array, draft_ids: Int[Array, "draft_vocabulary"] | None, loaded: LoadedTarget
    ) -> Params:
        """Float32 leaves to start from, as `training.start` says.

        Raises:
          ValueError: the target's weights do not fit.
        """
        ...

    def warm(self, folder: Path, key: Array) -> Params:
        """Float32 leaves of a drafter that was trained before.

        Raises:
          ValueError: it has other sizes.
        """
        ...

    def drafter(self, draft_length: int | None) -> Drafter:
        """Decodes with such weights."""
        ...

    def save(self, folder: Path, params: Params, files: Mapping[str, str]) -> None:
        """Writes a folder that decoding loads, and that others read."""
        ...

    def plan(self, rows: int, longest: int) -> Mapping[str, Any]:
        """What is predicted ("predicted", in words), and logits in memory at a time ("chunk_bytes").

        Args:
          rows: of a micro-batch on one device.
          longest: tokens of a row.
        """
        ...
