"""Names and origins of an EAGLE drafter's tensors in the public layouts."""

import re
from collections.abc import Container, Iterable

from jspec.checkpoints.eagle_vocabulary import ids_of_differences
from jspec.checkpoints.hf_target import LAYER_NAMES
from jspec.checkpoints.leaves import Origin, TensorFile
from jspec.net import Leaf
from jspec.targets.config import DecoderConfig

# Layouts that name the only layer otherwise, and legacy names: start of a stored name -> plain one.
_STARTS = {
    "midlayer.": "layers.0.",  # SafeAILab's and SpecForge's EAGLE-3
    "transformer.": "layers.0.",  # `speculators` up to 0.1
    "fusion_fc.": "fc.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_OUTER = {
    "fc": Origin(name="fc.weight", transposed=True),
    "fc_bias": Origin(name="fc.bias"),
    "input_norm": Origin(name="input_norm.weight"),
    "norm": Origin(name="norm.weight"),
    "embedding": Origin(name="embed_tokens.weight"),
    "head": Origin(name="lm_head.weight", transposed=True),
    "draft_ids": Origin(name="d2t", transform=ids_of_differences),
    "mask_hidden": Origin(name="mask_hidden", transform=lambda stored: stored.reshape(-1)),
}
_WIDE = {"embedding_norm": "input_layernorm.weight", "state_norm": "hidden_norm.weight"}
# A rope table that transformers wrote along, and frozen copies of the target's that `speculators` keeps.
IGNORED = r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|^verifier_(norm|lm_head)\.weight$|^t2d$"


def plain_name(stored: str) -> str:
    """The name in one layout (layers.{i}.*, no prefix) of a tensor of any layout."""
    name = stored.removeprefix("model.")
    for start, plain in _STARTS.items():
        if name.startswith(start):
            return plain + name.removeprefix(start)

    return name


def names_only_layer(stored: Iterable[str]) -> bool:
    """Whether the layer is called `midlayer`: the layout of SafeAILab's EAGLE-3 and of SpecForge."""
    return any(name.removeprefix("model.").startswith("midlayer.") for name in stored)


def known_names(decoder: DecoderConfig, file: TensorFile) -> set[str]:
    """Plain names of all tensors that a drafter with these layers may have."""
    layers = {
        f"layers.{index}.{tensor}"
        for index in range(decoder.num_layers)
        for tensor in (*LAYER_NAMES.values(), *_WIDE.values())
    }
    norms = {f"fc_norm.{index}.weight" for index in range(len(file.shapes))}
    return layers | norms | {origin.name for origin in _OUTER.values()} | {"t2d"}


def eagle_origin(leaf: Leaf, names: Container[str]) -> Origin:
    """Which tensor a leaf comes from.

    Args:
      leaf: of a drafter.
      names: plain names of the tensors that there are, as a norm has two names.
    """
    if leaf.path in _OUTER:
        return _OUTER[leaf.path]
    found = re.fullmatch(r"feature_norms\.(\d+)", leaf.path)
    if found:
        return Origin(name=f"fc_norm.{found[1]}.weight")
    _, index, part = leaf.path.split(".", 2)
    name = f"layers.{index}.{(LAYER_NAMES | _WIDE)[part]}"
    # SGLang calls the norm of a plain layer like a wide one's of the state.
    other = f"layers.{index}.hidden_norm.weight"
    if part == "attention_norm" and name not in names and other in names:
        name = other
    return Origin(name=name, transposed=len(leaf.axes) == 2)
