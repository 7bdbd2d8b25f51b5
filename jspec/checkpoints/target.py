"""One way to load a target, whatever its files are."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec.checkpoints.hf_config import config_from_hf
from jspec.checkpoints.hf_target import hf_plan, read_json, special_ids
from jspec.checkpoints.leaves import check_tensors, read_leaves
from jspec.checkpoints.safetensors_files import open_safetensors
from jspec.net import Params
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves, decoder_units, with_kv_copies

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    """A target with its weights, and what its files say about the text."""

    target: DecoderTarget
    params: Params
    eos_ids: tuple[int, ...]
    bos_id: int | None
    source: Path  # the folder or the .gguf file


def load_target(
    path: str | Path, *, dtype: DTypeLike, mesh: Mesh | None = None, max_context: int | None = None
) -> LoadedTarget:
    """Loads a Llama, Qwen2, Qwen3 or Gemma 3 text model.

    Config, tensor names, shapes and file sizes are checked before a weight is read. Weights go from
    the mapped file to their dtype and devices one leaf after the other.

    Args:
      path: a folder with config.json and safetensors files, or a .gguf file.
      dtype: of the weights, "float32", "bfloat16" or "float16"; norms stay float32.
      mesh: splits weights by `jspec.sharding`; None = the default device.
      max_context: tokens that a text may have; None = what the model was made for.

    Raises:
      ValueError: naming the file and the key or tensor that is missing, unknown, damaged or not
        supported.
    """
    path = Path(path)
    if jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {jnp.dtype(dtype).name}")
    if path.suffix == ".gguf" and path.is_file():
        # The gguf package is only needed here.
        from jspec.checkpoints.gguf_file import open_gguf
        from jspec.checkpoints.gguf_target import config_from_gguf, gguf_plan, gguf_special_ids

        file = open_gguf(path)
        config = config_from_gguf(file)
        plan = gguf_plan(config)
        eos_ids, bos_id = gguf_special_ids(file)
    elif path.is_dir():
        values = read_json(path / "config.json")
        try:
            config = config_from_hf(values)
        except ValueError as error:
            raise ValueError(f"{path / 'config.json'}: {error}") from error
        file = open_safetensors(path)
        plan = hf_plan(config, file.shapes)
        eos_ids, bos_id = special_ids(path, values)
    else:
        raise ValueError(f"path: expected a model's folder or a .gguf file, got {path}; check that it exists")
    config = _limited(config, max_context)
    check_tensors(config.identity, decoder_leaves(config, jnp.dtype(dtype)), plan, file)
    config = with_kv_copies(config, mesh)
    leaves = decoder_leaves(config, jnp.dtype(dtype))
    return LoadedTarget(
        target=DecoderTarget(config),
        params=read_leaves(leaves, plan, file, decoder_units(config), mesh),
        eos_ids=eos_ids,
        bos_id=bos_id,
        source=path,
    )


def _limited(config: DecoderConfig, max_context: int | None) -> DecoderConfig:
    if max_context is None:
        return config
    if not 1 <= max_context <= config.max_context:
        raise ValueError(
            f"max_context: expected 1 to {config.max_context}, got {max_context}; the model has no more"
        )
    return dataclasses.replace(config, max_context=max_context)
