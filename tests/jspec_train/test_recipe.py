import pytest

from jspec_train.recipe import read_recipe

TEXT = "method: dflash\noutput: run\ndata:\n  train: samples\n"


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return to_file


def test_overrides_change_single_settings(write):
    recipe = read_recipe(
        write(TEXT), ["objective.gamma=4", "drafter.target_layer_ids=[1, 5]", "output=elsewhere"]
    )
    assert recipe.objective.gamma == 4.0
    assert recipe.drafter.target_layer_ids == (1, 5)
    assert recipe.output == "elsewhere"
    assert recipe.objective.num_anchors == 512


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (TEXT + "objectiv: {}\n", [], "objectiv: expected one of checkpoints, data, .* got an unknown key"),
        (
            TEXT + "objective: {gama: 1}\n",
            [],
            "objective.gama: expected one of chunk_blocks, .*gamma.* unknown key",
        ),
        ("method: dflash\noutput: run\n", [], "data: expected a value, got none"),
        (TEXT, ["objective.gamma=-1"], "objective.gamma: input should be greater than 0, got -1"),
        (TEXT, ["drafter.block_size=1"], "drafter.block_size: .* 2, got 1"),
        (TEXT, ["nothing"], "override: expected section.key=value, got 'nothing'"),
        (TEXT, ["method.x=1"], "override: expected a section 'method'"),
        (TEXT, ["drafter.selector={}"], "expected no convolution and no selector with method dflash"),
        (TEXT, ["method=dflash2"], "expected a convolution and a selector with method dflash2"),
        (TEXT, ["objective.weighting=dpace", "objective.gamma=2"], "objective.gamma: expected None"),
        (TEXT, ["method=dspark", "drafter.markov=null"], "drafter.confidence: expected none or hidden"),
        (
            TEXT,
            ["method=dspark", "drafter.markov=null", "drafter.confidence=none"],
            "drafter.markov: expected a head, or a confidence head, got neither",
        ),
        (TEXT, ["method=dspark", "drafter.selector={}"], "drafter.selector: .* got an unknown key"),
        (
            TEXT,
            ["method=dspark", "objective.loss=dpard", "objective.gamma=2"],
            "objective.gamma: expected None",
        ),
        (TEXT, ["method=domino", "objective.base_ratio=2"], "objective.base_ratio: .*, got 2"),
        ("- a\n", [], "expected a mapping of settings, got list"),
        ("a: [\n", [], "expected YAML"),
    ],
)
def test_a_wrong_setting_is_named(write, text, overrides, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(write(text), overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective.kl_scale=2"], "objective.kl_scale: expected 1.0 .* without loss lk_lambda, got 2.0"),
        (["objective.dpace_alpha=0.2"], "objective.dpace_alpha: expected 0.5 .* without a dpace weighting"),
        (["objective.selector_alpha=2"], "objective.selector_alpha: expected 1.0 .* without a selector"),
        (["method=dspark", "objective.dpard_alpha=0.2"], "objective.dpard_alpha: .* without loss dpard"),
        (
            ["method=dspark", "objective.loss=dpard", "objective.l1_weight=1"],
            "objective.l1_weight: expected 0.9 .* without loss dspark, got 1.0",
        ),
        (
            ["method=dspark", "drafter.confidence=none", "objective.confidence_weight=2"],
            "objective.confidence_weight: expected 1.0 .* without a confidence head",
        ),
        (["method=eagle", "objective.noise=none", "objective.noise_width=1"], "without noise, got 1.0"),
        *(
            (
                [
                    f"method={method}",
                    "drafter.num_layers=1",
                    "drafter.layer_kinds=[full]",
                    "drafter.window=8",
                ],
                "drafter.window: expected None .* without a window layer, got 8",
            )
            for method in ("dflash", "eagle3")
        ),
        (["method=eagle3", "objective.kl_decay=2"], "objective.kl_decay: .* without loss lk_lambda"),
        *(
            ([f"method={method}", "training.gradient_checkpointing=true"], "expected False .* got True")
            for method in ("eagle", "eagle3", "peagle")
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(write, overrides, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(write(TEXT), overrides)


def test_settings_are_for_what_reads_them(write):
    read_recipe(write(TEXT), ["objective.loss=lk_lambda", "objective.kl_scale=2"])
    read_recipe(write(TEXT), ["objective.weighting=dpace", "objective.dpace_alpha=0.2"])
    read_recipe(write(TEXT), ["method=domino", "training.gradient_checkpointing=true"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config: expected a YAML file"):
        read_recipe(tmp_path / "none.yaml")
