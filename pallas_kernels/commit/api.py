"""Accepted rows of all layers enter the pool, in one call and in place."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.pages import PAGE_MULTIPLE, Pages
from pallas_kernels.commit import reference, tpu


def commit_rows(
    pages: Pages,
    k_new: Float[Array, "layers nodes kv_heads head_size"],
    v_new: Float[Array, "layers nodes kv_heads head_size"],
    path: Int[Array, "lanes commits"],
    page_table: Int[Array, "lanes columns"],
    lengths: Int[Array, "lanes"],
    *,
    implementation: str | None = None,
) -> Pages:
    """Writes accepted nodes behind each lane's committed tokens, in place if `pages` is donated.

    The lane's i-th new token goes to position p = lengths + i: page page_table[p // page_size], row
    p % page_size, in every layer. Nothing else of the pool changes.

    Args:
      pages: the pool.
      k_new: keys of all nodes of the round.
      v_new: values of all nodes of the round.
      path: node that becomes the lane's i-th new token; -1 = none, and nothing follows a -1.
      page_table: pages of each lane, in the order of its positions.
      lengths: committed tokens per lane before this call.
      implementation: as in `pallas_kernels.attention.api.attend`.

    Raises:
      ValueError: an unknown implementation, or one that these pages cannot have.
    """
    if implementation not in (None, "xla", "tpu"):
        raise ValueError(
            f'implementation: expected None, "xla" or "tpu", got {implementation!r}; pass one of them'
        )
    fits = pages.page_size % PAGE_MULTIPLE == 0
    if implementation == "tpu" and not fits:
        raise ValueError(
            f'pages: expected a page size that is a multiple of {PAGE_MULTIPLE} for implementation="tpu", '
            f'got {pages.page_size}; allocate such pages, or use "xla"'
        )
    if pages.stored_k.shape[0] == 0 or path.size == 0:
        return pages
    arguments = (pages, k_new, v_new, path, page_table, lengths)
    if implementation == "tpu":
        return tpu.commit_rows(*arguments)
    if implementation == "xla" or not fits:
        return reference.commit_rows(*arguments)
    return jax.lax.platform_dependent(*arguments, tpu=tpu.commit_rows, default=reference.commit_rows)
