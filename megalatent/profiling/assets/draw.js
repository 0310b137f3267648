// Painting: rows of spans, the time axis, arrows, and the overview.

const GUTTER = 104, AXIS = 26, ROW_GAP = 6;
const FONT = "11px system-ui, sans-serif";

/** The colours of the theme in force; categories are numbered as in the profile. */
class Palette {
  constructor(categories) {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(`--${name}`).trim();
    this.fills = categories.map((category) => value(category.color));
    // Black and white have the same contrast to this luminance.
    this.inks = this.fills.map((fill) => (luminance(fill) > 0.179 ? "#000000" : "#ffffff"));
    for (const name of ["page", "panel", "line", "ink", "muted", "lane", "accent", "bound"]) {
      this[name] = value(name);
    }
  }
}

function luminance(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(hex.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Size a canvas to its box at the screen's resolution; its context in CSS pixels. */
function context(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  return g;
}

/** Where things are: `from` and `to` in ticks, rows in pixels. */
class Layout {
  constructor(step, show, width, from, to) {
    this.lanes = [];
    if (show !== "plan" || !step.plan) this.lanes.push(step.measured);
    if (show !== "measured" && step.plan) this.lanes.push(step.plan);
    const rows = step.rows.length;
    const roomy = rows <= 16 ? 24 : rows <= 32 ? 19 : 15;
    this.laneHeight = this.lanes.length === 1 ? roomy + 4 : roomy;
    this.rowHeight = this.laneHeight * this.lanes.length + ROW_GAP;
    this.height = AXIS + rows * this.rowHeight + 4;
    this.left = GUTTER;
    this.width = Math.max(50, width - GUTTER - 10);
    this.from = from;
    this.scale = this.width / (to - from);
  }

  x(time) { return this.left + (time - this.from) * this.scale; }
  time(x) { return this.from + (x - this.left) / this.scale; }
  y(row, lane) { return AXIS + row * this.rowHeight + ROW_GAP / 2 + lane * this.laneHeight; }

  /** The row and the lane at a height, both null on the axis. */
  at(y) {
    if (y < AXIS) return [null, null];
    const row = Math.floor((y - AXIS) / this.rowHeight);
    const inside = y - AXIS - row * this.rowHeight - ROW_GAP / 2;
    const lane = Math.floor(inside / this.laneHeight);
    return [row, Math.min(this.lanes.length - 1, Math.max(0, lane))];
  }
}

/**
 * One row of spans. What is narrower than a pixel is gathered: a column of pixels gets the colour
 * of what fills most of it, as strong as it is filled.
 */
function drawSpans(g, spans, rank, layout, y, height, palette, strong, letters) {
  const { left, width } = layout, right = left + width;
  const share = new Float32Array(palette.fills.length);
  let column = -1;
  const flush = () => {
    if (column < 0) return;
    let most = 0, sum = 0;
    for (let c = 0; c < share.length; c++) {
      sum += share[c];
      if (share[c] > share[most]) most = c;
    }
    g.globalAlpha = Math.min(1, sum) * (strong === null || strong.has(most) ? 1 : 0.15);
    g.fillStyle = palette.fills[most];
    g.fillRect(column, y, 1, height);
    share.fill(0);
    column = -1;
  };
  const first = Math.max(spans.offset[rank], spans.before(rank, layout.from));
  for (let i = first; i < spans.offset[rank + 1]; i++) {
    const x = layout.x(spans.start[i]);
    if (x > right) break;
    const size = spans.length[i] * layout.scale;
    if (x + size < left) continue;
    const category = spans.category[i];
    if (size < 1) {
      const at = Math.floor(x);
      if (at !== column) { flush(); column = at; }
      share[category] += size;
      continue;
    }
    flush();
    const from = Math.max(left, x), to = Math.min(right, x + size);
    g.globalAlpha = strong === null || strong.has(category) ? 1 : 0.15;
    g.fillStyle = palette.fills[category];
    g.fillRect(from, y, Math.max(1, to - from - (size > 4 ? 0.8 : 0)), height);
    if (to - from > 26 && height >= 13 && letters[category]) {
      const chunk = layout.chunks > 1 ? `c${spans.chunk[i]}` : "";
      const text = `${letters[category]}${spans.microBatch[i]}.${spans.pass[i]}${chunk}`;
      if (6.4 * text.length + 4 < to - from) {
        g.fillStyle = palette.inks[category];
        g.fillText(text, (from + to) / 2, y + height / 2 + 0.5);
      }
    }
  }
  flush();
  g.globalAlpha = 1;
}

/** Time axis with grid lines down to `height`. */
function drawAxis(g, layout, tick, height, palette) {
  const end = layout.from + layout.width / layout.scale;
  const ticks = axisTicks(layout.from * tick, end * tick, Math.max(3, layout.width / 95));
  g.textAlign = "center";
  for (const [time, text] of ticks) {
    const x = Math.round(layout.x(time / tick)) + 0.5;
    g.strokeStyle = palette.line;
    g.beginPath();
    g.moveTo(x, AXIS - 6);
    g.lineTo(x, height);
    g.stroke();
    g.fillStyle = palette.muted;
    g.fillText(text, Math.min(x, layout.left + layout.width - 16), AXIS / 2);
  }
}

/** An arrow for a hand-over, from the end of one span to the start of another. */
function drawArrow(g, layout, spans, lane, from, to, color, scroll) {
  const height = layout.laneHeight - 2;
  const point = (index, time) => [
    layout.x(time), layout.y(spans.rankOf(index), lane) - scroll + height / 2,
  ];
  const [x0, y0] = point(from, spans.end(from)), [x1, y1] = point(to, spans.start[to]);
  const bend = Math.max(12, Math.abs(x1 - x0) / 3);
  g.strokeStyle = g.fillStyle = color;
  g.lineWidth = 1.4;
  g.beginPath();
  g.moveTo(x0, y0);
  g.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1);
  g.stroke();
  g.beginPath();
  g.moveTo(x1, y1);
  g.lineTo(x1 - 7, y1 - 3.5);
  g.lineTo(x1 - 7, y1 + 3.5);
  g.fill();
  g.lineWidth = 1;
}

/** Use of all stages over time, stacked by category: columns of shares, made once per step. */
function utilisation(spans, end, columns, categories) {
  const share = new Float32Array(columns * categories);
  const perTick = columns / end, weight = 1 / spans.ranks;
  for (let i = 0; i < spans.start.length; i++) {
    let from = spans.start[i] * perTick;
    const to = Math.min(columns, spans.end(i) * perTick);
    while (from < to) {
      const column = Math.floor(from), next = Math.min(to, column + 1);
      share[column * categories + spans.category[i]] += (next - from) * weight;
      if (next <= from) break;
      from = next;
    }
  }
  return share;
}

function drawOverview(canvas, shares, palette, working, view, end) {
  const width = canvas.clientWidth, height = canvas.clientHeight;
  const g = context(canvas, width, height);
  const count = palette.fills.length, columns = shares.length / count;
  const size = (width - GUTTER - 10) / columns;
  g.clearRect(0, 0, width, height);
  g.fillStyle = palette.lane;
  g.fillRect(GUTTER, 0, size * columns, height);
  for (let column = 0; column < columns; column++) {
    let y = height;
    for (let c = 0; c < count; c++) {
      const part = working[c] ? shares[column * count + c] * height : 0;
      if (part <= 0) continue;
      g.fillStyle = palette.fills[c];
      g.fillRect(GUTTER + column * size, y - part, size + 0.4, part);
      y -= part;
    }
  }
  const x = (time) => GUTTER + (time / end) * size * columns;
  g.fillStyle = palette.page;
  g.globalAlpha = 0.72;
  g.fillRect(GUTTER, 0, x(view.from) - GUTTER, height);
  g.fillRect(x(view.to), 0, GUTTER + size * columns - x(view.to), height);
  g.globalAlpha = 1;
  g.strokeStyle = palette.accent;
  g.strokeRect(x(view.from) + 0.5, 0.5, Math.max(2, x(view.to) - x(view.from) - 1), height - 1);
  g.fillStyle = palette.muted;
  g.font = FONT;
  g.textBaseline = "middle";
  g.fillText("all stages", 8, height / 2);
}
