"""Structured logs: one JSON object a line on stderr. Prompts, answers and whole transfer keys are never in them."""

import json
import logging
import time
from typing import IO

LOGGER = logging.getLogger("kvloom.proxy")

Field = str | int | float | bool | None | list[str]


class JsonLines(logging.Formatter):
    """time (UTC, RFC 3339), level, event, and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Field] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def to_stream(stream: IO[str], level: str) -> None:
    """Send the proxy's log there. Without this call it goes where the program that imports us sends its own."""
    output = logging.StreamHandler(stream)
    output.setFormatter(JsonLines())
    LOGGER.addHandler(output)
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False


def say(level: int, event: str, **fields: Field) -> None:
    """One line."""
    LOGGER.log(level, event, extra={"fields": fields})
