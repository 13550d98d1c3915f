"""Where the dashboard's pages are mounted."""

from __future__ import annotations

from starlette.routing import BaseRoute

from lamina.serve.app import Service


def pages(service: Service) -> list[BaseRoute]:
    """The routes of the pages, made from what is served. They are guarded as the rest is: keys, limits, headers."""
    return []
