"""A request's text and the tokens that belong to it agree at a stop."""

from jspec.text.output import Output


def test_the_token_that_completes_a_stop_string_is_named(smollm2):
    ids = smollm2.encode("One two. Three four. Five")
    texts = [smollm2.decode([id_]) for id_ in ids]
    assert texts[:5] == ["One", " two", ".", " Three", " four"]

    output = Output(tokenizer=smollm2, stop=[" three", " Three f"])
    assert output.push(ids[:2], last=False) == ("One two", None)
    assert output.push(ids[2:], last=False) == (".", 2)  # " four" completes it
    assert output.text == "One two."


def test_rounds_of_any_size_give_the_same_text(smollm2):
    ids = smollm2.encode("naïve 東京 😀 END of it")
    for size in range(1, len(ids) + 1):
        output = Output(tokenizer=smollm2, stop=["END"])
        for start in range(0, len(ids), size):
            _, index = output.push(ids[start : start + size], last=False)
            if index is not None:
                assert smollm2.decode(ids[: start + index + 1]).endswith("END")
                break
        assert output.text == "naïve 東京 😀 "


def test_the_last_round_lets_out_what_was_held_back(smollm2):
    output = Output(tokenizer=smollm2, stop=["endless"])
    assert output.push(smollm2.encode("the end"), last=False) == ("the ", None)
    assert output.push([2], last=True) == ("end", None)
    assert output.text == "the end"


def test_a_stop_string_that_the_end_of_the_text_completes_is_a_stop(smollm2):
    start = smollm2.encode("東")[:1]  # the first bytes of a character: U+FFFD, once nothing follows
    output = Output(tokenizer=smollm2, stop=["\ufffd"])
    assert output.push(smollm2.encode("far"), last=False) == ("far", None)
    assert output.push([*smollm2.encode(" east"), *start], last=True) == (" east", 1)
    assert output.text == "far east"

    output = Output(tokenizer=smollm2, stop=["\ufffd"])
    output.push(start, last=False)
    assert output.push([], last=True) == ("", None)  # a request that failed: there is no token to end with


def test_without_a_tokenizer_there_is_no_text():
    output = Output(tokenizer=None, stop=[])
    assert output.push([1, 2, 3], last=True) == ("", None)
    assert output.text == ""
