"""A target that is a table: the next token's probabilities depend on the last token alone.

Every probability of every text is exact, so a test can say what the law of decoding must be. It
runs through the same programs as a real model; write a drafter, and check it against this first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.cache import Cache, GroupLayout, Pending
from jspec.round import Nodes
from jspec.targets.target import Hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableTarget:
    """Its parameters are `(table,)`: logits float32 [vocabulary, vocabulary], row = last token."""

    vocab_size: int
    max_context: int = 64

    @property
    def identity(self) -> str:
        """How refusals name it."""
        return f"table of {self.vocab_size} tokens"

    @property
    def hidden_size(self) -> int:
        """The hidden state is the token's unit vector."""
        return self.vocab_size

    @property
    def num_layers(self) -> int:
        """One: its output is the unit vector."""
        return 1

    @property
    def groups(self) -> tuple[GroupLayout, ...]:
        """A context group without layers: there is nothing to remember, but pages to follow."""
        return (GroupLayout(num_layers=0, num_kv_heads=1, head_size=1),)

    def forward(
        self,
        params: tuple[Array],
        nodes: Nodes,
        cache: Cache,
        lanes: Int[Array, "lanes"],
        capture: tuple[str, ...],
        *,
        max_queries: int,
    ) -> Hidden:
        """See `jspec.targets.target.Target.forward`; every capture name gives the unit vector."""
        hidden = self.embed(params, nodes.tokens)
        nothing = jnp.zeros((0, nodes.tokens.shape[0], 1, 1), jnp.float32)
        return Hidden(
            hidden=hidden,
            features=jnp.concatenate([hidden[:, :0], *(hidden for _ in capture)], axis=1),
            pending=(Pending(k=nothing, v=nothing),),
        )

    def embed(self, params: tuple[Array], ids: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """Unit vectors."""
        return jax.nn.one_hot(ids, self.vocab_size)

    def logits(
        self, params: tuple[Array], hidden: Float[Array, "rows hidden"]
    ) -> Float[Array, "rows vocabulary"]:
        """The table's rows."""
        return params[0][jnp.argmax(hidden, axis=1)]
