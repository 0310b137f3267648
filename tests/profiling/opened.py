"""A page of a profile that is open in a browser, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.waiting import HANG

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page


class Opened:
    """A page that was opened, and what went wrong on it."""

    def __init__(self, browser: Browser, path: Path, **options: Any) -> None:
        context = browser.new_context(viewport={"width": 1300, "height": 900}, **options)
        context.set_offline(True)
        context.set_default_timeout(1000 * HANG)
        self.page: Page = context.new_page()
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.documentElement.dataset.firstDrawMilliseconds")
        self.page.locator("#timeline").scroll_into_view_if_needed()

    def _said(self, message: ConsoleMessage) -> None:
        self.wrong.append(message.text)

    def js(self, code: str, argument: Any = None) -> Any:
        return self.page.evaluate(code, argument)

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.js("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    @property
    def view(self) -> tuple[float, float]:
        self.settle()
        view = self.js("() => page.timeline.view")
        return view["from"], view["to"]

    def look(self, first: float, last: float) -> None:
        """Show this part of the step, from one time to another (ns)."""
        self.js("([first, last]) => page.timeline.look(first, last)", [first, last])
        self.settle()

    def place(self, time: float, row: int, lane: int = 0) -> tuple[float, float]:
        """Where on the screen a time (ns of the step) of a row is."""
        x, y = self.js(
            """([time, row, lane]) => {
              const { timeline } = page, layout = timeline.layout();
              const box = timeline.canvas.getBoundingClientRect();
              const y = layout.y(row, lane) - timeline.scroller.scrollTop + layout.laneHeight / 2;
              return [box.left + layout.x(time), box.top + y];
            }""",
            [time, row, lane],
        )
        return x, y

    def colour(self, time: float, row: int, lane: int = 0) -> tuple[int, int, int]:
        """What is painted at a time of a row, near the row's upper edge, away from labels."""
        r, g, b = self.js(
            """([time, row, lane]) => {
              const { timeline } = page, layout = timeline.layout(), ratio = devicePixelRatio;
              const y = layout.y(row, lane) - timeline.scroller.scrollTop + 3;
              const at = [layout.x(time) * ratio, y * ratio].map(Math.floor);
              const one = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
              one.drawImage(timeline.canvas, ...at, 1, 1, 0, 0, 1, 1);
              return Array.from(one.getImageData(0, 0, 1, 1).data.slice(0, 3));
            }""",
            [time, row, lane],
        )
        return r, g, b

    def theme_colour(self, name: str) -> tuple[int, int, int]:
        text = self.js(
            "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()",
            f"--{name}",
        )
        return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)

    def point(self, time: float, row: int, lane: int = 0) -> None:
        self.page.mouse.move(*self.place(time, row, lane))
        self.settle()

    def details(self) -> str:
        return self.page.locator("#details").inner_text()


def contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    """WCAG 2."""

    def luminance(rgb: tuple[int, int, int]) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in (value / 255 for value in rgb)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
