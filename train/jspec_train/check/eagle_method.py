"""EAGLE, EAGLE-3 and P-EAGLE in the check.

An anchor is token a, the last that is known. The row that drafts begins with the pair (feature a - 1, token
a), and its depth d predicts token a + d + 1: see `jspec.objectives.rollouts`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.drafters.eagle import Eagle, check_target
from jspec.drafters.eagle_net import EagleConfig, EagleNet, eagle_leaves, eagle_net
from jspec.drafters.protocol import Committed
from jspec.net import Leaf, Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.blocks import Blocks, block_targets
from jspec.objectives.depth_samples import DepthSample
from jspec.objectives.eagle import EagleObjective
from jspec.objectives.eagle3 import Eagle3Objective
from jspec.objectives.eagle_pass import first_pass, rollouts
from jspec.objectives.frozen import Tables
from jspec.objectives.peagle import PEagleObjective, parallel_states
from jspec.sampling import empty_table
from jspec.targets.config import DecoderConfig
from jspec.targets.target import Target
from jspec.targets.view import TargetView
from jspec_train.check.method import Drafted, Input, Trained
from jspec_train.check.paged import shared_context, whole_text
from jspec_train.check.predictions import Predictions, predictions_of
from jspec_train.check.texts import Texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleMethod:
    """See `jspec_train.check.method.CheckedMethod`. The drafter has to draft a chain."""

    drafter: Eagle

    layers_key = "eagle_aux_hidden_state_layer_ids"
    reads_tokens = True
    may_be_zero = ("bias",)
    compared = "probabilities of the drafted tokens"

    @property
    def config(self) -> EagleConfig:
        """Of the network."""
        return self.drafter.config

    @property
    def decoder(self) -> DecoderConfig:
        """Of its layers."""
        return self.config.decoder

    @property
    def names(self) -> tuple[str, ...]:
        """What fc fuses, or EAGLE's one feature."""
        return self.config.features

    @property
    def captured(self) -> tuple[str, ...]:
        """With what the target's head reads, whose distribution is learned."""
        return self.objective().captured

    @property
    def block_size(self) -> int:
        """The anchor and what is drafted after it."""
        return 1 + self.drafter.draft_length

    @property
    def mask_token_id(self) -> int | None:
        """P-EAGLE's."""
        return self.config.mask_token_id

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that are drafted; None = all."""
        return self.config.draft_vocab_size

    def row_name(self, row: int) -> str:
        """A row drafts a token."""
        return f"draft token {row + 1}"

    def leaves(self) -> tuple[Leaf, ...]:
        """The drafter's arrays."""
        return eagle_leaves(self.config, jnp.dtype(jnp.float32))

    def draft_ids(self, params: Params) -> Int[Array, "draft_vocabulary"] | None:
        """Target ids of a reduced vocabulary."""
        ids = eagle_net(self.config, params).draft_ids
        return None if ids is None else ids[...]

    def check_target(self, view: TargetView) -> None:
        """See `jspec.drafters.eagle.check_target`."""
        check_target(self.config, view)

    def objective(self) -> EagleObjective | Eagle3Objective | PEagleObjective:
        """The training loss, as deep as what is drafted."""
        config, depths = self.config, self.drafter.draft_length
        if config.kind == "eagle":
            return EagleObjective(config=config)
        if config.mask_token_id is not None:
            return PEagleObjective(config=config, depths=depths, ratio=1.0, least=1.0)
        return Eagle3Objective(config=config, depths=depths)

    def check_objective(self) -> None:
        """All are trained here."""

    def predictions(
        self,
        params: Params,
        tables: Tables,
        batch: TrainBatch,
        blocks: Blocks,
        labels: Int[Array, "texts anchors drafts"],
        given: Input,
    ) -> Predictions:
        """Every depth of the rows that begin at the anchors, fed with the tokens of the text."""
        config = self.config
        if given.rope is not None:
            config = dataclasses.replace(config, decoder=self.decoder.with_rope(given.rope))
        read = dataclasses.replace(batch, ids=jnp.roll(batch.ids, -given.tokens, axis=1))
        return _predictions(config, params, tables, read, blocks, labels, None, jnp.int32(given.ahead))

    def computed(self, params: Params, tables: Tables, texts: Texts, drafted: Drafted) -> jnp.ndarray:
        """Probabilities of the drafted tokens when the training code is fed with them."""
        tokens = jnp.asarray(drafted.tokens)
        path = jnp.maximum(tokens, 0)
        found = _predictions(self.config, params, tables, texts.batch, texts.blocks, path, path, jnp.int32(0))
        return jnp.where((tokens >= 0) & found.known, jnp.exp(-found.loss), 0)[..., None]

    def trained(self, params: Params, tables: Tables, texts: Texts) -> Trained:
        """Teacher-forced on the text; and the metrics of the loss, against the target's distribution."""
        objective = self.objective()
        batch = dataclasses.replace(texts.batch, features=texts.features(objective.captured))
        terms = jax.jit(objective.__call__)(params, tables, batch, jax.random.key(0))
        figures = {name: np.asarray(value).tolist() for name, value in terms.means().items()}
        targets = block_targets(texts.batch, texts.blocks, block_size=self.block_size)
        labels, mask = targets.labels[:, :, 1:], np.asarray(targets.mask)[:, :, 1:]
        found = self.predictions(params, tables, texts.batch, texts.blocks, labels, Input())
        right = np.asarray(found.correct & found.known) & mask
        lengths = np.logical_and.accumulate(right, axis=2).sum(axis=2)[np.asarray(texts.blocks.keep)]
        said = (
            f"{figures['accept_length']:.2f} against the target's own choice"
            if "accept_length" in figures
            else f"accuracy {np.ravel(figures['accuracy'])[0]:.2f} against the target's own choice"
        )
        return Trained(accept_length=float(lengths.mean()), figures=figures, said=said)

    def drafts(self, params: Params, target: Target, target_params: Params, texts: Texts) -> Drafted:
        """Absorbs each text's pairs into pages, and drafts greedily at each anchor."""
        batch, blocks = texts.batch, texts.blocks
        anchors = jnp.where(blocks.keep, blocks.anchors, 1)
        rows = [
            _one_text(self.drafter, target, params, target_params, *row)
            for row in zip(batch.ids, batch.features, anchors, strict=True)
        ]
        probs, tokens = zip(*rows, strict=True)
        return Drafted(tokens=np.stack(tokens), compared=np.stack(probs))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _one_text(
    drafter: Eagle,
    target: Target,
    params: Params,
    target_params: Params,
    ids: Int[Array, "tokens"],
    features: Float[Array, "tokens width"],
    anchors: Int[Array, "anchors"],
) -> tuple[Float[Array, "anchors drafts 1"], Int[Array, "anchors drafts"]]:
    count = anchors.shape[0]
    view, text = shared_context(target, target_params, ids, anchors)
    state = drafter.init(params, view, count)
    state, _ = drafter.absorb(params, view, state, jnp.zeros((1,), jnp.int32), text, whole_text(features))
    # Each lane's last pair once more: its state and first candidates are kept by slot.
    lanes = jnp.arange(count, dtype=jnp.int32)
    last = Committed(
        features=features[anchors - 1],
        positions=anchors - 1,
        path=lanes[:, None],
        context_lengths=anchors - 1,
        is_first=jnp.zeros((count,), bool),
    )
    state, _ = drafter.absorb(params, view, state, lanes, text, last)
    proposal = drafter.draft(params, view, state, lanes, text, empty_table(count, target.vocab_size, 1))
    drafted = jax.lax.broadcasted_iota(jnp.int32, proposal.tokens.shape, 1) < proposal.lengths[:, None]
    assert proposal.confidence is not None
    probs = jnp.where(drafted, proposal.confidence, 0)
    return probs[:, :, None], jnp.where(drafted, proposal.tokens, -1)


