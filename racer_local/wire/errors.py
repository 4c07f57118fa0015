"""Errors in OpenAI's shape."""

from __future__ import annotations

import math
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
