"""The error conditions of the service, and the exception that carries one to the client."""

from __future__ import annotations

NOT_FOUND = "amqp:not-found"
NOT_ALLOWED = "amqp:not-allowed"
UNAUTHORIZED = "amqp:unauthorized-access"
DECODE = "amqp:decode-error"
TOO_LARGE = "amqp:link:message-size-exceeded"
DETACH_FORCED = "amqp:link:detach-forced"
NOT_IMPLEMENTED = "amqp:not-implemented"

ARGUMENT = "com.microsoft:argument-error"
BUSY = "com.microsoft:server-busy"
LOCK_LOST = "com.microsoft:message-lock-lost"
SESSION_LOCKED = "com.microsoft:session-cannot-be-locked"
SESSION_LOST = "com.microsoft:session-lock-lost"
TIMEOUT = "com.microsoft:timeout"

_STATUS_CODES = {
    NOT_FOUND: 404,
    NOT_ALLOWED: 400,
    ARGUMENT: 400,
    UNAUTHORIZED: 401,
    LOCK_LOST: 410,
    SESSION_LOST: 410,
    BUSY: 503,
    NOT_IMPLEMENTED: 501,
}


class Refused(Exception):
    """A request of a client is refused, with the condition that the service would send."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = condition
        self.description = description
        self.status_code = _STATUS_CODES.get(condition, 500)  # of a management node
