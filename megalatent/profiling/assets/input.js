// Mouse, wheel and keys on the timeline and its overview.

class Input {
  constructor(timeline) {
    this.timeline = timeline;
    const { canvas, overview, scroller } = timeline;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", () => this.cancel());
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("dblclick", (event) => this.doubleClick(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    overview.addEventListener("pointerdown", (event) => this.overviewMove(event, true));
    overview.addEventListener("pointermove", (event) => this.overviewMove(event, false));
    scroller.addEventListener("scroll", () => timeline.redraw());
    new ResizeObserver(() => timeline.redraw()).observe(scroller);
    // A page that is being scrolled goes on scrolling when the timeline comes under the pointer.
    this.scrolled = -Infinity;
    window.addEventListener("scroll", () => { this.scrolled = performance.now(); });
    window.addEventListener("pointermove", () => { this.scrolled = -Infinity; });
  }

  /** A pointer's place on the canvas. */
  place(event) {
    const box = this.timeline.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  wheel(event) {
    const { timeline } = this, [x] = this.place(event);
    if (x < GUTTER || performance.now() - this.scrolled < 300) return;
    const outOfRoom = timeline.zoomedOut && event.deltaY > 0 && !event.ctrlKey;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (outOfRoom && !sideways) return;
    event.preventDefault();
    const layout = timeline.layout();
    const pixels = event.deltaMode === 1 ? 30 : event.deltaMode === 2 ? 300 : 1;
    if (sideways) {
      timeline.pan(((event.deltaX || event.deltaY) * pixels) / layout.scale);
    } else {
      const factor = Math.exp(-Math.max(-300, Math.min(300, event.deltaY * pixels)) / 350);
      timeline.zoom(factor, layout.time(x));
    }
    this.hover(event);
  }

  down(event) {
    if (event.button !== 0) return;
    const { timeline } = this, [x, y] = this.place(event);
    timeline.canvas.setPointerCapture(event.pointerId);
    timeline.canvas.focus({ preventScroll: true });
    const marks = event.shiftKey || y < AXIS;
    timeline.drag = { x, y, marks, moved: false, view: timeline.view,
      scroll: timeline.scroller.scrollTop, layout: timeline.layout() };
  }

  move(event) {
    const { timeline } = this, { drag } = timeline;
    if (!drag) { this.hover(event); return; }
    const [x, y] = this.place(event);
    drag.moved ||= Math.abs(x - drag.x) + Math.abs(y - drag.y) > 4;
    if (!drag.moved) return;
    this.hover(null);
    if (drag.marks) {
      timeline.set("marking", [drag.layout.time(drag.x), drag.layout.time(x)]);
      return;
    }
    timeline.canvas.classList.add("dragging");
    const ticks = (drag.x - x) / drag.layout.scale;
    timeline.look(drag.view.from + ticks, drag.view.to + ticks);
    timeline.scroller.scrollTop = drag.scroll + drag.y - y;
  }

  up(event) {
    const { timeline } = this, { drag, marking } = timeline;
    this.cancel();
    if (!drag) return;
    if (marking) timeline.look(Math.min(...marking), Math.max(...marking));
    else if (!drag.moved) timeline.choose(timeline.under(...this.place(event)));
  }

  cancel() {
    this.timeline.drag = null;
    this.timeline.canvas.classList.remove("dragging");
    this.timeline.set("marking", null);
  }

  doubleClick(event) {
    const { timeline } = this, found = timeline.under(...this.place(event));
    if (!found) { timeline.fit(); return; }
    const { spans, index } = found, room = Math.max(spans.length[index], 10);
    timeline.look(spans.start[index] - room, spans.end(index) + room);
  }

  hover(event) {
    const { timeline } = this;
    const found = event ? timeline.under(...this.place(event)) : null;
    const before = timeline.hovered;
    const same = found?.spans === before?.spans && found?.index === before?.index;
    timeline.hovered = found;
    timeline.told(found, false, event);
    if (!same) timeline.redraw();
  }

  overviewMove(event, pressed) {
    if (!(event.buttons & 1)) return;
    const { timeline } = this, { overview } = timeline;
    if (pressed) overview.setPointerCapture(event.pointerId);
    const box = overview.getBoundingClientRect(), { from, to } = timeline.view;
    const share = (event.clientX - box.left - GUTTER) / (box.width - GUTTER - 10);
    const middle = share * timeline.step.end;
    timeline.look(middle - (to - from) / 2, middle + (to - from) / 2);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { timeline } = this, size = timeline.view.to - timeline.view.from;
    const act = {
      "+": () => timeline.zoom(1.6), "=": () => timeline.zoom(1.6), "-": () => timeline.zoom(1 / 1.6),
      "0": () => timeline.fit(), Escape: () => timeline.choose(null),
      Home: () => timeline.look(0, size), End: () => timeline.look(timeline.step.end - size, timeline.step.end),
      ArrowLeft: () => (event.shiftKey ? timeline.pan(-size / 8) : this.neighbour(-1)),
      ArrowRight: () => (event.shiftKey ? timeline.pan(size / 8) : this.neighbour(1)),
      ArrowUp: () => this.otherRank(-1), ArrowDown: () => this.otherRank(1),
      Enter: () => this.follow((spans, index) => spans.receiver(index)),
      Backspace: () => this.follow((spans, index) => spans.source[index]),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /** The first span in view of the first row where nothing is chosen yet. */
  start() {
    const { timeline } = this, spans = timeline.layout().lanes[0];
    const row = Math.floor(timeline.scroller.scrollTop / timeline.layout().rowHeight);
    const index = Math.max(spans.offset[row], spans.before(row, timeline.view.from));
    return index < spans.offset[row + 1] ? { spans, index } : null;
  }

  neighbour(by) {
    const { timeline } = this, { chosen } = timeline;
    if (!chosen) { timeline.choose(this.start()); return; }
    const { spans, index } = chosen, rank = spans.rankOf(index), next = index + by;
    if (next >= spans.offset[rank] && next < spans.offset[rank + 1]) timeline.choose({ spans, index: next });
  }

  otherRank(by) {
    const { timeline } = this, { chosen } = timeline;
    if (!chosen) { timeline.choose(this.start()); return; }
    const { spans, index } = chosen, rank = spans.rankOf(index) + by;
    if (rank < 0 || rank >= spans.ranks) return;
    const middle = spans.start[index] + spans.length[index] / 2;
    const next = spans.near(rank, middle, Infinity);
    if (next >= 0) timeline.choose({ spans, index: next });
  }

  follow(target) {
    const { timeline } = this, { chosen } = timeline;
    const next = chosen ? target(chosen.spans, chosen.index) : -1;
    if (next >= 0) timeline.choose({ spans: chosen.spans, index: next });
  }
}
