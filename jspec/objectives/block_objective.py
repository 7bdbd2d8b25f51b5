"""What the losses of all drafters with a DFlash backbone have in common: random blocks of a batch."""

import dataclasses

import jax
from jaxtyping import Array, Int, Key

from jspec.drafters.dflash_net import DFlashConfig
from jspec.features import layer_outputs
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.blocks import Blocks, choose_anchors, draft_weights
from jspec.objectives.frozen import Tables
from jspec.objectives.terms import Terms


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockObjective:
    """A loss over blocks at random anchors. A method is one by saying what its `terms` are.

    Call it with the drafter's params, the target's tables, a batch and a key, or `terms` with given anchors.
    """

    config: DFlashConfig
    num_anchors: int = 512
    gamma: float | None = None  # draft token d counts exp(-d / gamma); None = all alike
    chunk_blocks: int = 128  # blocks whose logits are in memory at a time
    recompute: bool = False  # the block pass again in the backward pass, instead of keeping its activations

    def __post_init__(self) -> None:
        for name in ("num_anchors", "chunk_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        draft_weights(self.config.longest_draft, self.gamma)

    @property
    def captured(self) -> tuple[str, ...]:
        """What a batch's features hold: here the states that the drafter reads."""
        return layer_outputs(self.config.target_layer_ids)

    def __call__(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        key: Key[Array, ""],
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss over anchors drawn with `key`, which is consumed; see `terms`."""
        return self.terms(params, target, batch, self.choose(batch, key), step)

    def choose(self, batch: TrainBatch, key: Key[Array, ""]) -> Blocks:
        """Random anchors of every row: `num_anchors`, or all that a short row can have. The key is consumed."""
        uniforms = jax.random.uniform(key, batch.ids.shape)
        return choose_anchors(batch, uniforms, num_anchors=min(self.num_anchors, batch.ids.shape[1] - 1))

    def terms(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        blocks: Blocks,
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss over given anchors.

        Args:
          params: leaves of the drafter, in the order of `jspec.drafters.dflash.dflash_leaves`.
          target: embedding and head; `DraftTables` for a reduced vocabulary.
          batch: tokens and features, as `captured` names them.
          blocks: anchors.
          step: update that this batch belongs to, counted from 0.

        Raises:
          ValueError: features of another width, or tables of another vocabulary.
        """
        raise NotImplementedError
