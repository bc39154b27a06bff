"""The constraint that parameters of a request put on its answer."""

from typing import Any

from mlx_paged.server.http import validated
from mlx_paged.server.request import Constraint
from mlx_paged.server.requests.fields import AnswerParameters, ToolParameters


def constraint_of(body: dict[str, Any], *, chat: bool = True) -> Constraint | None:
    """Return the constraint; as for a completion, which has no tools, unless ``chat``."""
    asked: AnswerParameters = validated(body, ToolParameters if chat else AnswerParameters)[0]
    return asked.constraint()
