"""See __init__.py."""

from types import SimpleNamespace

RequestOutputKind = SimpleNamespace(FINAL_ONLY=None)
