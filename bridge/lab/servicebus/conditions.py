"""The error conditions of the service, and the exception that carries one to the client."""

from __future__ import annotations

NOT_FOUND = "amqp:not-found"
NOT_ALLOWED = "amqp:not-allowed"
UNAUTHORIZED = "amqp:unauthorized-access"
INTERNAL = "amqp:internal-error"
DECODE = "amqp:decode-error"
QUOTA = "amqp:resource-limit-exceeded"
TOO_LARGE = "amqp:link:message-size-exceeded"
DETACH_FORCED = "amqp:link:detach-forced"
NOT_IMPLEMENTED = "amqp:not-implemented"

ARGUMENT = "com.microsoft:argument-error"
BUSY = "com.microsoft:server-busy"
DISABLED = "com.microsoft:entity-disabled"
LOCK_LOST = "com.microsoft:message-lock-lost"
MESSAGE_NOT_FOUND = "com.microsoft:message-not-found"
SESSION_LOCKED = "com.microsoft:session-cannot-be-locked"
SESSION_LOST = "com.microsoft:session-lock-lost"
TIMEOUT = "com.microsoft:timeout"

STATUS_CODES = {
    NOT_FOUND: 404,
    MESSAGE_NOT_FOUND: 404,
    NOT_ALLOWED: 400,
    ARGUMENT: 400,
    DECODE: 400,
    UNAUTHORIZED: 401,
    QUOTA: 403,
    DISABLED: 400,
    LOCK_LOST: 410,
    SESSION_LOST: 410,
    SESSION_LOCKED: 409,
    BUSY: 503,
    NOT_IMPLEMENTED: 501,
}


class Refused(Exception):
    """A request of a client is refused, with the condition that the service would send."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = condition
        self.description = description

    @property
    def status_code(self) -> int:
        """Return the status code that a management node sends for this condition."""
        return STATUS_CODES.get(self.condition, 500)
