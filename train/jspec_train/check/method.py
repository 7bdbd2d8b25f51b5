"""What the steps have to know of a drafter's method. All the rest is the same for every one."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.net import Leaf, Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.blocks import Blocks
from jspec.objectives.frozen import Tables
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope
from jspec.targets.target import Target
from jspec.targets.view import TargetView
from jspec_train.check.predictions import Predictions
from jspec_train.check.texts import Texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """How what a drafter is given differs from what the files say; by default it does not."""

    labels: int = 0  # every row is asked for the token so many later
    tokens: int = 0  # every row reads the token so many later, if it reads tokens of the text at all
    ahead: int = 0  # features of so many tokens more are visible
    rope: Rope | None = None  # of all layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafted:
    """Of every text and anchor, by the decoding code; places without an anchor hold anything."""

    tokens: np.ndarray  # int32 [texts, anchors, drafts]; -1 past the proposal's length
    compared: np.ndarray  # float32 [texts, anchors, rows, width]: what the training code computes as well


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What training says of the drafter's acceptance on some texts."""

    accept_length: float  # mean over anchors, on the text that decoding is compared with
    figures: Mapping[str, Any]
    said: str  # further figures in words; "" = none


class CheckedMethod(Protocol):
    """A drafter's network as training computes it and as decoding does."""

    @property
    def decoder(self) -> DecoderConfig:
        """Of its layers."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The features that it reads."""
        ...

    @property
    def captured(self) -> tuple[str, ...]:
        """Those that its training loss reads."""
        ...

    @property
    def layers_key(self) -> str:
        """The key of config.json that names the captured layers."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of the text that a draft is about, the anchor counted."""
        ...

    @property
    def reads_tokens(self) -> bool:
        """Whether each feature comes with a token of the text, so that the two can be paired wrongly."""
        ...

    @property
    def mask_token_id(self) -> int | None:
        """Stands for unknown tokens."""
        ...

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that are drafted; None = all."""
        ...

    @property
    def may_be_zero(self) -> tuple[str, ...]:
        """Ends of the names of leaves that are zero in a fresh drafter."""
        ...

    @property
    def compared(self) -> str:
        """What `computed` returns, in words."""
        ...

    def row_name(self, row: int) -> str:
        """A row of it, in words."""
        ...

    def leaves(self) -> tuple[Leaf, ...]:
        """The drafter's arrays."""
        ...

    def draft_ids(self, params: Params) -> Int[Array, "draft_vocabulary"] | None:
        """Target ids of a reduced vocabulary."""
        ...

    def check_target(self, view: TargetView) -> None:
        """Refuses a target that it was not made for.

        Raises:
          ValueError: naming both sides.
        """
        ...

    def check_objective(self) -> None:
        """Makes sure that there is a training loss for it.

        Raises:
          ValueError: it is of a kind that is not trained here.
        """
        ...

    def predictions(
        self,
        params: Params,
        tables: Tables,
        batch: TrainBatch,
        blocks: Blocks,
        labels: Int[Array, "texts anchors drafts"],
        given: Input,
    ) -> Predictions:
        """What the training code predicts at each anchor, along the text."""
        ...

    def computed(self, params: Params, tables: Tables, texts: Texts, drafted: Drafted) -> jnp.ndarray:
        """By the training code, what `drafted.compared` holds by the decoding code."""
        ...

    def trained(self, params: Params, tables: Tables, texts: Texts) -> Trained:
        """The training metrics on some texts."""
        ...

    def drafts(self, params: Params, target: Target, target_params: Params, texts: Texts) -> Drafted:
        """What the decoding code drafts at each anchor."""
        ...
