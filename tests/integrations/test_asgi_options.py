"""The options of the ASGI middleware: what is wrong is said when it is made."""

from __future__ import annotations

from typing import Any

import pytest

import aiosync
from aiosync.integrations.asgi import WeightsMiddleware
from tests.integrations._asgi_calls import feed_at, hello


@pytest.mark.parametrize(
    "options",
    [
        {"exempt": "/healthz"},
        {"exempt": b"/healthz"},
        {"exempt": ["healthz"]},
        {"exempt": [b"/healthz"]},
        {"exempt": None},
        {"readyz": "readyz"},
        {"readyz": 1},
        {"timeout": -1},
        {"timeout": "2"},
        {"max_staleness": float("nan")},
        {"max_staleness": "60"},
        {"max_early_body": -1},
        {"max_early_body": 1.5},
        {"max_early_body": True},
        {"max_early_body": None},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(aiosync.ConfigError, match=f"{name} must be|a path must be"):
        WeightsMiddleware(hello, feed_at(1), **options)


def test_an_application_and_its_feed_in_the_wrong_order() -> None:
    swapped: Any = (feed_at(1), hello)
    with pytest.raises(aiosync.ConfigError, match="got WeightFeed and function"):
        WeightsMiddleware(*swapped)
    twice: Any = (hello, hello)
    with pytest.raises(aiosync.ConfigError, match="got function and function"):
        WeightsMiddleware(*twice)
