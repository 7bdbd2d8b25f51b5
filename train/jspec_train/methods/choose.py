"""From a recipe to its method."""

from jspec.targets.config import DecoderConfig
from jspec.text.tokenizer import Tokenizer
from jspec_train.drafters import drafter_config, mask_token
from jspec_train.methods.block import BlockMethod
from jspec_train.methods.eagle import eagle_method
from jspec_train.methods.protocol import TrainedMethod
from jspec_train.recipe import (
    DFlashRecipe,
    DominoRecipe,
    DSparkRecipe,
    Eagle3Recipe,
    EagleRecipe,
    PEagleRecipe,
    Recipe,
)


def method_of(recipe: Recipe, tokenizer: Tokenizer, target: DecoderConfig) -> TrainedMethod:
    """The method that a recipe names, with its sizes for a target.

    Raises:
      ValueError: layers that the target does not have, no mask token, or choices that do not go together.
    """
    match recipe:
        case DFlashRecipe() | DSparkRecipe() | DominoRecipe():
            mask = mask_token(recipe.drafter.mask_token_id, tokenizer, target.vocab_size)
            return BlockMethod(recipe=recipe, config=drafter_config(recipe.drafter, target, mask))
        case PEagleRecipe():
            mask = mask_token(recipe.drafter.mask_token_id, tokenizer, target.vocab_size)
            return eagle_method(recipe, target, mask)
        case EagleRecipe() | Eagle3Recipe():
            return eagle_method(recipe, target, None)
    raise AssertionError(f"a recipe without a method: {type(recipe).__name__}")
