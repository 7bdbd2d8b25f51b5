"""A target from a GGUF file: config from its metadata, names and layout of its tensors.

Source: the conventions of llama.cpp's converter and loader (convert_hf_to_gguf.py, llama-model.cpp):
rows of Llama's q and k are permuted for interleaved rotation, Gemma's norms are stored as 1 + w,
Llama 3's rope rule is stored applied, as one divisor per frequency.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.gguf_file import GgufFile
from jspec.checkpoints.leaves import Origin, Plan
from jspec.targets.config import DecoderConfig, LayerKind, layer_kinds
from jspec.targets.decoder import decoder_leaves
from jspec.targets.rope import Divisors, Linear, Rope, Yarn, yarn_attention_factor

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_DIVISORS = "rope_freqs.weight"
_LAYER = {
    "attention_norm": "attn_norm.weight",
    "attention_out_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_out_norm": "post_ffw_norm.weight",
    "attention.query": "attn_q.weight",
    "attention.key": "attn_k.weight",
    "attention.value": "attn_v.weight",
    "attention.output": "attn_output.weight",
    "attention.query_bias": "attn_q.bias",
    "attention.key_bias": "attn_k.bias",
    "attention.value_bias": "attn_v.bias",
    "attention.output_bias": "attn_output.bias",
    "attention.query_norm": "attn_q_norm.weight",
    "attention.key_norm": "attn_k_norm.weight",
    "mlp.gate": "ffn_gate.weight",
    "mlp.up": "ffn_up.weight",
    "mlp.down": "ffn_down.weight",
    "mlp.gate_bias": "ffn_gate.bias",
    "mlp.up_bias": "ffn_up.bias",
    "mlp.down_bias": "ffn_down.bias",
}
_TOP = {"embedding": "token_embd.weight", "norm": "output_norm.weight"}
# Metadata under the architecture's name that the forward pass does not depend on.
_IGNORED = frozenset({"vocab_size", "rope.scaling.finetuned", "attention.causal"})


@dataclasses.dataclass(frozen=True)
class _Keys:
    """The architecture's own metadata; every key that is asked for counts as understood."""

    file: GgufFile
    architecture: str
    asked: set[str] = dataclasses.field(default_factory=set)

    def take(self, key: str) -> Any:
        self.asked.add(key)
        return self.file.value(f"{self.architecture}.{key}")

    def need(self, key: str) -> Any:
        value = self.take(key)
        if value is None:
            raise ValueError(
                f"{self.file.where}: expected metadata {self.architecture}.{key}, got none; "
                "convert the model again with a current llama.cpp"
            )
        return value

    def finish(self) -> None:
        start = f"{self.architecture}."
        for full in self.file.keys:
            key = full.removeprefix(start)
            if full.startswith(start) and key not in self.asked and key not in _IGNORED:
                raise ValueError(
                    f"{self.file.where}: expected no metadata {full}, got {self.file.value(full)!r}; "
                    "it may change the maths and is not supported"
                )


