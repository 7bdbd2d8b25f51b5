"""Settings: what is refused where a request enters, and how."""

import math

import numpy as np
import pytest

from jspec.settings import Settings, settings_from_json


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("max_tokens", 0, "at least one token"),
        ("max_tokens", True, "at least one token"),
        ("min_tokens", -1, "lower it"),
        ("min_tokens", 257, "raise max_tokens"),
        ("temperature", -0.1, "use 0 for greedy"),
        ("temperature", math.nan, "use 0 for greedy"),
        ("temperature", math.inf, "use 0 for greedy"),
        ("temperature", 1e-9, "use 0 for greedy"),
        ("top_k", 0, "use None"),
        ("top_k", -1, "use None"),
        ("top_p", 0.0, "use 1 to turn it off"),
        ("top_p", 1.1, "use 1 to turn it off"),
        ("top_p", math.nan, "use 1 to turn it off"),
        ("min_p", -0.1, "use 0 to turn it off"),
        ("min_p", 1.5, "use 0 to turn it off"),
        ("repetition_penalty", 0.0, "use 1 to turn it off"),
        ("repetition_penalty", -1.0, "use 1 to turn it off"),
        ("repetition_penalty", math.inf, "use 1 to turn it off"),
        ("presence_penalty", math.nan, "use 0 to turn it off"),
        ("frequency_penalty", math.inf, "use 0 to turn it off"),
        ("frequency_penalty", 1e39, "use 0 to turn it off"),
        ("logit_bias", {3: math.nan}, "use -inf to ban"),
        ("logit_bias", {3: math.inf}, "use -inf to ban"),
        ("logit_bias", {-1: 1.0}, "use token ids"),
        ("allowed_token_ids", (), "use None to allow all"),
        ("allowed_token_ids", (1, -2), "use token ids"),
        ("seed", -1, "use None"),
        ("seed", 2**32, "use None"),
        ("stop", "end", "wrap a single one"),
        ("stop", ("end", ""), "drop the empty one"),
        ("stop_token_ids", (-1,), "use token ids"),
        ("log_probs", -1, "None to turn them off"),
        ("log_probs", 21, "ask for fewer"),
        ("draft_length", -1, "use 0 to turn speculation off"),
    ],
)
def test_bad_value_is_refused_with_name_value_and_remedy(name, value, remedy):
    with pytest.raises(ValueError) as error:
        Settings(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name}: expected ")
    assert ", got " in message
    assert remedy in message.split("; ", 1)[1]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("stop", None, "use () for none"),
        ("stop", 5, "use () for none"),
        ("stop", b"end", "use () for none"),
        ("stop", [None], "use () for none"),
        ("stop", (text for text in ("end",)), "use () for none"),
        ("stop_token_ids", 2, "wrap a single one"),
        ("stop_token_ids", None, "wrap a single one"),
        ("stop_token_ids", np.array(2), "wrap a single one"),
        ("stop_token_ids", "2", "wrap a single one"),
        ("stop_token_ids", (1.0,), "use token ids"),
        ("allowed_token_ids", 2, "wrap a single one"),
        ("allowed_token_ids", "all", "wrap a single one"),
        ("logit_bias", None, "use {} for none"),
        ("logit_bias", [(3, 1.0)], "use {} for none"),
        ("logit_bias", {"3": 1.0}, "use token ids as keys"),
        ("logit_bias", {3: "1"}, "use -inf to ban"),
        ("logit_bias", {3: True}, "use -inf to ban"),
        ("max_tokens", None, "at least one token"),
        ("max_tokens", 1.5, "at least one token"),
        ("temperature", "warm", "use 0 for greedy"),
        ("temperature", None, "use 0 for greedy"),
        ("top_p", None, "use 1 to turn it off"),
        ("seed", "x", "use None"),
        ("ignore_eos", 1, "pass a bool"),
        ("draft_length", 1.5, "use 0 to turn speculation off"),
    ],
)
def test_value_of_another_kind_is_refused_with_name_value_and_remedy(name, value, remedy, unchecked):
    with pytest.raises(ValueError) as error:
        Settings(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{name}: expected ")
    assert ", got " in message
    assert remedy in message.split("; ", 1)[1]


def test_unknown_names_and_values_without_a_name_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_token'"):
        Settings(max_token=3)
    with pytest.raises(TypeError, match="positional argument"):
        Settings(3)


def test_ids_may_come_in_any_collection(unchecked):
    settings = Settings(stop_token_ids=np.array([3, 5]), allowed_token_ids=range(4), stop=["a"])
    assert settings.stop_token_ids == (3, 5)
    assert settings.allowed_token_ids == (0, 1, 2, 3)


def test_settings_from_json_go_on_top_of_others(unchecked):
    base = Settings(max_tokens=9, temperature=0.5)
    settings = settings_from_json({"temperature": 0, "logit_bias": {"3": 1.5, "12": -2}, "stop": ["x"]}, base)
    assert settings == Settings(max_tokens=9, logit_bias={3: 1.5, 12: -2.0}, stop=("x",))
    assert settings_from_json({}, base) == base


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias: expected token ids as keys, got 'a'; write"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias: expected token ids as keys, got '1.0'; write"),
        ({"logit_bias": {"-1": 1}}, "logit_bias: expected token ids as keys, got '-1'; write"),
        ({"logit_bias": [1]}, r"logit_bias: expected a mapping of token ids to numbers, got \[1\]; use"),
        ({"max_token": 1, "sede": 2}, "settings: expected names out of max_tokens, .* got max_token, sede; "),
        ({"top_p": 2}, r"top_p: expected a number in \(0, 1\], got 2; use 1"),
        (5, "settings: expected an object, got 5; write"),
        (None, "settings: expected an object, got None; write"),
    ],
)
def test_wrong_json_is_refused(values, message, unchecked):
    with pytest.raises(ValueError, match=f"^{message}"):
        settings_from_json(values, Settings())


