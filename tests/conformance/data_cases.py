"""Runs the golden `data_loss_mask` case: conversations to token ids and loss masks.

Format: `tokenizer.json`; `cases.json` with chat templates (`jinja`, by name), the settings that each kind of
data was prepared with (`templates`, by name) and the `cases`. Of the settings only these are read: the system
prompt, the strings that are not trained on, and whether the text is in the harmony format, which is rendered
by a template of our own. Headers and ends of turns come from the chat template.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jspec.text.tokenizer import Tokenizer
from jspec_train.data.answers import AnswerRules, find_answers, find_answers_in_text
from jspec_train.data.chat import chat_with_template
from jspec_train.data.conversations import clean, read_conversation
from jspec_train.data.supervision import longest_run
from jspec_train.data.tokens import tokenise_whole

HARMONY = "openai-harmony"


def run_data_case(folder: Path) -> None:
    """Every conversation of the case; ids and masks exactly."""
    values = json.loads((folder / "cases.json").read_text("utf-8"))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert values["cases"], f"{folder}: no case in the file"
    for number, case in enumerate(values["cases"]):
        template = values["jinja"].get(case["jinja"])
        ids, mask = prepared(backend, template, values["templates"][case["template"]], case)
        name = f"{folder.name} {number} ({case['template']})"
        np.testing.assert_array_equal(ids, case["input_ids"], err_msg=f"{name}: input_ids")
        np.testing.assert_array_equal(mask, np.asarray(case["loss_mask"], bool), err_msg=f"{name}: loss_mask")
        assert (longest_run(mask) >= 2) == case["has_two_consecutive"], f"{name}: has_two_consecutive"


def prepared(
    backend: tokenizers.Tokenizer, template: str | None, settings: Mapping[str, Any], case: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask of one conversation."""
    harmony = settings["parser_type"] == HARMONY
    chat = chat_with_template(
        Tokenizer(backend=backend, chat_templates={}, special_tokens={}, bos_id=None, eos_ids=()),
        "harmony" if harmony else template,
        case["template_kwargs"],
    )
    rules = AnswerRules(
        through_turn=True,  # their end of turn takes the line break behind it
        last_only=case["train_only_last_turn"],
        ignored=tuple(settings["ignore_token"] or ()),
    )
    if case["preformatted"]:
        marked = find_answers_in_text(chat, case["conversation"], rules)
    else:
        conversation = read_conversation("case", case, "conversation")
        marked = find_answers(chat, clean(conversation, system=settings["system_prompt"]), rules)
    tokens = tokenise_whole(chat.tokenizer, marked.text, marked.answers)
    return tokens.ids[: case["max_length"]], tokens.loss_mask[: case["max_length"]]
