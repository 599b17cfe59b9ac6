"""The exception tree. Whatever fails anywhere in Baton is one of these, on the wire too.

`code` is what travels (`messages.WireError`); `from_wire` turns it back into the same class, so a
caller catches the error that the far side raised.
"""

from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    UNAUTHORIZED = "invalid_api_key"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    PEER_LOST = "peer_lost"
    NO_PREFILL = "no_prefill"
    MOVED = "moved"
    CANCELLED = "cancelled"
    DEADLINE = "deadline_exceeded"
    TRANSFER = "transfer_failed"
    STALE_BLOCK = "stale_block"
    INCOMPATIBLE = "incompatible"
    CONFIG = "config"
    INTERNAL = "internal"


class BatonError(Exception):
    """Root of the tree. `retry_after_s` is set where trying again later can help."""

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class ConfigError(BatonError):
    """A setting is wrong; the message names the key, its value and what would be right."""

    code = ErrorCode.CONFIG


class InternalError(BatonError):
    """The far side failed in a way it has no word for: a bug of ours."""


class InvalidTransition(BatonError):
    """A state machine was asked for a move that its table forbids: a bug of ours."""


class RequestError(BatonError):
    """The client's fault; trying again does not help."""

    code = ErrorCode.INVALID_REQUEST


class ContextLengthError(RequestError):
    code = ErrorCode.CONTEXT_LENGTH


class ModelNotFoundError(RequestError):
    code = ErrorCode.MODEL_NOT_FOUND


class NodeError(BatonError):
    """A node could not serve the call; another one, or this one later, may."""


class OverloadedError(NodeError):
    code = ErrorCode.OVERLOADED


class UnavailableError(NodeError):
    code = ErrorCode.UNAVAILABLE


class NoPrefillError(UnavailableError):
    """No prefill node can take the request, and the policy is to refuse it rather than compute it elsewhere."""

    code = ErrorCode.NO_PREFILL


class MovedError(NodeError):
    """The node is being drained and has let go of the request, which goes on elsewhere."""

    code = ErrorCode.MOVED


class UnauthorizedError(RequestError):
    """No API key, or one that nobody was given."""

    code = ErrorCode.UNAUTHORIZED


class PeerLostError(NodeError):
    code = ErrorCode.PEER_LOST


class CallCancelledError(NodeError):
    code = ErrorCode.CANCELLED


class DeadlineError(NodeError):
    code = ErrorCode.DEADLINE


class IncompatibleError(NodeError):
    """Two processes do not fit each other: wire version, KV layout, model, limits."""

    code = ErrorCode.INCOMPATIBLE


class TransferError(BatonError):
    """Blocks did not arrive; the prompt can be computed again."""

    code = ErrorCode.TRANSFER


class StaleBlockError(TransferError):
    """A block was reused between the promise and the read; its bytes were discarded."""

    code = ErrorCode.STALE_BLOCK


_BY_CODE: dict[ErrorCode, type[BatonError]] = {
    cls.code: cls
    for cls in (
        InternalError,
        ConfigError,
        RequestError,
        ContextLengthError,
        ModelNotFoundError,
        OverloadedError,
        UnavailableError,
        NoPrefillError,
        MovedError,
        UnauthorizedError,
        PeerLostError,
        CallCancelledError,
        DeadlineError,
        IncompatibleError,
        TransferError,
        StaleBlockError,
    )
}


def from_wire(code: ErrorCode, message: str, retry_after_s: float | None = None) -> BatonError:
    return _BY_CODE[code](message, retry_after_s=retry_after_s)
