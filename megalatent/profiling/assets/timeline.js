// The timeline: what is in view, and what mouse, wheel and keys do.

class Timeline {
  /** `told` hears {spans, index} or null when another span is hovered, and when one is chosen. */
  constructor(profile, told) {
    this.profile = profile;
    this.told = told;
    this.canvas = document.getElementById("timeline");
    this.scroller = document.getElementById("scroller");
    this.inner = document.getElementById("inner");
    this.overview = document.getElementById("overview");
    this.letters = profile.categories.map((category) => category.letter);
    this.working = profile.categories.map((category) => category.work);
    this.show = "both";
    this.allArrows = false;
    this.strong = null;
    this.hovered = this.chosen = this.marking = this.drag = null;
    this.pending = false;
    this.firstDraw = null;
    this.readTheme();
    this.listen();
  }

  readTheme() { this.palette = new Palette(this.profile.categories); this.redraw(); }

  setStep(step) {
    this.step = step;
    this.view = { from: 0, to: step.end };
    this.hovered = this.chosen = null;
    this.shares = utilisation(step.measured, step.end, 400, this.letters.length);
    this.told(null, true);
    this.redraw();
  }

  set(name, value) { this[name] = value; this.redraw(); }

  redraw() {
    if (this.pending || !this.step) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  layout() {
    const { from, to } = this.view;
    const layout = new Layout(this.step, this.show, this.scroller.clientWidth, from, to);
    layout.chunks = this.step.info.chunks;
    return layout;
  }

  draw() {
    const layout = this.layout(), { palette, step } = this;
    this.inner.style.height = `${layout.height}px`;
    const width = this.scroller.clientWidth;
    const height = Math.min(layout.height, this.scroller.clientHeight);
    this.canvas.style.height = `${height}px`;
    const g = context(this.canvas, width, height), scroll = this.scroller.scrollTop;
    g.font = FONT;
    g.textBaseline = "middle";
    g.fillStyle = palette.page;
    g.fillRect(0, 0, width, height);
    g.save();
    g.beginPath();
    g.rect(0, AXIS, width, height - AXIS);
    g.clip();
    this.drawRows(g, layout, scroll, height);
    g.restore();
    drawAxis(g, layout, step.tick, AXIS, palette);
    this.drawMarks(g, layout, height);
    drawOverview(this.overview, this.shares, palette, this.working, this.view, step.end);
    if (this.firstDraw === null) {
      // From the start of the navigation: reading the page and unpacking its data included.
      this.firstDraw = performance.now();
      document.documentElement.dataset.firstDrawMilliseconds = this.firstDraw.toFixed(0);
    }
  }

  drawRows(g, layout, scroll, height) {
    const { palette, step } = this, laneHeight = layout.laneHeight - 2;
    for (let row = 0; row < step.rows.length; row++) {
      const top = layout.y(row, 0) - scroll;
      if (top > height || top + layout.rowHeight < AXIS) continue;
      layout.lanes.forEach((spans, lane) => {
        g.fillStyle = palette.lane;
        g.fillRect(layout.left, layout.y(row, lane) - scroll, layout.width, laneHeight);
      });
    }
    drawAxis(g, layout, step.tick, height, palette);
    for (let row = 0; row < step.rows.length; row++) {
      const top = layout.y(row, 0) - scroll;
      if (top > height || top + layout.rowHeight < AXIS) continue;
      this.drawName(g, layout, row, top);
      g.textAlign = "center";
      layout.lanes.forEach((spans, lane) => {
        drawSpans(g, spans, row, layout, layout.y(row, lane) - scroll, laneHeight, palette,
          this.strong, this.letters);
      });
    }
    g.save();
    g.beginPath();
    g.rect(layout.left, 0, layout.width, height);
    g.clip();
    if (this.allArrows) this.drawAllArrows(g, layout, scroll);
    for (const place of [this.chosen, this.hovered]) if (place) this.outline(g, layout, place, scroll);
    g.restore();
  }

  drawName(g, layout, row, top) {
    const { palette, step } = this, middle = top + (layout.rowHeight - ROW_GAP) / 2;
    g.textAlign = "left";
    g.fillStyle = palette.ink;
    g.fillText(step.rows[row].name, 8, middle);
    if (layout.lanes.length < 2) return;
    g.textAlign = "right";
    g.fillStyle = palette.muted;
    g.font = "10px system-ui, sans-serif";
    ["real", "plan"].forEach((text, lane) => {
      g.fillText(text, layout.left - 6, top + (lane + 0.5) * layout.laneHeight - 1);
    });
    g.font = FONT;
  }

  drawAllArrows(g, layout, scroll) {
    layout.lanes.forEach((spans, lane) => {
      let drawn = 0;
      for (let to = 0; to < spans.source.length && drawn < 3000; to++) {
        const from = spans.source[to];
        if (from < 0 || spans.start[to] < this.view.from || spans.end(from) > this.view.to) continue;
        drawArrow(g, layout, spans, lane, from, to, this.palette.muted, scroll);
        drawn++;
      }
    });
  }

  /** A frame around a span, its arrows, and a thinner frame around its twin in the other lane. */
  outline(g, layout, { spans, index }, scroll) {
    const lane = layout.lanes.indexOf(spans);
    if (lane < 0) return;
    const frame = (of, at, i, width) => {
      const y = layout.y(of.rankOf(i), at) - scroll, x = layout.x(of.start[i]);
      g.lineWidth = width;
      g.strokeStyle = this.palette.ink;
      g.strokeRect(x, y, Math.max(2, of.length[i] * layout.scale), layout.laneHeight - 2);
    };
    frame(spans, lane, index, 2);
    const other = layout.lanes[1 - lane];
    const twin = other && this.letters[spans.category[index]]
      ? other.same(spans.rankOf(index), spans, index) : -1;
    if (twin >= 0) frame(other, 1 - lane, twin, 1);
    const from = spans.source[index], to = spans.receiver(index);
    const color = this.palette.accent;
    if (from >= 0) drawArrow(g, layout, spans, lane, from, index, color, scroll);
    if (to >= 0) drawArrow(g, layout, spans, lane, index, to, color, scroll);
  }

  drawMarks(g, layout, height) {
    const { step, palette } = this;
    for (const [time, text, color] of [
      [step.info.length, "measured", palette.ink], [step.info.plan_length, "plan", palette.muted],
      [step.info.bound_length, "lower bound", palette.bound],
    ]) {
      if (time === null || time < this.view.from || time > this.view.to) continue;
      const x = layout.x(time);
      g.strokeStyle = color;
      g.setLineDash(text === "measured" ? [] : [5, 3]);
      g.beginPath();
      g.moveTo(x, AXIS - 8);
      g.lineTo(x, height);
      g.stroke();
      g.setLineDash([]);
    }
    if (this.marking) {
      const [a, b] = this.marking.map((time) => layout.x(time));
      g.globalAlpha = 0.2;
      g.fillStyle = palette.accent;
      g.fillRect(Math.min(a, b), 0, Math.abs(b - a), height);
      g.globalAlpha = 1;
    }
  }

  // -- what is in view --------------------------------------------------------------------

  look(from, to) {
    const end = this.step.end, least = Math.min(end, 20);
    const size = Math.min(end, Math.max(least, to - from));
    const middle = (from + to) / 2;
    const start = Math.min(Math.max(0, middle - size / 2), end - size);
    this.view = { from: start, to: start + size };
    this.redraw();
  }

  /** Zoom by a factor about a time; above 1 is closer. */
  zoom(factor, about = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view, size = Math.min(this.step.end, (to - from) / factor);
    const at = (about - from) / (to - from);
    this.look(about - at * size, about + (1 - at) * size);
  }

  pan(ticks) { this.look(this.view.from + ticks, this.view.to + ticks); }
  fit() { this.look(0, this.step.end); }

  get zoomedOut() { return this.view.to - this.view.from >= this.step.end * 0.9999; }

  reveal({ spans, index }) {
    const { from, to } = this.view, size = to - from;
    if (spans.start[index] < from || spans.end(index) > to) {
      const middle = spans.start[index] + spans.length[index] / 2;
      const needed = Math.max(size, spans.length[index] * 1.2);
      this.look(middle - needed / 2, middle + needed / 2);
    }
    const layout = this.layout(), top = layout.y(spans.rankOf(index), 0) - AXIS;
    const visible = this.scroller.clientHeight - AXIS - layout.rowHeight;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top > this.scroller.scrollTop + visible) this.scroller.scrollTop = top - visible;
  }

  choose(place) {
    this.chosen = place;
    if (place) this.reveal(place);
    this.told(place, true);
    this.redraw();
  }

  /** The span under a point of the canvas, or null. */
  under(x, y) {
    const layout = this.layout();
    if (y < AXIS || x < layout.left || x > layout.left + layout.width) return null;
    const [row, lane] = layout.at(y + this.scroller.scrollTop);
    if (row === null || row >= this.step.rows.length) return null;
    const spans = layout.lanes[lane];
    const index = spans.near(row, layout.time(x), 3 / layout.scale);
    return index < 0 ? null : { spans, index };
  }

  // -- mouse, wheel, keys: see input.js ---------------------------------------------------

  listen() { new Input(this); }
}
