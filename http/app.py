"""The HTTP application: routes, guards and error replies around one runtime.

Owns the :class:`~.seams.Edge` that its routes share. Knows nothing of sockets and signals; those
are ``http/server.py``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart_trio import QuartTrio

from .connection import EdgeConnection
from .errors import add_error_handlers
from .guards import add_guards
from .metrics import Metrics
from .routes_adapters import adapter_routes
from .routes_cache import cache_routes
from .routes_chat import chat_routes
from .routes_completions import completion_routes
from .routes_models import model_routes
from .routes_service import service_routes
from .routes_sessions import session_routes
from .seams import Edge, HttpSettings

if TYPE_CHECKING:
    from .seams import RuntimeLike


class EdgeApp(QuartTrio):
    """A Quart app whose connections unwind what their handlers opened."""

    asgi_http_class = EdgeConnection

    def __init__(self, edge: Edge) -> None:
        super().__init__(__name__, static_folder=None)
        self.edge = edge


def create_app(runtime: RuntimeLike, settings: HttpSettings | None = None) -> EdgeApp:
    """The app that serves ``runtime``; one runtime may have several apps."""
    settings = settings or HttpSettings()
    edge = Edge(runtime=runtime, settings=settings, metrics=Metrics(runtime))
    app = EdgeApp(edge)
    app.config.update(
        MAX_CONTENT_LENGTH=settings.max_body_bytes,
        BODY_TIMEOUT=settings.body_timeout,
        RESPONSE_TIMEOUT=None,
        PROPAGATE_EXCEPTIONS=False,
        PROVIDE_AUTOMATIC_OPTIONS=False,
    )
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False
    add_guards(app, edge)
    add_error_handlers(app)
    for routes in (
        chat_routes,
        completion_routes,
        model_routes,
        adapter_routes,
        cache_routes,
        session_routes,
        service_routes,
    ):
        app.register_blueprint(routes(edge))
    return app