def test_defaults_are_greedy_without_any_processor():
    settings = Settings()
    assert (settings.max_tokens, settings.temperature, settings.top_k, settings.top_p) == (
        256,
        0.0,
        None,
        1.0,
    )
    assert (settings.seed, settings.log_probs, settings.draft_length) == (None, None, None)
    settings.check_against(8, eos_ids=(7,))


def test_limits_themselves_are_accepted():
    Settings(
        top_p=1.0, min_p=1.0, temperature=1e-6, seed=2**32 - 1, log_probs=20, min_tokens=256, draft_length=0
    )
    Settings(logit_bias={2: -math.inf}, presence_penalty=-2.0, stop=["end"], stop_token_ids=[3], log_probs=0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("logit_bias", Settings(logit_bias={8: 1.0})),
        ("allowed_token_ids", Settings(allowed_token_ids=(3, 8))),
        ("stop_token_ids", Settings(stop_token_ids=(9,))),
        ("log_probs", Settings(log_probs=9)),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(name, settings):
    settings.check_against(10 if name != "log_probs" else 9)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*vocabulary size 8, got"):
        settings.check_against(8)


def test_settings_that_leave_no_token_are_refused():
    with pytest.raises(
        ValueError, match=r"^allowed_token_ids: expected a token that logit_bias does not ban"
    ):
        Settings(allowed_token_ids=(1, 2), logit_bias={1: -math.inf, 2: -math.inf}).check_against(8)
    only_stops = Settings(allowed_token_ids=(1, 7), stop_token_ids=(1,), min_tokens=1)
    with pytest.raises(ValueError, match=r"^min_tokens: expected 0 when only stop ids may be emitted, got 1"):
        only_stops.check_against(8, eos_ids=(7,))
    only_stops.check_against(8, eos_ids=(6,))


def test_stop_ids_are_the_models_and_the_requests():
    assert Settings(stop_token_ids=(9, 2)).stop_ids((2, 7)) == (2, 7, 9)
    assert Settings(stop_token_ids=(9,), ignore_eos=True).stop_ids((2, 7)) == (9,)
    assert Settings().stop_ids(()) == ()
