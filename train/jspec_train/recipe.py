"""A training run as one YAML file: every setting, its default, and what is refused."""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Method = Literal["dflash", "dflash2"]


class Part(BaseModel):
    """A section: unknown keys are errors, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataPart(Part):
    """What is trained on. Folders of `jspec prepare`, or of `jspec capture`."""

    train: str
    validation: str | None = None
    max_length: int | None = Field(default=None, ge=2)  # tokens per row; None = the longest sample
    pack: bool = False  # several documents per row of max_length tokens
    bucket: int = Field(default=64, ge=1)  # rows that are not packed are padded to a multiple of this


class ConvolutionPart(Part):
    """DFlash 2's convolution."""

    taps: int = Field(default=2, ge=1)
    group_size: int = Field(default=16, ge=1)


class SelectorPart(Part):
    """DFlash 2's candidate selector."""

    rank: int = Field(default=256, ge=1)
    top_k: int = Field(default=16, ge=1)


class DrafterPart(Part):
    """Sizes of the drafter. What is None is the target's."""

    num_layers: int = Field(default=1, ge=1)
    block_size: int = Field(default=8, ge=2)
    target_layer_ids: tuple[int, ...] | None = None  # None = spread evenly over the target's layers
    mask_token_id: int | None = Field(
        default=None, ge=0
    )  # None = the tokenizer's mask token, or a free embedding row
    intermediate_size: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    head_size: int | None = Field(default=None, ge=1)
    window: int | None = Field(default=None, ge=1)
    layer_kinds: tuple[Literal["full", "window"], ...] | None = (
        None  # None = all full, or all window with a window
    )
    convolution: ConvolutionPart | None = None
    selector: SelectorPart | None = None
    vocabulary: int | None = Field(
        default=None, ge=2
    )  # draft only the most frequent ids of the training data


class ObjectivePart(Part):
    """See `jspec.objectives.dflash.DFlashObjective`."""

    num_anchors: int = Field(default=512, ge=1)
    loss: Literal["cross_entropy", "lk_alpha", "lk_lambda", "lk_tv"] = "cross_entropy"
    weighting: Literal["position", "dpace", "dpace_cumulative", "dpace_continuation"] = "position"
    gamma: float | None = Field(default=None, gt=0)
    dpace_alpha: float = Field(default=0.5, ge=0, le=1)
    kl_scale: float = Field(default=1.0, ge=0)
    kl_decay: float = Field(default=1.0, ge=0)
    chunk_blocks: int = Field(default=128, ge=1)
    selector_alpha: float = Field(default=1.0, ge=0)
    selector_warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    selector_ramp_ratio: float = Field(default=0.0, ge=0, le=1)
    selector_stop_gradient: bool = False


class OptimizerPart(Part):
    """AdamW."""

    learning_rate: float = Field(default=6e-4, gt=0)
    schedule: Literal["cosine", "constant", "cosine_chained"] = "cosine"
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.999, ge=0, lt=1)


class TrainingPart(Part):
    """Length and shape of the run."""

    epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)  # ends earlier; the schedule ends with it
    batch_size: int = Field(default=8, ge=1)  # rows per micro-batch, over all devices
    accumulation: int = Field(default=1, ge=1)  # micro-batches per update
    dtype: Literal["float32", "bfloat16"] = (
        "bfloat16"  # of target, weights and activations; masters are float32
    )
    seed: int = 0
    gradient_checkpointing: bool = False
    start: Literal["fresh", "target"] = "fresh"  # "target": see `jspec.drafters.dflash_init.init_from_target`
    warm_start: str | None = None  # folder of a drafter to take the weights from


class EvaluationPart(Part):
    """What decides which checkpoint is the best."""

    every: int = Field(default=500, ge=1)  # updates
    loss_batches: int = Field(default=8, ge=1)  # of the validation data
    prompts: int = Field(
        default=16, ge=0
    )  # validation prompts to decode; 0 = none, and the last checkpoint is the best
    max_tokens: int = Field(default=64, ge=1)
    draft_length: int | None = Field(default=None, ge=1)


