"""What is checked before a handler runs: host name, origin, body type, drain.

Runs in the request's own task; owns nothing. The rules, all on from the first day:

* The Host header must be a loopback name, the bound host or a listed one; a server bound to every
  interface (``0.0.0.0`` or ``::``) also takes any IP address, never an unlisted name. A page that
  rebinds its own DNS name to this machine always sends that name. HTTP/1.0 may omit the header.
* A body must be ``application/json``. A foreign page can send that only after a preflight, which
  is refused unless its origin is listed, so this is also the guard against cross-site posts. A
  request without any content type is let through only when it has no Origin header either, that
  is, when no browser sent it.
* No CORS header is sent unless origins are configured; credentials are never allowed.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from quart import Response, request

from mlx_troupe.runtime.errors import Unavailable

from .errors import HttpRefusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quart import Quart
    from quart.wrappers import Request

    from .seams import Edge, HttpSettings

WILDCARD_BINDS = frozenset({"0.0.0.0", "::", ""})
PREFLIGHT_MAX_AGE_SECONDS = 600


def host_name(header: str) -> str | None:
    """The host of a Host header without its port, in lower case; None if it is malformed."""
    text = header.strip().lower()
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        valid = bool(bracket) and (port == "" or _is_port(port))
    else:
        name, colon, port = text.partition(":")
        valid = colon == "" or port.isdecimal()
    return name.removesuffix(".") if valid and name else None


def is_host_allowed(header: str, bound: str, allowed: Iterable[str]) -> bool:
    """Whether a Host header may address a server bound to ``bound``."""
    names = {name.lower() for name in allowed}
    if "*" in names:
        return True
    name = host_name(header)
    if name is None:
        return False
    if name == "localhost" or name.endswith(".localhost") or name in names | {bound.lower()}:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or bound in WILDCARD_BINDS


def allowed_origin(origin: str | None, origins: tuple[str, ...]) -> str | None:
    """The value of Access-Control-Allow-Origin for an Origin header; None = not allowed."""
    if origin is None or not origins:
        return None
    if "*" in origins:
        return "*"
    return origin if origin in origins else None


def check_json_headers(incoming: Request) -> None:
    """Refuse a body that is not plain UTF-8 JSON by its headers. Raises HttpRefusal (415)."""
    encoding = incoming.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise HttpRefusal(
            415, "compressed request bodies are not accepted", code="unsupported_media_type"
        )
    if incoming.mimetype == "application/json":
        return
    if not incoming.headers.get("Content-Type") and "Origin" not in incoming.headers:
        return
    raise HttpRefusal(
        415, "the content type must be application/json", code="unsupported_media_type"
    )


def add_guards(app: Quart, edge: Edge) -> None:
    """Install the checks in front of every route, known or not."""

    async def before() -> Response | None:
        _check_host(request, edge.settings)
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return _preflight(request, edge.settings)
        if edge.draining and request.method == "POST":
            raise Unavailable("the server is shutting down")
        return None

    async def after(response: Response) -> Response:
        origins = edge.settings.cors_origins
        allowed = allowed_origin(request.headers.get("Origin"), origins)
        if allowed is not None:
            response.headers["Access-Control-Allow-Origin"] = allowed
        if origins and "*" not in origins:
            response.headers.add("Vary", "Origin")
        return response

    app.before_request(before)
    app.after_request(after)


def _is_port(text: str) -> bool:
    return text.startswith(":") and text[1:].isdecimal()


def _check_host(incoming: Request, settings: HttpSettings) -> None:
    header = incoming.headers.get("Host", "")
    if header == "" and incoming.http_version == "1.0":
        return
    if not is_host_allowed(header, settings.host, settings.allowed_hosts):
        raise HttpRefusal(
            403,
            "this host name is not allowed; list it in allowed_hosts to serve under it",
            code="host_not_allowed",
        )


def _preflight(incoming: Request, settings: HttpSettings) -> Response | None:
    """Answer a preflight of a listed origin; any other goes on to the router (404 or 405)."""
    if allowed_origin(incoming.headers.get("Origin"), settings.cors_origins) is None:
        return None
    methods = _methods_of(incoming)
    if not methods:
        return None
    response = Response(b"", 204)
    response.headers["Access-Control-Allow-Methods"] = ", ".join(methods)
    wanted = incoming.headers.get("Access-Control-Request-Headers")
    if wanted:
        response.headers["Access-Control-Allow-Headers"] = wanted
    response.headers["Access-Control-Max-Age"] = str(PREFLIGHT_MAX_AGE_SECONDS)
    return response


def _methods_of(incoming: Request) -> list[str]:
    """Methods that are routed at this path, sorted; empty for an unknown path."""
    error = incoming.routing_exception
    valid = getattr(error, "valid_methods", None)
    return sorted(valid) if valid else []
