"""Remotes are contacted, whatever another test module or the user's environment says of the hub."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOADPLAN_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
