"""The page ``/cache`` of the server: one HTML file that asks ``/v1/cache/stats`` again and again."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources


@functools.cache
def html() -> bytes:
    return (resources.files(__package__) / "cache_page.html").read_bytes()


def _hash_of(tag: str) -> str:
    """Return what a policy calls the one element of its kind, so that the browser runs no other."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; connect-src 'self'; script-src {_hash_of('script')}; "
    f"style-src {_hash_of('style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
