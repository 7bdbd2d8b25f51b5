"""One update: gradients of a window of micro-batches over a mesh, and the optimizer."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.net import Leaf, Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.frozen import Tables
from jspec.objectives.terms import Terms
from jspec_train.optimizer import to_compute
from pallas_kernels.pytree import pytree

Capture = Callable[[Tables, TrainBatch], TrainBatch]


class Objective(Protocol):
    """What the step needs of an objective."""

    def choose(self, batch: TrainBatch, key: Key[Array, ""]) -> Any:
        """Whatever is random about a batch, as arrays whose first axis is the batch's rows."""
        ...

    def terms(
        self, params: Params, target: Any, batch: TrainBatch, chosen: Any, /, step: Int[Array, ""] | int = 0
    ) -> Terms:
        """The loss over these choices."""
        ...


@pytree
class TrainState:
    """Everything that an update changes."""

    step: Int[Array, ""]  # updates done: the one counter, of schedules, random numbers and checkpoints
    masters: Params  # float32, trainable leaves only
    optimizer: Any


@pytree
class StepReport:
    """What the host reads of an update."""

    terms: Terms
    grad_norm: Float[Array, ""]
    sound: Bool[Array, ""]  # False: loss or gradients are not finite, and nothing was changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """The pure functions of a training run. Arrays are arguments; this holds what is static."""

    objective: Objective
    optimizer: optax.GradientTransformation
    leaves: tuple[Leaf, ...]
    mesh: Mesh
    seed: int
    capture: Capture | None = None  # fills in the features of a batch that comes without
    frozen: frozenset[str] = frozenset({"embedding", "draft_ids"})  # paths of leaves that are not trained
    held_out: Objective | None = None  # of `evaluate`; None = the same objective

    @property
    def trainable(self) -> tuple[int, ...]:
        """Indices of the leaves that have a master."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.path not in self.frozen)

    def start(self, params: Params) -> TrainState:
        """The state before the first update, fully sharded over the mesh's `data` axis."""
        state = self.fresh(params)
        return jax.device_put(state, self.shardings(state))

    def fresh(self, params: Params) -> TrainState:
        """The same, wherever the parameters are."""
        # Copies: updates are given the state to overwrite.
        masters = tuple(jnp.array(params[i], jnp.float32) for i in self.trainable)
        return TrainState(
            step=jnp.zeros((), jnp.int32), masters=masters, optimizer=self.optimizer.init(masters)
        )

    def shardings(self, state: TrainState) -> TrainState:
        """Where each array of the state lives: split along its first axis that the devices divide."""
        devices = self.mesh.shape["data"]

        def of(array: Any) -> NamedSharding:
            axis = next((i for i, size in enumerate(array.shape) if size % devices == 0 and size), None)
            spec = [None if i != axis else "data" for i in range(len(array.shape))]
            return NamedSharding(self.mesh, PartitionSpec(*spec))

        return jax.tree.map(of, state)

    def params(self, state: TrainState, frozen: Params) -> Params:
        """All leaves in the dtypes that they are used in; `frozen` are the ones without a master."""
        return self._join(state.masters, frozen)

    def update(
        self, state: TrainState, frozen: Params, target: Tables, window: Sequence[TrainBatch]
    ) -> tuple[TrainState, StepReport]:
        """One update from the exact mean over all micro-batches of `window` and all devices.

        An update whose loss or gradients are not finite changes nothing but is reported.
        """
        keys = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), state.step), len(window))
        total, grads = self._gradients(state, frozen, target, window[0], keys[0])
        if len(window) > 1:

            def another(sums: Any, item: tuple[TrainBatch, Array]) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, sums, self._gradients(state, frozen, target, *item)), None

            rest = jax.tree.map(lambda *arrays: jnp.stack(arrays), *window[1:])
            (total, grads), _ = jax.lax.scan(another, (total, grads), (rest, keys[1:]))
        grads = jax.tree.map(lambda g: g / jnp.maximum(total.denominator, 1e-9), grads)
        norm = optax.tree.norm(grads)
        sound = jnp.isfinite(total.numerator) & jnp.isfinite(norm)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.masters)
        masters = cast(Params, optax.apply_updates(state.masters, updates))
        new = TrainState(step=state.step + 1, masters=masters, optimizer=optimizer)
        new = jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, state)
        return new, StepReport(terms=total, grad_norm=norm, sound=sound)

    def evaluate(
        self, state: TrainState, frozen: Params, target: Tables, batch: TrainBatch, key: Key[Array, ""]
    ) -> Terms:
        """The loss of a batch, with choices that depend on `key` alone; touches no random state of training."""
        objective = self.held_out or self.objective
        batch = batch if self.capture is None else self.capture(target, batch)
        chosen = objective.choose(batch, key)

        def local(
            masters: Params, frozen: Params, target: Tables, batch: Any, chosen: Any, step: Any
        ) -> Terms:
            return objective.terms(self._join(masters, frozen), target, batch, chosen, step)

        return self._over_data(local)(state.masters, frozen, target, batch, chosen, state.step)

    def _gradients(
        self, state: TrainState, frozen: Params, target: Tables, batch: TrainBatch, key: Key[Array, ""]
    ) -> tuple[Terms, Params]:
        batch = batch if self.capture is None else self.capture(target, batch)
        chosen = self.objective.choose(batch, key)

        def local(masters: Params, frozen: Params, target: Tables, batch: Any, chosen: Any, step: Any) -> Any:
            def numerator(masters: Params) -> tuple[Array, Terms]:
                terms = self.objective.terms(self._join(masters, frozen), target, batch, chosen, step)
                return terms.numerator, terms

            (_, terms), grads = jax.value_and_grad(numerator, has_aux=True)(masters)
            return terms, grads

        return self._over_data(local)(state.masters, frozen, target, batch, chosen, state.step)

    def _join(self, masters: Params, frozen: Params) -> Params:
        trained, kept = iter(masters), iter(frozen)
        held = tuple(next(kept if leaf.path in self.frozen else trained) for leaf in self.leaves)
        return to_compute(held, self.leaves)

    def _over_data(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Runs on each device's rows of the batch and adds up; parameters are gathered for it."""
        rows, whole = PartitionSpec("data"), PartitionSpec()

        def summed(*arguments: Any) -> Any:
            return jax.lax.psum(function(*arguments), "data")

        return jax.shard_map(
            summed,
            mesh=self.mesh,
            in_specs=(whole, whole, whole, rows, rows, whole),
            out_specs=whole,
            axis_names={"data"},
            check_vma=False,
        )
