"""Every error that crosses a layer, by who is at fault.

    TroupeError
    ├── RequestError            the client's fault; nothing was started, or a grammar grew too large
    │   ├── InvalidRequest          a value that cannot be served
    │   ├── ContextLengthExceeded   the prompt fills the model's window
    │   ├── Unsupported             a feature that this server does not offer
    │   ├── UnknownStream           a stream that nobody can go on with
    │   └── AdapterError            an adapter that cannot be read, or does not fit the model
    ├── Overloaded              refused early; try again after ``retry_after`` seconds
    ├── Unavailable             the engine is starting, restarting or gone
    ├── GenerationFailed        the request was admitted and then failed
    ├── StateRefused            a kept state that cannot be exported or imported
    └── ModelError              a model that cannot be found, read or run

Owned by nobody, raised everywhere, mapped to HTTP statuses in one table at the edge.
"""

from __future__ import annotations


class TroupeError(Exception):
    """Base of all errors with a message that a person may read.

    ``code`` is a stable machine-readable word (``"invalid_value"``, ``"queue_full"`` …).
    """

    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class RequestError(TroupeError):
    """The request itself is wrong; ``param`` names the offending field where there is one."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class InvalidRequest(RequestError):
    """A value of the wrong type or out of range."""


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room for a single token in the model's context window."""

    code = "context_length_exceeded"


class Unsupported(RequestError):
    """A named feature that this server does not offer (yet); never silently dropped."""

    code = "unsupported_parameter"


class UnknownStream(RequestError):
    """A client comes back to a stream of which nothing is known any more."""

    code = "unknown_stream"


class AdapterError(RequestError):
    """An adapter that is unknown, damaged, of an unsupported kind or made for another model."""

    code = "invalid_adapter"


class Overloaded(TroupeError):
    """The bounded queue is full; ``retry_after`` is in seconds and at least 1."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = max(1.0, retry_after)


class Unavailable(TroupeError):
    """The engine is loading, restarting or has failed for good."""

    code = "engine_unavailable"


class GenerationFailed(TroupeError):
    """A request that was admitted and could not be finished."""

    code = "generation_failed"


class StateRefused(TroupeError):
    """A kept state that has no form as bytes, or bytes that are no state of the loaded model."""

    code = "state_refused"


class NoRoom(StateRefused):
    """A state that is in order and that there is no room for now."""

    code = "no_room"


class ModelError(TroupeError):
    """A model that cannot be found, read, verified or run on this machine."""

    code = "model_error"
