"""The modules of a decoder-only language model; one table of axis names gives shapes and sharding."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.heads import attend
from jspec.targets.config import DecoderConfig, LayerKind
from jspec.targets.rope import rotate, rotation
from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight

Rotation = tuple[Array, Array]  # cosine and sine of every node, [nodes, head_size / 2]
See = Callable[[Array, Array, Array], Array]  # queries, keys and values of the nodes to what they see


def axis_sizes(config: DecoderConfig) -> dict[str, int]:
    """Length of each logical axis; `jspec.sharding` says which of them are split over a mesh."""
    return {
        "vocabulary": config.vocab_size,
        "hidden": config.hidden_size,
        "embedding_and_hidden": 2 * config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_heads * config.head_size,
        "kv_heads": config.stored_kv_heads * config.head_size,
        "head_size": config.head_size,
    }


def _weight(config: DecoderConfig, dtype: jnp.dtype, *axes: str) -> nnx.Param[Any]:
    sizes = axis_sizes(config)
    return nnx.Param(jnp.zeros([sizes[axis] for axis in axes], dtype), axes=axes)


def norm_weight(config: DecoderConfig, axis: str = "hidden") -> nnx.Param[Any]:
    return _weight(config, jnp.dtype(jnp.float32), axis)


def project(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "inputs outputs"],
    bias: Float[Array, "outputs"] | None = None,
) -> Float[Array, "rows outputs"]:
    """x @ weight + bias, summed in float32, in x's dtype.

    Below float32 a single row is computed twice: XLA's CPU backend has no fast one-row product for
    those types (measured here with bfloat16: 2 GB/s of weights against 28).
    """
    return project_float32(x, weight, bias).astype(x.dtype)


def project_float32(
    x: Float[Array, "rows inputs"],
    weight: Float[Array, "inputs outputs"],
    bias: Float[Array, "outputs"] | None = None,
) -> Float[Array, "rows outputs"]:
    """As `project`, without the rounding at the end."""
    rows = x.shape[0]
    if rows == 1 and x.dtype != jnp.float32:
        x = jnp.concatenate([x, x])
    out = jnp.dot(x, weight, preferred_element_type=jnp.float32)[:rows]
    return out if bias is None else out + bias.astype(jnp.float32)[None]


def rms_norm(
    x: Float[Array, "*batch size"], weight: Float[Array, "size"], eps: float
) -> Float[Array, "*batch size"]:
    """x / sqrt(mean(x^2) + eps) * weight, in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


def rotations(config: DecoderConfig, positions: Int[Array, "nodes"]) -> dict[LayerKind, Rotation]:
    """How each kind of layer that there is turns the nodes at these positions."""
    return {kind: rotation(config.rope(kind), config.head_size, positions) for kind in config.windows}


def paged(config: DecoderConfig, pages: Pages, layer: int, sight: Sight) -> See:
    """Attention over one layer's committed pages and the nodes in flight."""

    def see(q: Array, k: Array, v: Array) -> Array:
        return attend(
            q, k, v, pages, layer, sight, scale=config.query_scale, softcap=config.attention_softcap
        )

    return see


def paged_layers(
    config: DecoderConfig, pages: Pages, sights: Mapping[LayerKind, Sight]
) -> Callable[[int], See]:
    """The same for layers of any kind, by their index, where all of them share one pool."""
    return lambda layer: paged(config, pages, layer, sights[config.layer_kinds[layer]])


