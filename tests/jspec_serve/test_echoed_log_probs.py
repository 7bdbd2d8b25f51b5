"""Log-probabilities of prompts over HTTP, and the evaluation harness that asks for them."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import openai
import pytest
from contract.engines import TABLE
from contract.words import WORDS, words_tokenizer
from served import NAME, line

LOG_PROBS = TABLE - np.log(np.exp(TABLE.astype(np.float64)).sum(axis=-1, keepdims=True))
PROMPT = [2, 3, 7, 1, 1, 4, 6, 0, 5]


def expected(ids) -> list[float]:
    return [LOG_PROBS[before, after] for before, after in itertools.pairwise(ids)]


def test_echo_tells_what_the_model_thought_of_the_prompt(served):
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "logprobs": 2, "echo": True}
    (choice,) = served.post("/v1/completions", **body).json()["choices"]
    got = choice["logprobs"]
    said = [int(TABLE[5].argmax())]
    said.append(int(TABLE[said[0]].argmax()))
    ids = PROMPT + said
    assert got["tokens"] == [WORDS[id_] for id_ in ids]
    assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
    assert got["token_logprobs"][1:] == pytest.approx(expected(ids), abs=1e-5)
    for before, top in zip(ids, got["top_logprobs"][1:], strict=False):
        assert top == pytest.approx(
            {WORDS[id_]: LOG_PROBS[before, id_] for id_ in np.argsort(-LOG_PROBS[before])[:2]}, abs=1e-5
        )
    text = choice["text"]
    assert [
        text[start:].lstrip().startswith(word)
        for start, word in zip(got["text_offset"], got["tokens"], strict=True)
    ] == [True] * len(ids)


def test_no_tokens_but_the_prompts(served):
    body = {"prompt": [PROMPT, PROMPT[:3]], "max_tokens": 0, "temperature": 0, "logprobs": 1, "echo": True}
    reply = served.post("/v1/completions", **body).json()
    for choice, ids in zip(reply["choices"], body["prompt"], strict=True):
        assert choice["text"] == " ".join(WORDS[id_] for id_ in ids)
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected(ids), abs=1e-5)
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["text_offset"]) == len(ids)
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["usage"]["prompt_tokens"] == len(PROMPT) + 3
    whole = served.post("/v1/completions", prompt="two", max_tokens=0, echo=True).json()["choices"][0]
    assert (whole["text"], whole["logprobs"]) == ("two", None)
    error = served.post("/v1/completions", prompt="two", max_tokens=0).json()["error"]
    assert error["param"] == "max_tokens"


def test_a_stream_begins_with_the_prompt_and_its_log_probs(served):
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1, "echo": True}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        whole = client.completions.create(**body).choices[0]
        parts = [part.choices[0] for part in client.completions.create(**body, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts for one in getattr(part.logprobs, name)] == getattr(
            whole.logprobs, name
        )
    assert parts[0].logprobs.tokens[: len(PROMPT)] == [WORDS[id_] for id_ in PROMPT]


def harness(answers: dict) -> list[tuple[float, bool]]:
    """What lm-eval reads out of a reply: the sum behind the context, and whether that is greedy."""
    found = []
    for choice, context in zip(answers["choices"], answers["contexts"], strict=True):
        values = choice["logprobs"]["token_logprobs"][context:-1]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][context:-1]]
        found.append((sum(values), values == best))
    return found


def test_batches_as_the_harness_sends_them(served):
    """Ids of several contexts and continuations at once; the one token that is asked for is cut off again."""
    greedy = [2]
    for _ in range(3):
        greedy.append(int(TABLE[greedy[-1]].argmax()))
    prompts, contexts = [[2, 3, 4, 5], [1, 7, 7], greedy], [2, 1, 1]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    reply = served.post("/v1/completions", **body).json()
    found = harness({**reply, "contexts": contexts})
    for (value, _), ids, context in zip(found, prompts, contexts, strict=True):
        assert value == pytest.approx(sum(expected(ids)[context - 1 :]), abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [False, False, True]


def lm_eval() -> str | None:
    """Its command: of this environment, or any on the path."""
    own = Path(sys.executable).parent / "lm_eval"
    if importlib.util.find_spec("lm_eval") is not None and own.exists():
        return str(own)
    return shutil.which("lm_eval")


@pytest.mark.extended
@pytest.mark.skipif(
    lm_eval() is None, reason="lm-eval is not installed: pip install 'lm-eval[api]' transformers"
)
def test_lm_eval_finds_the_models_own_log_likelihoods(served, tmp_path):
    documents = [
        {"context": "two three", "choices": ["four five", "one one", "six"], "label": 0},
        {"context": "one", "choices": ["seven", "two", "three three three"], "label": 1},
        {"context": "zero four", "choices": ["six", "five"], "label": 1},
    ]
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    task = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}},
        "test_split": "test",
    }
    choice = task | {
        "task": "words_choice",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    }
    says = task | {
        "task": "words_says",
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 9, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    for one in (choice, says):  # JSON is YAML
        (tmp_path / f"{one['task']}.yaml").write_text(json.dumps(one))
    words_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "zero", "eos_token": "seven"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    arguments = f"model={NAME},base_url={served.url}/v1/completions,tokenizer={tmp_path},num_concurrent=2"
    command = [
        lm_eval(),
        "run",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--batch_size",
        "2",
    ]
    command += ["--tasks", "words_choice,words_says", "--include_path", str(tmp_path), "--log_samples"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--output_path", str(tmp_path / "out")],  # type: ignore[list-item]
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ids = {word: id_ for id_, word in enumerate(WORDS)}
    (found,) = (tmp_path / "out").rglob("samples_words_choice*.jsonl")
    rows = [json.loads(row) for row in found.read_text().splitlines()]
    assert len(rows) == len(documents)
    for row in rows:
        for value, text in zip(row["filtered_resps"], row["doc"]["choices"], strict=True):
            context = [ids[word] for word in row["doc"]["context"].split()]
            whole = context + [ids[word] for word in text.split()]
            assert float(value[0]) == pytest.approx(sum(expected(whole)[len(context) - 1 :]), abs=1e-4)
    (found,) = (tmp_path / "out").rglob("samples_words_says*.jsonl")
    for row in map(json.loads, found.read_text().splitlines()):
        assert row["filtered_resps"] == [line(ids[row["doc"]["context"].split()[-1]], 9)]