def config_from_gguf(file: GgufFile) -> DecoderConfig:
    """Reads the metadata of a llama, qwen2, qwen3 or gemma3 file.

    Raises:
      ValueError: on another architecture, missing or unknown metadata, or values that ask for maths
        that is not implemented.
    """
    architecture = file.value("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.where}: expected general.architecture {' or '.join(ARCHITECTURES)}, "
            f"got {architecture!r}; this architecture is not supported as a target"
        )
    keys = _Keys(file, architecture)
    hidden_size, num_heads = int(keys.need("embedding_length")), int(keys.need("attention.head_count"))
    num_layers = int(keys.need("block_count"))
    head_size = int(keys.take("attention.key_length") or hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.take(key) not in (None, head_size):
            raise ValueError(f"{file.where}: expected {architecture}.{key} {head_size}, got {keys.take(key)}")
    table = file.shapes.get(_TOP["embedding"])
    if table is None or len(table) != 2:
        raise ValueError(f"{file.where}: expected tensor {_TOP['embedding']!r} with two axes, got {table}")
    gemma = architecture == "gemma3"
    kinds, window = _layers(keys, num_layers, gemma=gemma)
    full_rope, window_rope = _ropes(keys, head_size, gemma=gemma)
    final_softcap = keys.take("final_logit_softcapping")
    if keys.take("attn_logit_softcapping"):
        raise ValueError(f"{file.where}: expected no {architecture}.attn_logit_softcapping; not supported")
    if keys.take("expert_count"):
        raise ValueError(f"{file.where}: expected a dense model, got {keys.take('expert_count')} experts")
    # llama.cpp knows the 27B by its depth: it alone scales queries by its hidden size per head.
    query_size = hidden_size / num_heads if gemma and num_layers == 62 else head_size
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=table[0],
        hidden_size=hidden_size,
        intermediate_size=int(keys.need("feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(keys.take("attention.head_count_kv") or num_heads),
        head_size=head_size,
        norm_eps=float(keys.need("attention.layer_norm_rms_epsilon")),
        max_context=int(keys.need("context_length")),
        full_rope=full_rope,
        window_rope=window_rope if window is not None else None,
        layer_kinds=kinds,
        window=window,
        activation="gelu_tanh" if gemma else "silu",
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        query_key_norm=architecture in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        tied_head="output.weight" not in file.tensors,
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        query_scale=query_size**-0.5,
        final_softcap=float(final_softcap) if final_softcap else None,
    )
    keys.finish()
    return config


def _layers(keys: _Keys, num_layers: int, *, gemma: bool) -> tuple[tuple[LayerKind, ...], int | None]:
    window, pattern = keys.take("attention.sliding_window"), keys.take("attention.sliding_window_pattern")
    if not window:
        return layer_kinds([False] * num_layers), None
    if not gemma:
        raise ValueError(
            f"{keys.file.where}: expected no sliding window for {keys.architecture}, got {window}"
        )
    if isinstance(pattern, list):
        windows = [bool(flag) for flag in pattern]
    else:
        windows = [bool((i + 1) % (pattern or 6)) for i in range(num_layers)]
    return layer_kinds(windows), int(window)


def _ropes(keys: _Keys, head_size: int, *, gemma: bool) -> tuple[Rope, Rope]:
    """Rotary settings of the full and of the window layers; scaling concerns the full ones only."""
    theta = float(keys.take("rope.freq_base") or 10_000.0)
    window_theta = float(keys.take("rope.freq_base_swa") or 10_000.0) if gemma else theta
    kind = keys.take("rope.scaling.type")
    factor = keys.take("rope.scaling.factor")
    original = keys.take("rope.scaling.original_context_length")
    window = Rope(theta=window_theta)
    if _DIVISORS in keys.file.tensors:
        if kind not in (None, "none"):
            raise ValueError(
                f"{keys.file.where}: expected {_DIVISORS} or rope.scaling.type, got both ({kind})"
            )
        values = tuple(float(value) for value in keys.file.read(_DIVISORS).reshape(-1))
        return Rope(theta=theta, scaling=Divisors(values=values)), window
    if kind in (None, "none"):
        return Rope(theta=theta), window
    if not factor:
        raise ValueError(
            f"{keys.file.where}: expected rope.scaling.factor for rope.scaling.type {kind!r}, got none"
        )
    if kind == "linear":
        return Rope(theta=theta, scaling=Linear(factor=float(factor))), window
    if kind == "yarn" and original:
        fast, slow = keys.take("rope.scaling.yarn_beta_fast"), keys.take("rope.scaling.yarn_beta_slow")
        attention = float(keys.take("rope.scaling.attn_factor") or 1.0)
        scaling = Yarn(
            factor=float(factor),
            original_context=int(original),
            attention_factor=attention * yarn_attention_factor(float(factor)),
            beta_fast=float(fast or 32.0),
            beta_slow=float(slow or 1.0),
        )
        return Rope(theta=theta, scaling=scaling), window
    raise ValueError(
        f"{keys.file.where}: expected rope.scaling.type none, linear or yarn with its original context, "
        f"got {kind!r}; not supported"
    )


def gguf_plan(config: DecoderConfig) -> Plan:
    """Which tensor every leaf comes from."""
    heads = {"query": config.num_heads, "key": config.num_kv_heads}

    def origin(path: str, axes: tuple[str, ...]) -> Origin:
        if path == "head":
            return Origin(name=_TOP["embedding"] if config.tied_head else "output.weight", transposed=True)
        if path in _TOP:
            return Origin(name=_TOP[path])
        _, index, leaf = path.split(".", 2)
        kind = leaf.removeprefix("attention.").removesuffix("_bias")
        transform = None
        if config.architecture == "llama" and kind in heads:
            transform = _unpermuted(heads[kind])
        return Origin(name=f"blk.{index}.{_LAYER[leaf]}", transposed=len(axes) == 2, transform=transform)

    return Plan(
        origins={
            leaf.path: origin(leaf.path, leaf.axes) for leaf in decoder_leaves(config, jnp.dtype(jnp.float32))
        },
        ignored=rf"^{_DIVISORS}$",
    )


def _unpermuted(heads: int) -> Any:
    """Rows of interleaved pairs (0, 0', 1, 1', ...) back to halves (0, 1, ..., 0', 1', ...), per head."""

    def transform(values: np.ndarray) -> np.ndarray:
        rest = values.shape[1:]
        return values.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(-1, *rest)

    return transform


def gguf_special_ids(file: GgufFile) -> tuple[tuple[int, ...], int | None]:
    """End-of-text and end-of-turn ids, and the id that begins a text."""
    ends = (file.value(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
    begin = file.value("tokenizer.ggml.bos_token_id")
    eos_ids = tuple(dict.fromkeys(int(end) for end in ends if end is not None))
    return eos_ids, None if begin is None else int(begin)
