"""Names, layouts and origins of a DFlash drafter's tensors."""

import dataclasses

from jspec.checkpoints.hf_target import hf_plan
from jspec.checkpoints.leaves import Origin, TensorFile
from jspec.targets.config import DecoderConfig

_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
# Leaf -> tensor, outside of the layers.
_OUTER = {
    "fc": Origin(name="fc.weight", transposed=True),
    "hidden_norm": Origin(name="hidden_norm.weight"),
    "norm": Origin(name="norm.weight"),
    "embedding": Origin(name="embed_tokens.weight"),
    # jspec's own: the target ids that are drafted, ascending.
    "draft_ids": Origin(name="draft_ids"),
    "candidate_selector.predecessor_codebook": Origin(name="candidate_selector.predecessor_codebook"),
    "candidate_selector.successor_codebook": Origin(name="candidate_selector.successor_codebook"),
    "candidate_selector.hidden_projection": Origin(
        name="candidate_selector.hidden_projection.weight", transposed=True
    ),
}
# The same inside of a layer, besides what a Qwen3 layer has.
_LAYER = {
    f"{conv}.{leaf}": (f"{conv}.{tensor}", transposed)
    for conv in ("attention_conv", "mlp_conv")
    for leaf, tensor, transposed in (
        ("base_kernel", "base_kernel", False),
        ("kernel_projection", "kernel_projection.weight", True),
    )
}


def dflash_origins(decoder: DecoderConfig) -> dict[str, Origin]:
    """Which tensor every leaf comes from that a drafter with these layers may have."""
    layers = {
        path: dataclasses.replace(origin, name=origin.name.removeprefix("model."))
        for path, origin in hf_plan(decoder, ()).origins.items()
        if path.startswith("layers.")
    }
    added = {
        f"layers.{index}.{leaf}": Origin(name=f"layers.{index}.{tensor}", transposed=transposed)
        for index in range(decoder.num_layers)
        for leaf, (tensor, transposed) in _LAYER.items()
    }
    return layers | added | _OUTER


def target_hidden_size(tensors: TensorFile, num_states: int) -> int:
    """Width of one captured state, which only the shape of fc says.

    Raises:
      ValueError: there is no fc, or its width is no multiple of the number of states.
    """
    shape = tensors.shapes.get("fc.weight", ())
    if len(shape) != 2 or shape[1] % num_states:
        raise ValueError(
            f"{tensors.where}: expected 'fc.weight' of shape [hidden, {num_states} x target's hidden], "
            f"as there are {num_states} target_layer_ids, got {list(shape) or 'none'}; "
            "config and weights do not belong together"
        )
    return shape[1] // num_states


def dflash_name(stored: str) -> str:
    """The name in SpecForge's layout of a tensor of any layout."""
    name = stored.removeprefix("model.")
    return _ALIASES.get(name, name)
