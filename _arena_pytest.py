"""The door of arena's pytest plugin: it knows the marker, and imports arena where a test has it.

It lies outside the package, for pytest imports it in every project that has tick-arena installed.
"""

from __future__ import annotations

import pytest

_MARKER = (
    "arena(max_escapes=0, flat=True): fail the test when more than max_escapes escapes of arena's "
    "ticks are alive after it (None: any number), or when some keep growing tick after tick"
)
_NAME = "arena-watch"


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known to ``--markers`` and ``--strict-markers``."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(trylast=True)  # other plugins may add the marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring in what watches tests if there is one to watch."""
    if config.pluginmanager.has_plugin(_NAME):
        return
    if any(item.get_closest_marker("arena") for item in items):
        if pytest.version_tuple < (8,):
            raise pytest.UsageError("pytest.mark.arena needs pytest 8 or newer")
        from arena import pytest_plugin

        config.pluginmanager.register(pytest_plugin.Plugin(), _NAME)
