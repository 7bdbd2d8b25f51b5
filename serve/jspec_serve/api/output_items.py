"""The output of a response as it grows: messages and calls, and the events that tell of them."""

import copy
import uuid
from collections.abc import Sequence
from typing import Any

from jspec_serve.api.tools import Called


class OutputItems:
    """Items in the order in which the model wrote them; text between two calls is a message of its own."""

    def __init__(self) -> None:
        """No item yet."""
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the message that text is added to
        self._undecided: list[Any] = []  # log-probabilities of tokens that may be text or a call

    def values(self) -> list[dict[str, Any]]:
        """All items so far."""
        return copy.deepcopy(self._items)

    def add(self, found: Sequence[str | Called], log_probs: Sequence[Any]) -> list[dict[str, Any]]:
        """Takes text and calls; returns the events.

        Args:
          found: in order; nothing while it is open whether text or a call comes.
          log_probs: of the tokens that came with them; messages have them, calls do not.
        """
        if not found:
            self._undecided.extend(log_probs)
            return []
        events: list[dict[str, Any]] = []
        pending = [*self._undecided, *log_probs]
        self._undecided = []
        for one in found:
            if isinstance(one, Called):
                events += self._close("completed") + self._call(one)
                pending = list(log_probs)
            elif one or pending:
                events += self._text(one, pending)
                pending = log_probs = []
        return events

    def finish(self, status: str) -> list[dict[str, Any]]:
        """Ends the last item; an answer of nothing is an empty message."""
        events = self._text("", []) if not self._items else []
        return events + self._close(status)

    def _text(self, text: str, log_probs: list[Any]) -> list[dict[str, Any]]:
        events = self._begin() if self._open is None else []
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        part["logprobs"].extend(log_probs)
        delta = {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": log_probs}
        return [*events, delta] if text or log_probs else events

    def _begin(self) -> list[dict[str, Any]]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        self._items.append(self._open)
        added = self._item_event("added", self._open)
        self._open["content"].append(part)
        return [
            added,
            {"type": "response.content_part.added", **self._place(), "part": copy.deepcopy(part)},
        ]

    def _close(self, status: str) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        item, part = self._open, copy.deepcopy(self._open["content"][0])
        item["status"] = status
        events = [
            {
                "type": "response.output_text.done",
                **self._place(),
                "text": part["text"],
                "logprobs": part["logprobs"],
            },
            {"type": "response.content_part.done", **self._place(), "part": part},
            self._item_event("done", item),
        ]
        self._open = None
        return events

    def _call(self, called: Called) -> list[dict[str, Any]]:
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": called.message()["id"],
            "name": called.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._items.append(item)
        added = self._item_event("added", item)
        item.update(arguments=called.arguments, status="completed")
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        name = "response.function_call_arguments"
        return [
            added,
            {"type": f"{name}.delta", **place, "delta": called.arguments},
            {"type": f"{name}.done", **place, "arguments": called.arguments, "name": called.name},
            self._item_event("done", item),
        ]

    def _item_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": f"response.output_item.{kind}",
            "output_index": len(self._items) - 1,
            "item": copy.deepcopy(item),
        }

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items) - 1, "content_index": 0}
