"""The paged pool of committed keys and values: opaque outside `pallas_kernels`.

Keys lie feature-major and values row-major inside a page, so that both products of attention
reduce over an axis that is not the innermost one and vectorise over the innermost one.

bfloat16 is stored as its bits. XLA's CPU backend (jax 0.10) slices and updates bfloat16 arrays in
float32, and a pool in float32 on every step took several times as long as the rest of it; 16-bit
integers are moved as they are.

On a TPU the innermost axis of an array is filled up to 128. Heads of another size would waste memory
there, and XLA would not leave such a pool in the layout that a kernel reads, but copy it for every
call. So there values lie feature-major as well, unless the head size is a multiple of 128.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.pytree import pytree, static
from pallas_kernels.registers import LANES

# Of the page size for kernels of a TPU: other pages would be padded in HBM, and the pool copied for each
# call.
PAGE_MULTIPLE = LANES


@pytree
class Pages:
    """Keys and values of every layer of a group, cut into pages that lanes own through a page table."""

    stored_k: Shaped[Array, "layers pages kv_heads head_size page_size"]  # uint16 stands for bfloat16
    stored_v: Shaped[Array, "layers pages kv_heads outer inner"]  # page_size, head_size; or the other way
    values_by_feature: bool = static(default=False)
    whole: bool = static(default=False)  # on a mesh, every device has all KV heads

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.stored_k.shape[-1]

    @property
    def value_size(self) -> int:
        """Head size of the values."""
        return self.stored_v.shape[-2 if self.values_by_feature else -1]

    @property
    def num_pages(self) -> int:
        """Pages that lanes can own, in every layer."""
        return self.stored_k.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Of keys and values."""
        return jnp.dtype(jnp.bfloat16) if self.stored_k.dtype == jnp.uint16 else self.stored_k.dtype

    @property
    def k(self) -> Float[Array, "layers pages kv_heads head_size page_size"]:
        """All keys as numbers: for tests, because it copies a bfloat16 pool."""
        return _numbers(self.stored_k)

    @property
    def v(self) -> Float[Array, "layers pages kv_heads page_size head_size"]:
        """All values as numbers; see `k`."""
        return _by_row(_numbers(self.stored_v), self)


def _by_row(values: Shaped[Array, "*outer a b"], pages: Pages) -> Shaped[Array, "*outer page_size head_size"]:
    return values.swapaxes(-1, -2) if pages.values_by_feature else values


def _numbers(stored: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def allocate(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: DTypeLike,
    platform: str | None = None,
    whole: bool = False,
) -> Pages:
    """A pool of zeros: `num_pages` pages of `page_size` tokens for each of `num_layers` layers.

    Args:
      num_layers: of the group.
      num_pages: that lanes can own, in every layer.
      page_size: tokens per page; a multiple of PAGE_MULTIPLE for the kernels of a TPU.
      num_kv_heads: per layer.
      head_size: of keys and of values.
      dtype: of both.
      platform: whose layout the pool gets; None = that of the mesh in use, or JAX's default backend.
      whole: on a mesh, every device has all KV heads.
    """
    sizes = {
        "num_pages": num_pages,
        "page_size": page_size,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}; pass the group's real size")
    heads = (num_layers, num_pages, num_kv_heads)
    stored = jnp.uint16 if jnp.dtype(dtype) == jnp.bfloat16 else dtype
    if platform is None:
        device = jax.sharding.get_abstract_mesh().abstract_device
        platform = jax.default_backend() if device is None else device.platform
    by_feature = platform == "tpu" and head_size % 128 != 0
    values = (head_size, page_size) if by_feature else (page_size, head_size)
    return Pages(
        stored_k=jnp.zeros((*heads, head_size, page_size), stored),
        stored_v=jnp.zeros((*heads, *values), stored),
        values_by_feature=by_feature,
        whole=whole,
    )


def read_page(
    pages: Pages, layer: int | Int[Array, ""], page: Int[Array, ""]
) -> tuple[Float[Array, "kv_heads head_size page_size"], Float[Array, "kv_heads page_size head_size"]]:
    """Keys and values of one page, as they lie in the pool."""
    k_pool, v_pool = pages.stored_k, pages.stored_v
    k = jax.lax.dynamic_slice(k_pool, (layer, page, 0, 0, 0), (1, 1, *k_pool.shape[2:]))[0, 0]
    if v_pool.size > jnp.iinfo(jnp.int32).max:
        v = jax.lax.dynamic_slice(v_pool, (layer, page, 0, 0, 0), (1, 1, *v_pool.shape[2:]))[0, 0]
    else:
        # On a CPU the copy of a slice is vectorised over the innermost axis, if that is long enough: the
        # one of v is not, but a flat view is.
        size = math.prod(v_pool.shape[2:])
        v = jax.lax.dynamic_slice(v_pool.reshape(-1), ((layer * v_pool.shape[1] + page) * size,), (size,))
        v = v.reshape(v_pool.shape[2:])
    return _numbers(k), _by_row(_numbers(v), pages)


def gather_rows(
    pages: Pages, layer: int | Int[Array, ""], page_table: Int[Array, "lanes columns"], capacity: int
) -> tuple[
    Float[Array, "lanes capacity kv_heads head_size"], Float[Array, "lanes capacity kv_heads head_size"]
]:
    """Keys and values of the first `capacity` positions of each lane, dense: for tests and oracles."""
    columns = -(-capacity // pages.page_size)
    if columns > page_table.shape[1]:
        raise ValueError(
            f"capacity: expected at most {page_table.shape[1] * pages.page_size} rows, got {capacity}; "
            "the page table has no columns for more"
        )
    k = jnp.moveaxis(_numbers(pages.stored_k[layer][page_table[:, :columns]]), (2, 4), (3, 2))
    v = jnp.moveaxis(_by_row(_numbers(pages.stored_v[layer][page_table[:, :columns]]), pages), 2, 3)
    lanes = page_table.shape[0]
    flat = (lanes, columns * pages.page_size)
    return (
        k.reshape(*flat, *k.shape[3:])[:, :capacity],
        v.reshape(*flat, *v.shape[3:])[:, :capacity],
    )
