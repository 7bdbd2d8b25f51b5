"""A training run as one YAML file: which sections a method has, and what of them goes together."""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from jspec_train.recipe_parts import (
    BlockDrafterPart,
    CheckpointPart,
    DataPart,
    DominoDrafterPart,
    DominoObjectivePart,
    DrafterPart,
    DSparkDrafterPart,
    DSparkObjectivePart,
    Eagle3DrafterPart,
    Eagle3ObjectivePart,
    EagleDrafterPart,
    EagleObjectivePart,
    EagleSizes,
    EvaluationPart,
    ObjectivePart,
    OptimizerPart,
    Part,
    PEagleDrafterPart,
    PEagleObjectivePart,
    TrainingPart,
)


class Recipe(Part):
    """What every method has. Each adds its own `drafter` and `objective`."""

    method: str
    target: str | None = None  # model folder, hub id or .gguf file; None = the embedded model
    output: str
    data: DataPart
    optimizer: OptimizerPart = OptimizerPart()
    training: TrainingPart = TrainingPart()
    evaluation: EvaluationPart = EvaluationPart()
    checkpoints: CheckpointPart = CheckpointPart()
    log_every: int = Field(default=10, ge=1)
    tensorboard: bool = False
    wandb: str | None = None  # project

    @model_validator(mode="after")
    def _check_start(self) -> "Recipe":
        if self.training.warm_start is not None and self.training.start != "fresh":
            raise ValueError(
                "training.start: expected fresh with a warm_start, which brings the weights; drop one of them"
            )
        return self


class DFlashRecipe(Recipe):
    """A DFlash or DFlash 2 run."""

    method: Literal["dflash", "dflash2"]
    drafter: DrafterPart = DrafterPart()
    objective: ObjectivePart = ObjectivePart()

    @model_validator(mode="after")
    def _check(self) -> "DFlashRecipe":
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
        _check_layers(drafter)
        objective = self.objective
        if objective.weighting != "position" and objective.gamma is not None:
            raise ValueError("objective.gamma: expected None with a dpace weighting; drop one of them")
        if objective.loss != "lk_lambda":
            _check_unread(objective, ("kl_scale", "kl_decay"), "loss lk_lambda")
        if objective.weighting == "position":
            _check_unread(objective, ("dpace_alpha",), "a dpace weighting")
        if drafter.selector is None:
            names = [name for name in type(objective).model_fields if name.startswith("selector_")]
            _check_unread(objective, names, "a selector")
        return self


class DSparkRecipe(Recipe):
    """A DSpark run."""

    method: Literal["dspark"]
    drafter: DSparkDrafterPart = DSparkDrafterPart()
    objective: DSparkObjectivePart = DSparkObjectivePart()

    @model_validator(mode="after")
    def _check(self) -> "DSparkRecipe":
        drafter, objective = self.drafter, self.objective
        _check_layers(drafter)
        if drafter.markov is None and drafter.confidence == "hidden_and_token":
            raise ValueError(
                "drafter.confidence: expected none or hidden without a markov head, whose embedding it would read, got "
                "hidden_and_token"
            )
        if drafter.markov is None and drafter.confidence == "none":
            raise ValueError("drafter.markov: expected a head, or a confidence head, got neither; add one")
        if objective.loss == "dpard" and objective.gamma is not None:
            raise ValueError("objective.gamma: expected None with loss dpard; drop one of them")
        if objective.loss == "dspark":
            _check_unread(objective, ("dpard_alpha",), "loss dpard")
        else:
            _check_unread(objective, ("cross_entropy_weight", "l1_weight"), "loss dspark")
        if drafter.confidence == "none":
            _check_unread(objective, ("confidence_weight",), "a confidence head")
        return self


class DominoRecipe(Recipe):
    """A Domino run."""

    method: Literal["domino"]
    drafter: DominoDrafterPart = DominoDrafterPart()
    objective: DominoObjectivePart = DominoObjectivePart()

    @model_validator(mode="after")
    def _check(self) -> "DominoRecipe":
        _check_layers(self.drafter)
        return self