class CheckpointPart(Part):
    """What is kept."""

    every: int = Field(default=500, ge=1)  # updates
    keep: int = Field(default=2, ge=1)  # the last ones; the best is kept besides


class Recipe(Part):
    """All of a run."""

    method: Method
    target: str | None = None  # model folder, hub id or .gguf file; None = the embedded model
    output: str
    data: DataPart
    drafter: DrafterPart = DrafterPart()
    objective: ObjectivePart = ObjectivePart()
    optimizer: OptimizerPart = OptimizerPart()
    training: TrainingPart = TrainingPart()
    evaluation: EvaluationPart = EvaluationPart()
    checkpoints: CheckpointPart = CheckpointPart()
    log_every: int = Field(default=10, ge=1)
    tensorboard: bool = False
    wandb: str | None = None  # project

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        drafter = self.drafter
        second = drafter.convolution is not None or drafter.selector is not None
        if self.method == "dflash" and second:
            raise ValueError(
                "drafter: expected no convolution and no selector with method dflash; use method dflash2"
            )
        if self.method == "dflash2" and (drafter.convolution is None or drafter.selector is None):
            raise ValueError(
                "drafter: expected a convolution and a selector with method dflash2; add both (they may be {})"
            )
        if (drafter.layer_kinds is not None and "window" in drafter.layer_kinds) and drafter.window is None:
            raise ValueError("drafter.window: expected a size for the window layers, got None; set it")
        if drafter.layer_kinds is not None and len(drafter.layer_kinds) != drafter.num_layers:
            raise ValueError(
                f"drafter.layer_kinds: expected {drafter.num_layers} (num_layers), got {len(drafter.layer_kinds)}"
            )
        if self.training.warm_start is not None and self.training.start != "fresh":
            raise ValueError(
                "training.start: expected fresh with a warm_start, which brings the weights; drop one of them"
            )
        if self.objective.weighting != "position" and self.objective.gamma is not None:
            raise ValueError("objective.gamma: expected None with a dpace weighting; drop one of them")
        return self


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file.

    Args:
      path: of the file.
      overrides: "section.key=value" each; the value is read as YAML.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no YAML, or a setting is unknown, missing or out of range; names it.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"config: expected a YAML file, got {str(path)!r}, which does not exist")
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as problem:
        raise ValueError(f"{path}: expected YAML, got {str(problem).replace(chr(10), ' ')}") from problem
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of settings, got {type(values).__name__}")
    for override in overrides:
        _override(values, override)
    return recipe_of(values, str(path))


def recipe_of(values: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from its values; `where` names their origin in errors.

    Raises:
      ValueError: as for `read_recipe`.
    """
    try:
        return Recipe.model_validate(values)
    except ValidationError as problem:
        first = problem.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or where
        if first["type"] == "extra_forbidden":
            known = ", ".join(_fields(first["loc"][:-1]))
            raise ValueError(
                f"{where}: {name}: expected one of {known}, got an unknown key; check its spelling"
            ) from None
        if first["type"] == "missing":
            raise ValueError(f"{where}: {name}: expected a value, got none; add it") from None
        if first["type"] == "value_error":
            raise ValueError(f"{where}: {first.get('ctx', {}).get('error')}") from None
        raise ValueError(
            f"{where}: {name}: {first['msg'].lower()}, got {first['input']!r}; change it"
        ) from None


def _fields(path: Sequence[int | str]) -> list[str]:
    """Settings of a section."""
    part: Any = Recipe
    for name in path:
        annotation = part.model_fields[str(name)].annotation
        members = annotation.__args__ if isinstance(annotation, types.UnionType) else (annotation,)
        part = next(member for member in members if isinstance(member, type) and issubclass(member, Part))
    return sorted(part.model_fields)


def _override(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ValueError(f"override: expected section.key=value, got {override!r}")
    *sections, key = name.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if inner is None:
            inner = values[section] = {}
        if not isinstance(inner, dict):
            raise ValueError(
                f"override: expected a section {section!r}, got the value {inner!r}; check {override!r}"
            )
        values = inner
    try:
        values[key] = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(f"override: expected a YAML value, got {override!r}") from problem
