import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "train" / "recipes" / "smollm2" / "prompts.py"


@pytest.fixture(scope="module")
def prompts():
    spec = importlib.util.spec_from_file_location("smollm2_prompts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function(name, **types):
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {
        "name": name,
        "description": f"Does {name}. And more.",
        "parameters": {"type": "dict", "properties": properties, "required": list(types)},
    }


def question(number, *functions, text=None):
    text = text or f"Please do thing number {number}."
    return {
        "id": f"q_{number}",
        "question": [[{"role": "user", "content": text}]],
        "function": list(functions),
    }


# Requests 0 to 199 have a function each; 200 to 239 share one; 240 asks a held-out or trained request again.
CALLS = [question(n, function(f"f{n}", x="integer")) for n in range(200)]
CALLS += [question(n, function("shared.all", y="string")) for n in range(200, 240)]
CALLS += [question(240, function("other", z="float"), text="Please do thing number 0.")]
CALLS += [question(241, function("far", z="float"), text="Bitte tu das: 做这个")]
CALLS += [question(242, function("far", z="float"), text="long " * 100)]


@pytest.fixture(scope="module")
def packages(prompts, tmp_path_factory):
    """A folder with the calls and a wheel with the chats, as the two packages have them."""
    folder = tmp_path_factory.mktemp("packages")
    for name in prompts.CALL_FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (folder / prompts.CALL_FILES[0]).write_text("".join(json.dumps(row) + "\n" for row in CALLS))
    chats = [
        {"id": f"c{n}_0", "conversations": [{"from": "human", "value": f"Question {n} about cats?"}]}
        for n in range(90)
    ]
    chats += [
        {"id": "c0_0", "conversations": [{"from": "human", "value": "question 0, about CATS"}]},
        {"id": "d_0", "conversations": [{"from": "human", "value": "short"}]},
        {"id": "e_0", "conversations": [{"from": "human", "value": "你好，这是一个问题。你好吗"}]},
        {"id": "f_1", "conversations": [{"from": "human", "value": "a later part of a conversation"}]},
        {"id": "g_0", "conversations": [{"from": "gpt", "value": "begins with an answer"}]},
        {"id": "h_0", "conversations": []},
    ]
    with zipfile.ZipFile(folder / "chats.whl", "w") as wheel:
        wheel.writestr(prompts.CHAT_FILE, json.dumps(chats, indent=1)[:-2] + ',\n {"id": "cut_0", "conver')
    return [folder / "chats.whl", folder]


def last(row):
    return row["messages"][-1]["content"]


def test_held_out_calls_share_neither_request_nor_function_with_training(prompts, packages):
    parts = prompts.json_rows(prompts.reader(packages))
    requests, functions = {}, {}
    for part, rows in parts.items():
        asked = [last(row).split("\n\nRequest: ") for row in rows]
        requests[part] = {request for _, request in asked}
        functions[part] = {line.split("(")[0] for lines, _ in asked for line in lines.split("\n")[1:]}
    assert not requests["train"] & requests["heldout"]
    assert not functions["train"] & functions["heldout"]
    assert 60 <= len(parts["heldout"]) <= 70
    assert "shared.all" in functions["train"]  # a group this large is not held out
    assert requests["train"] | requests["heldout"] == {f"Please do thing number {n}." for n in range(240)}
    same = functions["train" if "Please do thing number 0." in requests["train"] else "heldout"]
    assert {"f0", "other"} <= same


def test_training_calls_come_alone_and_beside_a_function_that_is_not_needed(prompts, packages):
    rows = prompts.json_rows(prompts.reader(packages))["train"]
    lines = [last(row).split("\n\n")[0].count("\n") for row in rows]
    assert set(lines) == {1, 2}
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(len(row["messages"]) == 6 and row["task"] == "json" for row in rows)


def test_chats_are_distinct_first_messages_in_latin_script(prompts, packages):
    parts = prompts.chat_rows(prompts.reader(packages)(prompts.CHAT_FILE))
    assert {part: len(rows) for part, rows in parts.items()} == {"heldout": 60, "train": 30}
    texts = {last(row) for rows in parts.values() for row in rows}
    assert texts == {f"Question {n} about cats?" for n in range(90)}


def test_the_same_packages_give_the_same_prompts(prompts, packages):
    once, again = (prompts.json_rows(prompts.reader(packages)) for _ in range(2))
    assert once == again


def test_signatures_are_short(prompts):
    schema = function(
        "shop.find", query="string", price="float", size="dict", more="any", least="integer", sixth="any"
    )
    schema["parameters"]["properties"]["query"]["enum"] = ["a", "b"]
    schema["parameters"]["properties"]["size"] = {"type": "array", "items": {"type": "float"}}
    assert prompts.signature(schema) == (
        "shop.find(query: a|b, price: number, size: number[], more: any, least: integer): Does shop.find"
    )


def test_a_missing_package_is_named(prompts, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"packages: expected some/file in one of .*; pass the wheels"
    ):
        prompts.reader([tmp_path])("some/file")
