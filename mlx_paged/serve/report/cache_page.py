"""The page ``/cache`` of the server: one HTML file that asks ``/v1/cache/stats`` again and again."""

from __future__ import annotations

import functools
from importlib import resources

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


@functools.cache
def html() -> bytes:
    return (resources.files(__package__) / "cache_page.html").read_bytes()
