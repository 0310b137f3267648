"""The HTML page in a real browser: it draws what was recorded, zooms, explains, asks nobody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from megalatent.passes.costs import Costs
from megalatent.profiling.html import write_html
from megalatent.profiling.records import PARTS, Recording
from tests.profiling.browser import launch
from tests.profiling.measured import measured
from tests.profiling.opened import Opened, contrast
from tests.profiling.synthetic import STAGES, UNIT, large_plan, recorded_steps, recording

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = {"F": "forward", "B": "backward", "H": "head", "wait": "wait"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = launch(playwright)
        yield started
        started.close()


@pytest.fixture(scope="module")
def recorded() -> Recording:
    return recording(((1,) * 8, (3, 2, 1, 2, 1, 1, 2, 1)), steps=2)


@pytest.fixture(scope="module")
def path(recorded: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "profile.html"
    write_html(recorded, path, findings={"K = 1/2/3": ["Stage 2 is slow."]})
    return path


@pytest.fixture
def opened(browser: Browser, path: Path) -> Iterator[Opened]:
    opened = Opened(browser, path, color_scheme="light")
    yield opened
    assert opened.wrong == []
    assert opened.requests == [path.as_uri()]
    opened.page.context.close()


def shown_step(recorded: Recording) -> Any:
    return recorded.cases[1].steps[0]


def origin(recorded: Recording) -> int:
    return min(rank.start for rank in shown_step(recorded).ranks)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_draws_every_kind_in_its_colour(
    opened: Opened, recorded: Recording, scheme: str
) -> None:
    opened.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    opened.page.mouse.move(0, 0)
    opened.settle()
    seen = set()
    for row, rank in enumerate(shown_step(recorded).ranks):
        for span in rank.spans:
            # Spans of a few pixels show plainly; others are checked when zoomed in.
            if span.kind not in NAMES or span.nanoseconds < 300_000:
                continue
            middle = (span.start + span.end) / 2 - origin(recorded)
            name = NAMES[span.kind] + (f"-{span.k}" if span.kind in "FB" else "")
            assert opened.colour(middle, row) == opened.theme_colour(name), span
            seen.add(name)
    assert seen == {
        *(f"{kind}-{k}" for kind in ("forward", "backward") for k in (1, 2, 3)),
        "head",
        "wait",
    }
    for row, rank in enumerate(shown_step(recorded).ranks):
        for span in rank.of_kind("B"):
            middle = (span.start + span.end) / 2 - origin(recorded)
            assert opened.colour(middle, row, lane=1) == opened.theme_colour(f"backward-{span.k}")


def test_it_is_readable_in_light_and_dark(opened: Opened) -> None:
    pages = {}
    for theme in ("light", "dark"):
        if theme == "dark":
            opened.page.get_by_role("button", name="Theme").click()
        for text in ("ink", "muted", "accent", "bound"):
            for ground in ("page", "panel"):
                assert contrast(opened.theme_colour(text), opened.theme_colour(ground)) >= 4.5
        palette = opened.js(
            "() => ({ fills: page.timeline.palette.fills, inks: page.timeline.palette.inks })"
        )
        for fill, ink in zip(palette["fills"], palette["inks"], strict=True):
            pair = [tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in (fill, ink)]
            assert contrast(*pair) >= 4.4  # type: ignore[arg-type]
        pages[theme] = opened.js("() => getComputedStyle(document.body).backgroundColor")
    assert pages["light"] != pages["dark"]


def test_hover_shows_the_details_of_an_action(opened: Opened, recorded: Recording) -> None:
    rank = shown_step(recorded).ranks[0]
    span = next(span for span in rank.of_kind("F") if span.k == 2)
    part = next(s for s in rank.of_kind("fusion") if s.micro_batch == span.micro_batch and s.k == 2)
    start, end = span.start - origin(recorded), span.end - origin(recorded)
    opened.point((start + end) / 2, 0)
    for text in (opened.details(), opened.page.locator("#tooltip").inner_text()):
        assert text.startswith("forward stage 0")
        assert f"micro-batch {span.micro_batch}, pass 2 of " in text
        assert f"takes {span.nanoseconds / 1e6:.4g} ms" in text
        assert f"from {start / 1e6:.4g} ms to {end / 1e6:.4g} ms" in text
        assert f"of which fusion {part.nanoseconds / 1e3:.4g} µs" in text
        assert "measured is +0.0% to it" in text or "measured is −0.0% to it" in text
        assert "input from stage 3" in text
        assert "output to stage 1" in text
    wait = max(rank.of_kind("wait"), key=lambda span: span.nanoseconds)
    opened.point((wait.start + wait.end) / 2 - origin(recorded), 0)
    assert opened.details().startswith("wait stage 0")
    assert f"for the input of {NAMES[wait.of]}, micro-batch {wait.micro_batch}" in opened.details()
    # All hand-overs of this recording take the same time.
    late = f"{STAGES.hand_over * UNIT / 1e3:g} µs for the hand-over"  # type: ignore[operator]
    assert re.search(r"ms until stage \d was done, " + late, opened.details())
    opened.page.mouse.move(5, 5)
    opened.settle()
    assert opened.page.locator("#tooltip").is_hidden()
    assert opened.details().startswith("Point at an action")
    # The plan's lane explains itself, too.
    opened.point((start + end) / 2, 0, lane=1)
    assert opened.details().startswith("forward stage 0, as planned")


def test_nothing_is_cut_off_on_paper_or_in_a_narrow_window(opened: Opened) -> None:
    edge = "(name) => document.querySelector(name).getBoundingClientRect().right"
    opened.page.set_viewport_size({"width": 800, "height": 900})
    opened.page.emulate_media(media="print")
    assert all(opened.js(edge, name) <= 800 for name in ("#stages", "#where"))
    overflow = "() => getComputedStyle(document.querySelector('.wide')).overflow"
    assert opened.js(overflow) == "visible"
    opened.page.emulate_media(media="screen")
    opened.page.set_viewport_size({"width": 360, "height": 640})
    assert opened.js("() => document.documentElement.scrollWidth") <= 360
    # What is wider scrolls inside the page.
    assert opened.js(overflow) == "auto"


def test_it_zooms_and_moves(opened: Opened) -> None:
    whole = opened.view
    assert whole[0] == 0
    x, y = (round(number) for number in opened.place(whole[1] * 0.4, 1))
    about = opened.js(
        "(x) => page.timeline.layout().time(x - page.timeline.canvas.getBoundingClientRect().left)",
        x,
    )
    opened.page.mouse.move(x, y)
    for _ in range(4):
        opened.page.mouse.wheel(0, -200)
    first, last = opened.view
    assert (last - first) < 0.3 * whole[1]
    # What was under the pointer still is.
    assert opened.place(about, 1)[0] == pytest.approx(x, abs=1)
    opened.page.mouse.down()
    opened.page.mouse.move(x + 100, y, steps=3)
    opened.page.mouse.up()
    assert opened.view[0] < first
    assert opened.view[1] - opened.view[0] == pytest.approx(last - first)
    assert opened.place(about, 1)[0] == pytest.approx(x + 100, abs=1)
    opened.page.keyboard.press("0")
    assert opened.view == whole

    opened.page.get_by_role("button", name="Zoom in").click()
    assert opened.view[1] - opened.view[0] == pytest.approx(whole[1] / 1.6)
    opened.page.get_by_role("button", name="Zoom out").click()
    assert opened.view == pytest.approx(whole)
    # A marked range fills the view.
    (from_, _), (to, row) = opened.place(whole[1] * 0.25, 0), opened.place(whole[1] * 0.5, 0)
    opened.page.keyboard.down("Shift")
    opened.page.mouse.move(from_, row)
    opened.page.mouse.down()
    opened.page.mouse.move(to, row, steps=3)
    opened.page.mouse.up()
    opened.page.keyboard.up("Shift")
    pixel = whole[1] / 1000
    assert opened.view[0] == pytest.approx(whole[1] * 0.25, abs=2 * pixel)
    assert opened.view[1] == pytest.approx(whole[1] * 0.5, abs=2 * pixel)
    opened.page.get_by_role("button", name="Fit").click()
    assert opened.view == whole
    # Zoomed out, the wheel scrolls the page as everywhere else.
    opened.page.set_viewport_size({"width": 1300, "height": 420})
    opened.settle()
    before = opened.js("() => scrollY")
    opened.page.mouse.move(*opened.place(whole[1] / 2, 0))
    opened.page.mouse.wheel(0, 60)
    opened.page.wait_for_function("(before) => scrollY > before", arg=before)
    assert opened.view == whole


def test_keys_reach_every_action_and_follow_hand_overs(opened: Opened, recorded: Recording) -> None:
    opened.page.locator("#fit").focus()
    opened.page.keyboard.press("Tab")
    for _ in range(20):
        if opened.js("() => document.activeElement.id") == "timeline":
            break
        opened.page.keyboard.press("Tab")
    else:
        pytest.fail("the timeline is not reached by the Tab key")
    whole = sorted(
        (s for s in shown_step(recorded).ranks[0].spans if s.kind not in PARTS),
        key=lambda span: span.start,
    )
    for span in whole[:4]:
        opened.page.keyboard.press("ArrowRight")
        text = opened.details()
        assert text.startswith(f"{NAMES[span.kind]} stage 0")
        assert f"micro-batch {span.micro_batch}, pass {span.k} of" in text
    opened.page.keyboard.press("ArrowLeft")
    micro_batch, k = whole[2].micro_batch, whole[2].k
    assert whole[2].kind == "F"
    for stage in (1, 2, 3):
        opened.page.keyboard.press("Enter")
        assert opened.details().startswith(f"forward stage {stage}")
        assert f"micro-batch {micro_batch}, pass {k} of" in opened.details()
    opened.page.keyboard.press("Backspace")
    assert opened.details().startswith("forward stage 2")
    opened.page.keyboard.press("ArrowUp")
    assert " stage 1" in opened.details()
    # Zoomed in, the view follows what is chosen.
    for _ in range(6):
        opened.page.keyboard.press("+")
    opened.page.keyboard.press("End")
    for _ in range(3):
        opened.page.keyboard.press("ArrowLeft")
    place = opened.js("""() => { const { spans, index } = page.timeline.chosen;
        return [spans.start[index], spans.end(index)]; }""")
    assert opened.view[0] <= place[0] <= place[1] <= opened.view[1]
    opened.page.keyboard.press("Escape")
    assert opened.details().startswith("Point at an action")


def test_steps_lanes_and_legend(opened: Opened, recorded: Recording) -> None:
    page = opened.page
    names = page.locator("#step option").all_inner_texts()
    assert len(names) == 4
    assert names[0].startswith("K = 1, iteration 2")
    # It opens with the case that has the most passes, at its typical step.
    assert page.locator("#step").input_value() == "2"
    assert page.locator("#findings li").all_inner_texts() == ["Stage 2 is slow."]
    assert "Pass 3 over pass 1" in page.locator("#tiles").inner_text()
    page.get_by_label("Step", exact=True).select_option("0")
    assert "Pass 2 over pass 1" not in page.locator("#tiles").inner_text()
    assert "forward, pass 2" not in page.locator("#legend").inner_text()
    assert page.locator("#previous-step").is_disabled()
    page.locator("#next-step").click()
    page.locator("#next-step").click()
    assert page.locator("#step").input_value() == "2"

    rows = [opened.js("() => page.timeline.layout().lanes.length")]
    for show in ("measured", "plan", "both"):
        page.get_by_label(show, exact=True).check()
        rows.append(opened.js("() => page.timeline.layout().lanes.length"))
    assert rows == [2, 1, 1, 2]

    span = next(s for s in shown_step(recorded).ranks[2].of_kind("B") if s.k == 1)
    middle = (span.start + span.end) / 2 - origin(recorded)
    page.mouse.move(0, 0)
    opened.settle()
    strong = opened.theme_colour("backward-1")
    assert opened.colour(middle, 2) == strong
    page.get_by_role("button", name="forward, pass 1").click()
    opened.settle()
    assert contrast(opened.colour(middle, 2), opened.theme_colour("lane")) < 1.1
    page.get_by_role("button", name="forward, pass 1").click()
    opened.settle()
    assert opened.colour(middle, 2) == strong
    before = opened.js("() => page.timeline.canvas.toDataURL()")
    page.get_by_label("all hand-overs in view").check()
    opened.settle()
    assert opened.js("() => page.timeline.canvas.toDataURL()") != before


def test_the_tables_hold_the_figures(opened: Opened, recorded: Recording) -> None:
    step, case = shown_step(recorded), recorded.cases[1]
    head = opened.page.locator("#stages thead th").all_inner_texts()
    rows = [
        row.all_inner_texts()
        for row in (r.locator("th, td") for r in opened.page.locator("#stages tbody tr").all())
    ]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for stage in range(4):
        for kind, k in (("F", 1), ("F", 3), ("B", 2)):
            times = [
                span.nanoseconds
                for own in case.steps
                for span in own.ranks[stage].of_kind(kind)
                if span.k == k
            ]
            text = rows[stage][head.index(f"{NAMES[kind]} {k}")]
            value, unit = text.split()
            seconds = float(value) * {"ms": 1e-3, "µs": 1e-6}[unit]
            assert seconds == pytest.approx(median(times) / 1e9, rel=1e-3)
    assert rows[3][head.index("head")] == "700 µs"
    assert rows[0][head.index("head")] == ""
    # Stage 2 is the slowest one by far.
    marked = opened.page.locator("#stages tbody tr").nth(2).locator("td.worst").all_inner_texts()
    assert rows[2][head.index("backward 1")] in marked

    length = max(rank.end for rank in step.ranks) - origin(recorded)
    for row, rank in zip(opened.page.locator("#where tbody tr").all(), step.ranks, strict=True):
        cells = row.locator("td").all_inner_texts()[1:]
        shares = [float(re.search(r"\(([\d.]+)%\)", cell)[1]) for cell in cells]  # type: ignore[index]
        assert sum(shares) == pytest.approx(100, abs=0.3)
        busy = sum(span.nanoseconds for span in rank.of_kind("F", "B", "H"))
        assert shares[0] == pytest.approx(100 * busy / length, abs=0.06)


def test_a_measured_recording_opens_with_its_last_action(browser: Browser, tmp_path: Path) -> None:
    """Clocks, gaps and parts as they really are."""
    recorded = measured()
    path = tmp_path / "measured.html"
    write_html(recorded, path)
    opened = Opened(browser, path)
    chosen = opened.page.locator("#step option:checked").inner_text()
    case = recorded.cases[1]
    step = next(step for step in case.steps if f"iteration {step.iteration + 1}" in chosen)
    span = max(step.ranks[2].of_kind("F", "B", "H"), key=lambda span: span.end)
    begin = min(rank.start for rank in step.ranks)
    # However long this machine took for the others, it is wide enough to be seen.
    opened.look(span.start - begin - 5 * span.nanoseconds, span.end - begin)
    opened.point((span.start + span.end) / 2 - begin, 2)
    assert opened.details().startswith(f"{NAMES[span.kind]} stage 2")
    assert f"takes {span.nanoseconds / 1e6:.4g} ms" in opened.details()
    opened.page.mouse.move(0, 0)
    opened.settle()
    colour = opened.colour((span.start + span.end) / 2 - begin, 2)
    assert colour == opened.theme_colour(f"backward-{span.k}")
    assert opened.wrong == []
    opened.page.context.close()


def test_names_are_text_and_never_code(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)><!--"
    recorded = recording(((2,) * 3,), steps=1)
    case = replace(recorded.cases[0], name=evil)
    path = tmp_path / "evil.html"
    write_html(
        replace(recorded, cases=(case,), facts={"model": evil}),
        path,
        title=evil,
        findings={evil: [evil]},
    )
    opened = Opened(browser, path)
    assert opened.page.locator("h1").inner_text() == evil
    assert evil in opened.page.locator("#facts").inner_text()
    assert opened.page.locator("#findings li").inner_text() == evil
    assert opened.page.locator("img").count() == 0
    assert opened.wrong == []
    opened.page.context.close()


@pytest.mark.full
def test_a_large_trace_stays_usable(browser: Browser, tmp_path: Path) -> None:
    """64 ranks with 1,000 forwards and backwards each, and the head and waits besides."""
    costs = Costs(hand_over=0.02, head=0.5)
    recorded = recorded_steps([(large_plan(64, 250, 2), costs)], steps=1)
    step = recorded.cases[0].steps[0]
    assert all(len(list(rank.of_kind("F", "B"))) == 1000 for rank in step.ranks)
    path = tmp_path / "large.html"
    write_html(recorded, path)
    opened = Opened(browser, path)
    first_draw = opened.js("() => Number(document.documentElement.dataset.firstDrawMilliseconds)")
    print(f"first draw after {first_draw:.0f} ms")
    # By the page's own clock, which runs on while other processes have the cores: 2 s are meant.
    assert first_draw < 15_000
    draws = opened.js(
        """() => Array.from({ length: 5 }, () => {
          const start = performance.now();
          page.timeline.draw();
          return performance.now() - start;
        })"""
    )
    assert min(draws) < 1000

    # The last row is reached by scrolling and shows the head in its colour when zoomed in.
    head = next(step.ranks[63].of_kind("H"))
    middle = (head.start + head.end) / 2 - min(rank.start for rank in step.ranks)
    opened.js(
        """([middle, size]) => {
          page.timeline.look(middle - size, middle + size);
          page.timeline.scroller.scrollTop = 1e9;
        }""",
        [middle, 20 * head.nanoseconds],
    )
    opened.settle()
    opened.point(middle, 63)
    assert opened.details().startswith("head stage 63")
    opened.page.mouse.move(0, 0)
    opened.settle()
    assert opened.colour(middle, 63) == opened.theme_colour("head")
    assert opened.wrong == []
    opened.page.context.close()
