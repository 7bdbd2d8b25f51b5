"""Characters whose bytes are several tokens, on a table whose tokens are bytes."""

import jax.numpy as jnp
import numpy as np
import openai
import pytest
import tokenizers
from served import NAME, serving

from jspec.decode import Method, Models
from jspec.drafters.ngram import ngram
from jspec.engine import Engine
from jspec.targets.table import TableTarget
from jspec.text.spelling import byte_characters
from jspec.text.tokenizer import Tokenizer

SAID = "€😀é!"  # 10 bytes, each a token, followed by the next one for ever
SIZE = len(SAID.encode()) + 1  # and "x", which begins it


def byte_tokenizer() -> Tokenizer:
    characters = byte_characters()
    vocabulary = {characters[byte]: id_ for id_, byte in enumerate(SAID.encode() + b"x")}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend=backend, chat_templates={}, special_tokens={}, bos_id=None, eos_ids=())


@pytest.fixture(scope="module")
def client():
    following = np.full((SIZE, SIZE), -9, np.float32)
    for id_ in range(SIZE):
        following[id_, (id_ + 1) % (SIZE - 1) if id_ < SIZE - 1 else 0] = 9
    engine = Engine(
        method=Method(
            target=TableTarget(vocab_size=SIZE),
            drafter=ngram(draft_length=4, min_n=1, max_n=2),
            max_log_probs=2,
        ),
        models=Models(target=(jnp.asarray(following),), drafter=()),
        tokenizer=byte_tokenizer(),
        max_slots=1,
        page_size=4,
        chunks=(3,),
    )
    with serving(engine) as one, openai.OpenAI(base_url=f"{one.url}/v1", api_key="x") as client_:
        yield client_


@pytest.mark.parametrize(("count", "text"), [(30, SAID * 3), (31, SAID * 3 + "�"), (36, SAID * 3 + "€�")])
def test_stream_never_splits_a_character(client, count, text):
    options = dict(model=NAME, prompt="x", max_tokens=count, temperature=0)
    whole = client.completions.create(**options)
    assert whole.choices[0].text == text
    assert whole.usage.completion_tokens == count
    assert whole.choices[0].model_extra["spec"]["accepted"] > 10
    parts = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    texts = [part.choices[0].text for part in parts[:-1]]
    assert "".join(texts) == text
    assert not any("�" in piece for piece in texts[:-1])
    assert parts[-1].usage.completion_tokens == count


def test_stop_string_of_split_characters_ends_the_text(client):
    reply = client.completions.create(
        model=NAME, prompt="x", max_tokens=40, temperature=0, stop=["😀é", "zz"]
    )
    assert reply.choices[0].text == "€"
    assert reply.usage.completion_tokens == 9


def test_log_probs_spell_bytes(client):
    rows = client.completions.create(model=NAME, prompt="x", max_tokens=10, temperature=0, logprobs=0)
    assert rows.choices[0].logprobs.tokens == [
        "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80",
        "bytes:\\xc3", "bytes:\\xa9", "!",
    ]  # fmt: skip
    assert rows.choices[0].logprobs.text_offset == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
