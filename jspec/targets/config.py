"""Everything that distinguishes one decoder-only target from another, as one hashable value."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from jspec.targets.rope import Rope

LayerKind = Literal["full", "window"]


def layer_kinds(windows: Iterable[bool]) -> tuple[LayerKind, ...]:
    """The kind of each layer, from whether it has a window."""
    return tuple("window" if window else "full" for window in windows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and choices of a Llama, Qwen2, Qwen3 or Gemma 3 text model.

    Gemma's norms, stored as w and applied as 1 + w, are no option here: norms are kept in float32
    and hold 1 + w from loading on, which is the same float32 sum.
    """

    architecture: str  # "llama", "qwen2", "qwen3", "gemma3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    max_context: int
    full_rope: Rope
    window_rope: Rope | None = None  # needed if a layer has a window
    layer_kinds: tuple[LayerKind, ...]
    window: int | None = None  # a query of a window layer sees itself and window - 1 tokens before it
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False  # RMSNorm of every head of q and k before the rotation
    sandwich_norms: bool = False  # a second norm after attention and after the MLP (Gemma)
    tied_head: bool = False
    embedding_scale: float = 1.0
    query_scale: float  # factor on q . k
    attention_softcap: float | None = None
    final_softcap: float | None = None
    # Of every KV head. On a mesh of more devices than KV heads each device has a copy of the one that it needs.
    kv_copies: int = 1
    replicated: bool = False  # on a mesh, every device has all weights and pages of this model

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers",
            "num_heads", "num_kv_heads", "head_size", "max_context",
        )  # fmt: skip
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of {self.num_heads} query heads, got {self.num_kv_heads}"
            )
        if self.num_heads % self.stored_kv_heads:
            raise ValueError(
                f"kv_copies: expected a divisor of {self.num_heads // self.num_kv_heads} query heads per KV head, "
                f"got {self.kv_copies}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size: expected an even number (rope turns pairs), got {self.head_size}")
        if len(self.layer_kinds) != self.num_layers or not set(self.layer_kinds) <= {"full", "window"}:
            raise ValueError(
                f"layer_kinds: expected {self.num_layers} of 'full' or 'window', got {self.layer_kinds}"
            )
        if "window" in self.layer_kinds and (
            self.window is None or self.window < 1 or self.window_rope is None
        ):
            raise ValueError(
                f"window: expected at least 1 and a window_rope for the window layers, got {self.window}, "
                f"{self.window_rope}"
            )

    @property
    def stored_kv_heads(self) -> int:
        """KV heads with their copies: those of weights and cache."""
        return self.num_kv_heads * self.kv_copies

    @property
    def windows(self) -> dict[LayerKind, int | None]:
        """The kinds of layers that there are, and how many positions each of them sees; None = all."""
        return {kind: self.window if kind == "window" else None for kind in dict.fromkeys(self.layer_kinds)}

    def rope(self, kind: LayerKind) -> Rope:
        """The rotary embedding of a kind of layer that there is."""
        if kind == "full":
            return self.full_rope
        assert self.window_rope is not None
        return self.window_rope

    def with_rope(self, rope: Rope) -> "DecoderConfig":
        """The same with one rotary embedding for all of its layers."""
        window_rope = None if self.window_rope is None else rope
        return dataclasses.replace(self, full_rope=rope, window_rope=window_rope)

    @property
    def identity(self) -> str:
        """Architecture and sizes in words, to name the model in refusals and beside features."""
        return (
            f"{self.architecture}, {self.num_layers} layers, hidden {self.hidden_size}, "
            f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}, vocabulary {self.vocab_size}"
        )
