"""DFlash and DFlash 2 in the check."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash import DFlash, check_target, dflash_leaves, dflash_net
from jspec.drafters.dflash_net import DFlashConfig
from jspec.features import layer_outputs
from jspec.net import Leaf, Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.block_pass import training_hidden
from jspec.objectives.blocks import Blocks, block_targets
from jspec.objectives.dflash import DFlashObjective, SelectorTerm
from jspec.objectives.draft_rows import row_logits, training_embed
from jspec.objectives.frozen import Tables
from jspec.sampling import empty_table
from jspec.targets.config import DecoderConfig
from jspec.targets.target import Target
from jspec.targets.view import TargetView
from jspec_train.check.method import Drafted, Input, Trained
from jspec_train.check.paged import shared_context, whole_text
from jspec_train.check.predictions import Predictions, predictions_of
from jspec_train.check.texts import Texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockMethod:
    """See `jspec_train.check.method.CheckedMethod`."""

    drafter: DFlash

    layers_key = "target_layer_ids"
    reads_tokens = False
    # Leaves that a fresh drafter has as zeros; see `jspec.drafters.dflash_init`.
    may_be_zero = ("bias", "kernel_projection", "successor_codebook")
    compared = "hidden states"

    @property
    def config(self) -> DFlashConfig:
        """Of the network."""
        return self.drafter.config

    @property
    def decoder(self) -> DecoderConfig:
        """Of its layers."""
        return self.config.decoder

    @property
    def names(self) -> tuple[str, ...]:
        """Outputs of layers."""
        return layer_outputs(self.config.target_layer_ids)

    @property
    def captured(self) -> tuple[str, ...]:
        """The loss asks for tokens, not for the target's distribution."""
        return self.names

    @property
    def block_size(self) -> int:
        """Anchor and masks."""
        return self.config.block_size

    @property
    def mask_token_id(self) -> int | None:
        """Stands for unknown tokens."""
        return self.config.mask_token_id

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that are drafted; None = all."""
        return self.config.draft_vocab_size

    def row_name(self, row: int) -> str:
        """Of a block."""
        return f"row {row} of the block"

    def leaves(self) -> tuple[Leaf, ...]:
        """The drafter's arrays."""
        return dflash_leaves(self.config, jnp.dtype(jnp.float32))

    def draft_ids(self, params: Params) -> Int[Array, "draft_vocabulary"] | None:
        """Target ids of a reduced vocabulary."""
        ids = dflash_net(self.config, params).draft_ids
        return None if ids is None else ids[...]

    def check_target(self, view: TargetView) -> None:
        """See `jspec.drafters.dflash.check_target`."""
        check_target(self.config, view)

    def objective(self) -> DFlashObjective:
        """The training loss of the drafter's backbone."""
        return DFlashObjective(config=self.config, chunk_blocks=16, selector=SelectorTerm(alpha=0.0))

    def check_objective(self) -> None:
        """See `Method.check_objective`."""
        self.objective()

    def predictions(
        self,
        params: Params,
        tables: Tables,
        batch: TrainBatch,
        blocks: Blocks,
        labels: Int[Array, "texts anchors drafts"],
        given: Input,
    ) -> Predictions:
        """The drafted rows of every block. They read no token of the text but the anchor."""
        config = self.config
        if given.rope is not None:
            config = dataclasses.replace(config, decoder=self.decoder.with_rope(given.rope))
        return _predictions(config, params, tables, batch, blocks, labels, jnp.int32(given.ahead))

    def computed(self, params: Params, tables: Tables, texts: Texts, drafted: Drafted) -> jnp.ndarray:
        """Hidden states of every block, by dense attention over known text."""
        return _dense_hidden(self.config, params, tables, texts.batch, texts.blocks)

    def trained(self, params: Params, tables: Tables, texts: Texts) -> Trained:
        """The training metric; DFlash 2's is measured by its walk, with coverage and selector apart."""
        terms = jax.jit(self.objective().terms)(params, tables, texts.batch, texts.blocks)
        figures: dict[str, Any] = {name: np.asarray(value).tolist() for name, value in terms.means().items()}
        if "walk_accept_length" not in figures:
            return Trained(accept_length=figures["accept_length"], figures=figures, said="")
        said = (
            f"coverage {_row(figures['coverage'])}, selector accuracy {_row(figures['selector_accuracy'])}"
            f", accept length {figures['oracle_accept_length']:.2f} with the best choice of candidates"
        )
        return Trained(accept_length=figures["walk_accept_length"], figures=figures, said=said)

    def drafts(self, params: Params, target: Target, target_params: Params, texts: Texts) -> Drafted:
        """Absorbs each text's features into pages, and drafts greedily at each anchor."""
        batch, anchors = texts.batch, texts.blocks.anchors
        rows = [
            _one_text(self.drafter, target, params, target_params, *row)
            for row in zip(batch.ids, batch.features, anchors, strict=True)
        ]
        hidden, tokens = zip(*rows, strict=True)
        return Drafted(tokens=np.stack(tokens), compared=np.stack(hidden))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _one_text(
    drafter: DFlash,
    target: Target,
    params: Params,
    target_params: Params,
    ids: Int[Array, "tokens"],
    features: Float[Array, "tokens width"],
    anchors: Int[Array, "anchors"],
) -> tuple[Float[Array, "anchors block hidden"], Int[Array, "anchors drafts"]]:
    count = anchors.shape[0]
    view, text = shared_context(target, target_params, ids, anchors)
    state = drafter.init(params, view, count)
    state, _ = drafter.absorb(params, view, state, jnp.zeros((1,), jnp.int32), text, whole_text(features))
    lanes = jnp.arange(count, dtype=jnp.int32)
    hidden = drafter.block_hidden(params, view, state, lanes, text)
    proposal = drafter.draft(params, view, state, lanes, text, empty_table(count, target.vocab_size, 1))
    within = jax.lax.broadcasted_iota(jnp.int32, proposal.tokens.shape, 1)
    return hidden, jnp.where(within < proposal.lengths[:, None], proposal.tokens, -1)