class EagleRecipe(Recipe):
    """An EAGLE run."""

    method: Literal["eagle"]
    drafter: EagleDrafterPart = EagleDrafterPart()
    objective: EagleObjectivePart = EagleObjectivePart()

    @model_validator(mode="after")
    def _check(self) -> "EagleRecipe":
        _check_layers(self.drafter)
        _check_unread(self.training, ("gradient_checkpointing",), "a block drafter", "training")
        if self.objective.noise == "none":
            _check_unread(self.objective, ("noise_width",), "noise")
        return self


class Eagle3Recipe(Recipe):
    """An EAGLE-3 run."""

    method: Literal["eagle3"]
    drafter: Eagle3DrafterPart = Eagle3DrafterPart()
    objective: Eagle3ObjectivePart = Eagle3ObjectivePart()

    @model_validator(mode="after")
    def _check(self) -> "Eagle3Recipe":
        _check_eagle3(self.drafter)
        _check_unread(self.training, ("gradient_checkpointing",), "a block drafter", "training")
        if self.objective.loss != "lk_lambda":
            _check_unread(self.objective, ("kl_scale", "kl_decay"), "loss lk_lambda")
        return self


class PEagleRecipe(Recipe):
    """A P-EAGLE run."""

    method: Literal["peagle"]
    drafter: PEagleDrafterPart = PEagleDrafterPart()
    objective: PEagleObjectivePart = PEagleObjectivePart()

    @model_validator(mode="after")
    def _check(self) -> "PEagleRecipe":
        _check_eagle3(self.drafter)
        _check_unread(self.training, ("gradient_checkpointing",), "a block drafter", "training")
        if self.training.start != "fresh":
            raise ValueError(
                f"training.start: expected fresh with method peagle, got {self.training.start}; its rows are no steps "
                "that the target's layers know"
            )
        return self


RECIPES: Mapping[str, type[Recipe]] = {
    "dflash": DFlashRecipe,
    "dflash2": DFlashRecipe,
    "dspark": DSparkRecipe,
    "domino": DominoRecipe,
    "eagle": EagleRecipe,
    "eagle3": Eagle3Recipe,
    "peagle": PEagleRecipe,
}


def _check_layers(drafter: BlockDrafterPart | EagleSizes) -> None:
    if (drafter.layer_kinds is not None and "window" in drafter.layer_kinds) and drafter.window is None:
        raise ValueError("drafter.window: expected a size for the window layers, got None; set it")
    if drafter.layer_kinds is not None and "window" not in drafter.layer_kinds:
        _check_unread(drafter, ("window",), "a window layer", "drafter")
    if drafter.layer_kinds is not None and len(drafter.layer_kinds) != drafter.num_layers:
        raise ValueError(
            f"drafter.layer_kinds: expected {drafter.num_layers} (num_layers), got {len(drafter.layer_kinds)}"
        )


def _check_eagle3(drafter: Eagle3DrafterPart) -> None:
    _check_layers(drafter)
    if drafter.feature_norms and drafter.norm_before_fc:
        raise ValueError("drafter.norm_before_fc: expected false with feature_norms, got true; choose one")


def _check_unread(part: Part, names: Sequence[str], reader: str, section: str = "objective") -> None:
    """Refuses settings that were changed although nothing reads them.

    Args:
      part: a section.
      names: of settings in it.
      reader: what would read them.
      section: its name.
    """
    for name in names:
        value, default = getattr(part, name), type(part).model_fields[name].default
        if value != default:
            raise ValueError(
                f"{section}.{name}: expected {default} (the default) without {reader}, got {value}; nothing would "
                "read it: drop it"
            )


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
    kind = recipe_class(values.get("method"), where)
    try:
        return kind.model_validate(values)
    except ValidationError as problem:
        first = problem.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or where
        if first["type"] == "extra_forbidden":
            known = ", ".join(_fields(kind, first["loc"][:-1]))
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


def recipe_class(method: Any, where: str) -> type[Recipe]:
    """The recipe of a method.

    Raises:
      ValueError: there is no such method; lists them.
    """
    if not isinstance(method, str) or method not in RECIPES:
        raise ValueError(f"{where}: method: expected one of {', '.join(RECIPES)}, got {method!r}; name one")
    return RECIPES[method]


def _fields(recipe: type[Recipe], path: Sequence[int | str]) -> list[str]:
    """Settings of a section."""
    part: Any = recipe
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
