"""Names, layouts and origins of the tensors of a drafter with a DFlash backbone."""

import dataclasses

from jspec.checkpoints.hf_target import hf_plan
from jspec.checkpoints.leaves import Origin, TensorFile
from jspec.drafters.domino_head import Gru
from jspec.drafters.dspark_heads import Markov
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
# The same for the heads.
_CONFIDENCE = {
    "confidence_head.weight": Origin(name="confidence_head.proj.weight", transposed=True),
    "confidence_head.bias": Origin(name="confidence_head.proj.bias"),
}
_MARKOV = {
    "head.embedding": Origin(name="markov_head.markov_w1.weight"),
    "head.output": Origin(name="markov_head.markov_w2.weight", transposed=True),
}
_MIXES = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
_GRU = {
    "head.gru_input": Origin(name="prefix_gru.weight_ih_l0", transposed=True),
    "head.gru_state": Origin(name="prefix_gru.weight_hh_l0", transposed=True),
    "head.mix": Origin(name="embed_proj.0.weight", transposed=True),
    "head.output": Origin(name="embed_proj.2.weight", transposed=True),
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


def dflash_origins(decoder: DecoderConfig, head: Markov | Gru | None) -> dict[str, Origin]:
    """Which tensor every leaf comes from that a drafter with these layers and this head may have."""
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
    return layers | added | _OUTER | _CONFIDENCE | _head_origins(head)


def _head_origins(head: Markov | Gru | None) -> dict[str, Origin]:
    match head:
        case None:
            return {}
        case Gru():
            return _GRU
        case Markov(kind=kind) if kind in _MIXES:
            return _MARKOV | {
                "head.mix": Origin(name=f"{_MIXES[kind]}.weight", transposed=True),
                "head.mix_bias": Origin(name=f"{_MIXES[kind]}.bias"),
            }
        case Markov():
            return _MARKOV


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
    # Older Domino checkpoints keep the head in a module of its own.
    name = stored.removeprefix("model.").removeprefix("logit_head.")
    return _ALIASES.get(name, name)
