"""What holds for every test: our folders are imported as loadplan.* only, and hypothesis is reproducible in CI."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    deadline=None,  # machines are shared: a slow example is no fault
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("explore", parent=settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", autouse=True)
def _usual_process() -> Iterator[None]:
    """As a person's terminal has it: remotes may be contacted, and Ctrl-C is heard.

    Test modules that talk to transformers put the hub out of reach when they are imported, which also holds for our
    remotes; and what a shell starts in the background ignores SIGINT, in all of its children.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOADPLAN_OFFLINE", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a folder was imported by its bare name: its classes would exist twice."""
    leaked = {"cache", "compiler", "recipes", "runtime"} & set(sys.modules)
    if leaked:
        print(f"\nimported by bare name, not as loadplan.*: {sorted(leaked)}")
        session.exitstatus = 1
