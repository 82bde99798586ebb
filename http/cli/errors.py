"""Which exceptions a person can do something about, and the one line that says what.

Anything else is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

from ...runtime.errors import TroupeError


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in nested groups (a nursery wraps what its tasks raise), in order."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def plain_error(error: BaseException) -> str | None:
    """The message for the first leaf that a person can act on; None for faults of ours.

    When a group holds a fault of ours too, its traceback matters more than the plain line.
    """
    messages = [_message(leaf) for leaf in leaves(error)]
    if not messages or None in messages:
        return None
    return messages[0]


def _message(error: BaseException) -> str | None:
    match error:
        case TroupeError():
            return error.message
        case BrokenPipeError():
            return None
        case OSError():
            named = f" ({error.filename})" if error.filename else ""
            return f"{error.strerror or error}{named}"
        case ImportError() if "libmlx" in str(error) or _top(error.name) in {"mlx", "mlx_lm"}:
            return f"MLX cannot be loaded on this machine: {error}\n{INSTALL_ADVICE}"
        case _:
            return None


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


INSTALL_ADVICE = (
    "On Linux, MLX needs a build for its device: pip install 'mlx-troupe[cpu]', or "
    "'mlx-troupe[cuda]' with an NVIDIA driver."
)
