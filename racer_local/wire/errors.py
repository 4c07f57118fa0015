"""Errors in OpenAI's shape."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from racer_local.errors import BindingError, ConfigError, ContextFullError, ModelError, RacerError

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

KIND = re.compile(r"bool|str|int|RacerOptions|ToolChoice|TextPart|.*[\[\]()-].*")
"""Names of kinds, which pydantic puts between those of fields."""
MOST_TOLD = 3
"""Errors of one request that are named."""


class ApiError(Exception):
    """What a client is told, with the status of HTTP."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(" ".join(message.split()))  # what a client wrote may be in it
        self.status, self.code, self.param = status, code, param
        self.headers = {} if retry_s is None else {"Retry-After": str(max(1, math.ceil(retry_s)))}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @classmethod
    def of_form(cls, errors: Sequence[Mapping[str, Any]], within: int = 0) -> ApiError:
        """From what pydantic says of a request's form; `within`: how many of its places are not the request's own."""
        told = dict.fromkeys(_told(each, within) for each in errors)
        where = ".".join(map(str, errors[0]["loc"][within : within + 1])) or None
        return cls(422, "; ".join([*told][:MOST_TOLD]), param=where)

    @classmethod
    def of(cls, error: BaseException) -> ApiError:
        """What an error of the layers below says to a client. What nobody expected keeps its details to itself."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ContextFullError):
            return cls(400, str(error), code="context_length_exceeded")
        if isinstance(error, (ConfigError, ModelError)):
            return cls(400, str(error))
        if isinstance(error, (RacerError, BindingError)):
            return cls(500, str(error))
        return cls(500, f"the server failed with {type(error).__name__}; its log says where")


def _told(error: Mapping[str, Any], within: int) -> str:
    """One error of a request's form, in one line."""
    if error["type"] == "json_invalid":
        return f"the body is no JSON (from character {error['loc'][-1]} on)"
    if error["type"] == "model_attributes_type" and len(error["loc"]) == within:
        return "the body must be a JSON object, with the header Content-Type: application/json"
    place = [str(part) for part in error["loc"][within:] if not KIND.fullmatch(str(part))]
    where = f"{'.'.join(place)}: " if place else ""
    what = "there is no such field" if error["type"] == "extra_forbidden" else error["msg"]
    return where + what.removeprefix("Value error, ")