class Attention(nnx.Module):
    """Grouped-query attention over the cache and the in-flight nodes.

    It reads `inputs`: the hidden state, or (EAGLE-3) an embedding and the hidden state side by side.
    """

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype, inputs: str = "hidden"):
        self.config = config
        self.query = _weight(config, dtype, inputs, "heads")
        self.key = _weight(config, dtype, inputs, "kv_heads")
        self.value = _weight(config, dtype, inputs, "kv_heads")
        self.output = _weight(config, dtype, "heads", "hidden")
        self.query_bias = _weight(config, dtype, "heads") if config.qkv_bias else None
        self.key_bias = _weight(config, dtype, "kv_heads") if config.qkv_bias else None
        self.value_bias = _weight(config, dtype, "kv_heads") if config.qkv_bias else None
        self.output_bias = _weight(config, dtype, "hidden") if config.output_bias else None
        self.query_norm = norm_weight(config, "head_size") if config.query_key_norm else None
        self.key_norm = norm_weight(config, "head_size") if config.query_key_norm else None

    def __call__(
        self, x: Array, rotation: Rotation, see: See, kv_dtype: Any = None
    ) -> tuple[Array, Array, Array]:
        """Returns the output [nodes, hidden] and the nodes' keys and values, in `kv_dtype` if given.

        They are rounded before they are attended to: what a node sees in flight is what the next
        round will read from the cache.
        """
        config, nodes = self.config, x.shape[0]

        def heads(weight: Any, bias: Any, count: int) -> Array:
            out = project(x, weight[...], None if bias is None else bias[...])
            return out.reshape(nodes, count, config.head_size)

        q = heads(self.query, self.query_bias, config.num_heads)
        k = heads(self.key, self.key_bias, config.stored_kv_heads)
        v = heads(self.value, self.value_bias, config.stored_kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            q = rms_norm(q, self.query_norm[...], config.norm_eps)
            k = rms_norm(k, self.key_norm[...], config.norm_eps)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        if kv_dtype is not None:
            k, v = k.astype(kv_dtype), v.astype(kv_dtype)
        out = see(q, k, v)
        bias = None if self.output_bias is None else self.output_bias[...]
        return project(out.reshape(nodes, -1), self.output[...], bias), k, v


class Mlp(nnx.Module):
    """Gated feed-forward layer."""

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype):
        self.activation = config.activation
        self.gate = _weight(config, dtype, "hidden", "mlp")
        self.up = _weight(config, dtype, "hidden", "mlp")
        self.down = _weight(config, dtype, "mlp", "hidden")
        self.gate_bias = _weight(config, dtype, "mlp") if config.mlp_bias else None
        self.up_bias = _weight(config, dtype, "mlp") if config.mlp_bias else None
        self.down_bias = _weight(config, dtype, "hidden") if config.mlp_bias else None

    def __call__(self, x: Array) -> Array:
        gate, up, down = (
            (weight[...], None if bias is None else bias[...])
            for weight, bias in (
                (self.gate, self.gate_bias),
                (self.up, self.up_bias),
                (self.down, self.down_bias),
            )
        )
        gated = project_float32(x, *gate)
        gated = jax.nn.silu(gated) if self.activation == "silu" else jax.nn.gelu(gated, approximate=True)
        return project((gated * project_float32(x, *up)).astype(x.dtype), *down)


class Layer(nnx.Module):
    """One decoder layer: residual attention, residual MLP, each behind a norm (Gemma: between two)."""

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype):
        self.eps = config.norm_eps
        self.attention_norm = norm_weight(config)
        self.attention = Attention(config, dtype)
        self.attention_out_norm = norm_weight(config) if config.sandwich_norms else None
        self.mlp_norm = norm_weight(config)
        self.mlp = Mlp(config, dtype)
        self.mlp_out_norm = norm_weight(config) if config.sandwich_norms else None

    def __call__(
        self, x: Array, rotation: Rotation, see: See, kv_dtype: Any = None
    ) -> tuple[Array, Array, Array]:
        """Returns the layer's output and the nodes' keys and values."""
        normed = rms_norm(x, self.attention_norm[...], self.eps)
        out, k, v = self.attention(normed, rotation, see, kv_dtype)
        if self.attention_out_norm is not None:
            out = rms_norm(out, self.attention_out_norm[...], self.eps)
        x = x + out
        out = self.mlp(rms_norm(x, self.mlp_norm[...], self.eps))
        if self.mlp_out_norm is not None:
            out = rms_norm(out, self.mlp_out_norm[...], self.eps)
        return x + out, k, v


class Decoder(nnx.Module):
    """All weights of a target. Matrices are [in, out]: the layout that decodes fastest on a CPU.

    A tied model holds one table, [hidden, vocabulary], and reads embeddings as its columns: a second
    copy of it would be a fifth of a small model.
    """

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype):
        self.config = config
        self.head = _weight(config, dtype, "hidden", "vocabulary")
        self.embedding = None if config.tied_head else _weight(config, dtype, "vocabulary", "hidden")
        self.layers = nnx.List([Layer(config, dtype) for _ in range(config.num_layers)])
        self.norm = norm_weight(config)

    def embed(self, ids: Array) -> Array:
        """[*batch] ids to [*batch, hidden], scaled. Ids outside the vocabulary give NaN."""
        flat = ids.reshape(-1)
        if self.embedding is None:
            # One gather of [rows, hidden]: a transposed [hidden, rows] would hand its column-major layout
            # down the residual stream, and XLA's CPU backend has no fast products for that.
            table = self.head[...]
            rows = jax.vmap(lambda i: jnp.take(table, i, axis=1, mode="fill"))(flat)
        else:
            rows = jnp.take(self.embedding[...], flat, axis=0, mode="fill")
        if self.config.embedding_scale != 1.0:
            rows = rows * jnp.asarray(self.config.embedding_scale, rows.dtype)
        return rows.reshape(*ids.shape, -1)

    def final_norm(self, x: Array) -> Array:
        """What the head reads."""
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def logits(self, hidden: Array) -> Array:
        """[rows, hidden] after the final norm to float32 [rows, vocabulary]."""
        out = project_float32(hidden, self.head[...])
        cap = self.config.final_softcap
        return out if cap is None else cap * jnp.tanh(out / cap)