@functools.partial(jax.jit, static_argnums=0)
def _dense_hidden(
    config: DFlashConfig, params: Params, tables: Tables, batch: TrainBatch, blocks: Blocks
) -> Float[Array, "texts anchors block hidden"]:
    net = dflash_net(config, params)
    embed = training_embed(net, tables)

    def one(text: tuple[TrainBatch, Blocks]) -> Array:
        batch, blocks = jax.tree.map(lambda a: a[None], text)
        targets = block_targets(batch, blocks, block_size=config.block_size)
        return training_hidden(net, embed, batch, blocks, targets)[0]

    return jax.lax.map(one, (batch, blocks))


@functools.partial(jax.jit, static_argnames="config")
def _predictions(
    config: DFlashConfig,
    params: Params,
    tables: Tables,
    batch: TrainBatch,
    blocks: Blocks,
    labels: Int[Array, "texts anchors drafts"],
    bound: Int[Array, ""],
) -> Predictions:
    """Of every drafted row, one text at a time."""
    net = dflash_net(config, params)
    embed = training_embed(net, tables)

    def one(text: tuple[TrainBatch, Blocks, Array]) -> Predictions:
        batch, blocks, labels = jax.tree.map(lambda a: a[None], text)
        targets = block_targets(batch, blocks, block_size=config.block_size)
        # The training code with its bound moved: anchors further on, and the tokens moved with them, so
        # that only what is visible changes. Positions of the block are those of the real anchors.
        moved = dataclasses.replace(batch, ids=jnp.roll(batch.ids, bound, axis=1))
        further = dataclasses.replace(blocks, anchors=jnp.where(blocks.keep, blocks.anchors + bound, 0))
        hidden = training_hidden(net, embed, moved, further, targets)[0, :, 1:]
        return predictions_of(row_logits(config, tables, hidden), labels[0], tables)

    return jax.lax.map(one, (batch, blocks, labels))


def _row(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
