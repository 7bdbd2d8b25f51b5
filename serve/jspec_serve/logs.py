"""Logs with one JSON object a line."""

import datetime
import json
import logging
import sys


class JsonLines(logging.Formatter):
    """Time, level, logger and message; and the fields that were passed as `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_json(level: str) -> None:
    """Sends all logs of this process to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
