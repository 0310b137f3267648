"""A headless Chromium for tests of HTML pages: Playwright's own, or one that is installed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.waiting import HANG

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Playwright

_NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)


def launch(playwright: Playwright) -> Browser:
    """Start a browser; skips the test where there is none."""
    from playwright.sync_api import Error

    try:
        return playwright.chromium.launch(timeout=1000 * HANG)
    except Error as error:
        if "Executable doesn't exist" not in error.message:
            raise
    for name in _NAMES:
        path = shutil.which(name)
        if path is not None:
            return playwright.chromium.launch(executable_path=path, timeout=1000 * HANG)
    pytest.skip("no Chromium on this machine: run tools/browser.sh")
