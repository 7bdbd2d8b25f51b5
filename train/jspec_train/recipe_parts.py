"""The sections of a recipe: every setting, its default, and what is refused. `recipe.py` puts them together."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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


class ConvolutionPart(Part):
    """DFlash 2's convolution."""

    taps: int = Field(default=2, ge=1)
    group_size: int = Field(default=16, ge=1)


class SelectorPart(Part):
    """DFlash 2's candidate selector."""

    rank: int = Field(default=256, ge=1)
    top_k: int = Field(default=16, ge=1)


class BlockDrafterPart(Part):
    """Sizes of a drafter with a DFlash backbone. What is None is the target's."""

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
    vocabulary: int | None = Field(
        default=None, ge=2
    )  # draft only the most frequent ids of the training data


class DrafterPart(BlockDrafterPart):
    """A DFlash or DFlash 2 drafter."""

    convolution: ConvolutionPart | None = None
    selector: SelectorPart | None = None


class MarkovPart(Part):
    """DSpark's Markov head; see `jspec.drafters.dspark_heads.Markov`."""

    rank: int = Field(default=256, ge=1)
    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"


class DSparkDrafterPart(BlockDrafterPart):
    """A DSpark drafter: all `block_size` rows predict."""

    markov: MarkovPart | None = MarkovPart()
    confidence: Literal["none", "hidden", "hidden_and_token"] = "hidden_and_token"  # what its head reads


class GruPart(Part):
    """Domino's GRU head; see `jspec.drafters.domino_head.Gru`."""

    size: int = Field(default=1024, ge=1)
    rank: int = Field(default=256, ge=1)
    first_corrected: int = Field(default=1, ge=0)


class DominoDrafterPart(BlockDrafterPart):
    """A Domino drafter."""

    gru: GruPart = GruPart()
    anchor_predicts: bool = True


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


class DSparkObjectivePart(Part):
    """See `jspec.objectives.dspark.DSparkObjective`."""

    num_anchors: int = Field(default=512, ge=1)
    loss: Literal["dspark", "dpard"] = "dspark"
    gamma: float | None = Field(default=None, gt=0)
    cross_entropy_weight: float = Field(default=0.1, ge=0)
    l1_weight: float = Field(default=0.9, ge=0)
    confidence_weight: float = Field(default=1.0, ge=0)
    dpard_alpha: float = Field(default=0.5, gt=0, lt=1)
    chunk_blocks: int = Field(default=128, ge=1)


class DominoObjectivePart(Part):
    """See `jspec.objectives.domino.DominoObjective`."""

    num_anchors: int = Field(default=512, ge=1)
    gamma: float | None = Field(default=None, gt=0)
    base_start: float = Field(default=1.0, ge=0, le=1)
    base_ratio: float = Field(default=0.5, ge=0, le=1)
    chunk_blocks: int = Field(default=128, ge=1)


class EagleSizes(Part):
    """Sizes of a drafter's layers. What is None is the target's."""

    num_layers: int = Field(default=1, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    head_size: int | None = Field(default=None, ge=1)
    window: int | None = Field(default=None, ge=1)
    layer_kinds: tuple[Literal["full", "window"], ...] | None = (
        None  # None = all full, or all window with a window
    )


class EagleDrafterPart(EagleSizes):
    """An EAGLE drafter: it reads what the target's head reads, and drafts with that head."""

    fc_bias: bool = True


class EagleObjectivePart(Part):
    """See `jspec.objectives.eagle.EagleObjective`."""

    feature_weight: float = Field(default=1.0, ge=0)
    token_weight: float = Field(default=0.1, ge=0)
    noise: Literal["none", "uniform", "gaussian"] = "uniform"
    noise_width: float = Field(default=0.2, ge=0)
    chunk: int = Field(default=128, ge=1)


class Eagle3DrafterPart(EagleSizes):
    """An EAGLE-3 drafter; see `jspec.drafters.eagle_net.EagleConfig`."""

    target_layer_ids: tuple[int, ...] | None = None  # None = an early, the middle and a late one
    hidden_size: int | None = Field(default=None, ge=1)
    vocabulary: int | None = Field(
        default=None, ge=2
    )  # draft only the most frequent ids of the training data
    own_head: bool = True
    feature_norms: bool = False
    norm_before_fc: bool = False
    head_reads_norm: bool = True
    feeds_back_norm: bool = False
    norm_before_residual: bool = False
    query_key_norm: bool = False


class Eagle3ObjectivePart(Part):
    """See `jspec.objectives.eagle3.Eagle3Objective`."""

    depths: int = Field(default=7, ge=1)
    decay: float = Field(default=0.8, gt=0, le=1)
    loss: Literal["cross_entropy", "lk_alpha", "lk_lambda"] = "cross_entropy"
    kl_scale: float = Field(default=1.0, ge=0)
    kl_decay: float = Field(default=1.0, ge=0)
    normaliser: Literal["tokens", "specforge"] = "tokens"
    chunk: int = Field(default=32, ge=1)


class PEagleDrafterPart(Eagle3DrafterPart):
    """A P-EAGLE drafter: EAGLE-3's first layer, plain ones after it, and a trained embedding."""

    num_layers: int = Field(default=4, ge=1)
    mask_token_id: int | None = Field(
        default=None, ge=0
    )  # None = the tokenizer's mask token, or a free embedding row


class PEagleObjectivePart(Part):
    """See `jspec.objectives.peagle.PEagleObjective`."""

    depths: int = Field(default=8, ge=1)
    ratio: float = Field(default=0.8, gt=0, le=1)
    least: float = Field(default=0.2, gt=0, le=1)
    chunk: int = Field(default=128, ge=1)
