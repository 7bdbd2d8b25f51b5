"""The compiled programs of an engine: one per (kind, bucket), never more."""

import collections
import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jspec.buckets import Bucket
from jspec.cache import Cache, Group
from jspec.decode import Executed, Method, Models, Report, Round, State, execute, propose, settle
from jspec.drafters.protocol import Text
from jspec.grammar.masks import Masks
from jspec.round import Nodes
from jspec.sampling import SettingsRow, admit_history, write_row
from jspec.slots import Slots
from pallas_kernels.pytree import pytree


@pytree
class Admission:
    """A request as arrays, ready to be written into a slot."""

    slot: Int[Array | np.ndarray, ""]
    tokens: Int[
        Array | np.ndarray, "capacity"
    ]  # the prompt and what was emitted before a preemption, then zeros
    text_length: Int[Array | np.ndarray, ""]
    prompt_length: Int[Array | np.ndarray, ""]
    start: Int[Array | np.ndarray, ""]  # tokens whose pages the prefix cache had
    limit: Int[Array | np.ndarray, ""]
    draft_cap: Int[Array | np.ndarray, ""]
    min_confidence: Float[Array | np.ndarray, ""]
    page_rows: tuple[Int[Array | np.ndarray, "columns"], ...]  # page table row of each layer group
    settings: SettingsRow


def admit(state: State, admission: Admission) -> State:
    """Puts a request into its slot: committed up to its start, its whole text known."""
    slots, cache = state.slots, state.cache
    slot, tokens = jnp.asarray(admission.slot), jnp.asarray(admission.tokens)
    text_length, prompt_length = jnp.asarray(admission.text_length), jnp.asarray(admission.prompt_length)
    groups = tuple(
        Group(pages=group.pages, page_table=group.page_table.at[slot].set(row))
        for group, row in zip(cache.groups, admission.page_rows, strict=True)
    )
    return State(
        cache=Cache(groups=groups, lengths=cache.lengths.at[slot].set(admission.start)),
        drafter=state.drafter,
        slots=Slots(
            text=Text(
                tokens=slots.text.tokens.at[slot].set(tokens),
                lengths=slots.text.lengths.at[slot].set(text_length),
            ),
            prompt_lengths=slots.prompt_lengths.at[slot].set(prompt_length),
            known_lengths=slots.known_lengths.at[slot].set(text_length),
            limits=slots.limits.at[slot].set(admission.limit),
            draft_caps=slots.draft_caps.at[slot].set(admission.draft_cap),
            min_confidences=slots.min_confidences.at[slot].set(admission.min_confidence),
            live=slots.live.at[slot].set(True),
            table=write_row(slots.table, slot, admission.settings),
            history=admit_history(slots.history, slot, tokens, text_length, prompt_length),
        ),
    )


def halt(live: jax.Array, slot: jax.Array) -> jax.Array:
    """Ends a slot from outside: a stop string, or a caller who left."""
    return live.at[slot].set(False)


class Programs:
    """Jitted propose, execute and settle of one method, and the two small programs around them.

    `traces` counts how often each (kind, bucket) was traced; more than once is a fault.
    """

    def __init__(self, method: Method, mesh: Mesh | None = None):
        """Compiles nothing yet.

        Args:
          method: static.
          mesh: in use while the three programs run; None = one device.
        """
        self.method, self._mesh = method, mesh
        self.traces: collections.Counter[tuple[str, Bucket | None]] = collections.Counter()
        self._propose = jax.jit(self._counted("propose", propose), static_argnames="bucket")
        self._execute = jax.jit(self._counted("execute", execute), static_argnames="bucket")
        self._settle = jax.jit(
            self._counted("settle", settle), static_argnames="bucket", donate_argnames="state"
        )
        self._admit = jax.jit(admit, donate_argnums=0)
        self._halt = jax.jit(halt, donate_argnums=0)

    def _devices(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _counted(self, kind: str, program: Any) -> Any:
        def traced(*args: Any, bucket: Bucket, **kwargs: Any) -> Any:
            self.traces[kind, bucket] += 1
            return program(self.method, bucket, *args, **kwargs)

        traced.__name__ = kind  # what profiles and the compilation cache show
        return traced

    def propose(
        self,
        bucket: Bucket,
        models: Models,
        state: State,
        lanes: np.ndarray,
        certain_lengths: np.ndarray,
        budget: int,
    ) -> Round:
        """See `jspec.decode.propose`.

        Raises:
          ValueError: a budget that does not fit into the bucket.
        """
        most = bucket.nodes - int(np.sum(lanes >= 0))
        if not 0 <= budget <= most:
            raise ValueError(f"budget: expected 0 to {most} draft tokens in {bucket}, got {budget}")
        with self._devices():
            return self._propose(models, state, lanes, certain_lengths, np.int32(budget), bucket=bucket)

    def execute(
        self, bucket: Bucket, models: Models, nodes: Nodes, cache: Cache, lanes: np.ndarray
    ) -> Executed:
        """See `jspec.decode.execute`."""
        with self._devices():
            return self._execute(models, nodes, cache, lanes, bucket=bucket)

    def settle(
        self,
        bucket: Bucket,
        models: Models,
        round_: Round,
        executed: Executed,
        state: State,
        lanes: np.ndarray,
        masks: Masks | None,
    ) -> tuple[State, Report]:
        """See `jspec.decode.settle`; `state` is donated."""
        with self._devices():
            return self._settle(
                models, round_, executed, state=state, lanes=lanes, masks=masks, bucket=bucket
            )

    def admit(self, state: State, admission: Admission) -> State:
        """See `admit`; `state` is donated."""
        return self._admit(state, admission)

    def halt(self, state: State, slot: int) -> State:
        """Ends a slot; `state`'s live flags are donated."""
        slots = dataclasses.replace(state.slots, live=self._halt(state.slots.live, np.int32(slot)))
        return dataclasses.replace(state, slots=slots)