def _states(
    net: EagleNet,
    tables: Tables,
    batch: TrainBatch,
    blocks: Blocks,
    drafts: int,
    path: Int[Array, "rows anchors later"] | None,
    ahead: Int[Array, ""],
) -> Float[Array, "rows anchors drafts hidden"]:
    """States of the rows that begin at the anchors, at every depth that is drafted."""
    places = jnp.where(blocks.keep, blocks.anchors - 1, 0)
    if net.config.mask_token_id is None:
        first = first_pass(net, tables.embed, batch, batch.features, ahead)
        return jnp.stack(rollouts(net, tables.embed, batch, first, places, drafts, path, ahead), axis=2)
    rows, anchors = places.shape
    later, tokens = drafts - 1, batch.ids.shape[1]
    index = np.arange(anchors * later).reshape(anchors, later)
    own = np.where(np.tri(later, dtype=bool)[None], index[:, None, :], -1).reshape(anchors * later, later)
    sample = DepthSample(
        anchors=jnp.repeat(places, later, axis=1),
        depths=jnp.broadcast_to(jnp.tile(jnp.arange(1, drafts), anchors), (rows, anchors * later)),
        own=jnp.broadcast_to(jnp.asarray(own, jnp.int32), (rows, *own.shape)),
    )
    states = parallel_states(net, tables, batch, batch.features, sample, ahead)
    first = jnp.take_along_axis(states, places[:, :, None], axis=1)[:, :, None]
    return jnp.concatenate([first, states[:, tokens:].reshape(rows, anchors, later, -1)], axis=2)


@functools.partial(jax.jit, static_argnames="config")
def _predictions(
    config: EagleConfig,
    params: Params,
    tables: Tables,
    batch: TrainBatch,
    blocks: Blocks,
    labels: Int[Array, "texts anchors drafts"],
    path: Int[Array, "texts anchors drafts"] | None,
    ahead: Int[Array, ""],
) -> Predictions:
    """Of every drafted row, one text at a time; rows are fed with `path`, or with the text."""
    net = eagle_net(config, params)

    def one(text: tuple[TrainBatch, Blocks, Array, Array | None]) -> Predictions:
        batch, blocks, labels, path = jax.tree.map(lambda a: a[None], text)
        states = _states(net, tables, batch, blocks, labels.shape[2], path, ahead)
        logits = net.logits(states.reshape(-1, states.shape[3]), tables.logits)
        return predictions_of(logits.reshape(*labels.shape[1:], -1), labels[0], tables)

    return jax.lax.map(one, (batch, blocks, labels, path))
