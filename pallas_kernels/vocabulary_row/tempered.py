"""What sampling needs of rows of logits."""

from jaxtyping import Array, Float, Int

from pallas_kernels.pytree import pytree


@pytree
class Tempered:
    """Rows divided by their temperatures. A token is kept iff its logit is at least the floor."""

    # Of sampled rows: (logit - the best) / temperature; greedy ones are unchanged.
    logits: Float[Array, "rows vocabulary"]
    log_normaliser: Float[Array, "rows"]  # log of the summed exponentials of the kept logits; greedy: 0
    floor: Float[Array, "rows"]  # -inf where nothing is filtered, and on greedy rows
    drawn: Int[Array, "rows"] | None  # what the row's coin draws, greedy: the best id; None without coins
