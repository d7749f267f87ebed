"""Errors in the form that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}.

`Refused` is the proxy's own word to a client. What a server answered goes to the client as it came (`upstream.Failed`).
"""

import json


class Refused(Exception):
    """An answer that the proxy gives by itself."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None, close: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after  # seconds
        self.close = close  # the connection ends with this answer


def kind(status: int) -> str:
    """vLLM's and OpenAI's names for the statuses that occur here."""
    names = {
        400: "invalid_request_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "invalid_request_error",
        415: "invalid_request_error",
    }
    return names.get(status, "server_error" if status >= 500 else "invalid_request_error")


def body(status: int, message: str, param: str | None = None) -> bytes:
    """The JSON document, also the data of an error event inside of a stream."""
    return json.dumps({"error": {"message": message, "type": kind(status), "param": param, "code": status}}).encode()
