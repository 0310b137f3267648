// The page around the timeline: steps, tiles, legend, details, tables.

const element = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

class Page {
  constructor(profile) {
    this.profile = profile;
    this.steps = profile.steps.map(() => null);
    element("facts").textContent = profile.facts.join(" · ");
    this.timeline = new Timeline(profile, (...news) => this.told(...news));
    this.fillSteps();
    this.listen();
    this.setStep(profile.first);
  }

  fillSteps() {
    this.profile.steps.forEach((step, i) => element("step").append(make("option", { value: i }, step.name)));
  }

  setStep(number) {
    this.number = number;
    this.steps[number] ??= new Step(this.profile.steps[number]);
    const step = (this.step = this.steps[number]);
    element("step").value = number;
    element("previous-step").disabled = number === 0;
    element("next-step").disabled = number === this.steps.length - 1;
    this.fillTiles(step.info.tiles);
    this.fillFindings(step.info.findings);
    this.fillStages(step.info.stages);
    this.fillWhere(step);
    this.fillLegend(step);
    element("show").hidden = !step.plan;
    this.timeline.setStep(step);
  }

  listen() {
    element("step").addEventListener("change", (event) => this.setStep(Number(event.target.value)));
    element("previous-step").addEventListener("click", () => this.setStep(this.number - 1));
    element("next-step").addEventListener("click", () => this.setStep(this.number + 1));
    element("zoom-in").addEventListener("click", () => this.timeline.zoom(1.6));
    element("zoom-out").addEventListener("click", () => this.timeline.zoom(1 / 1.6));
    element("fit").addEventListener("click", () => this.timeline.fit());
    element("arrows").addEventListener("change", (event) => this.timeline.set("allArrows", event.target.checked));
    element("show").addEventListener("change", (event) => this.timeline.set("show", event.target.value));
    element("theme").addEventListener("click", () => this.switchTheme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.timeline.readTheme());
  }

  switchTheme() {
    const root = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
    this.timeline.readTheme();
  }

  fillLegend(step) {
    this.timeline.set("strong", null);
    const used = new Set(step.measured.category);
    for (const category of step.plan?.category ?? []) used.add(category);
    const entries = [...used].sort((a, b) => a - b).map((number) => this.legendEntry(number));
    const marks = [["step's end", "solid", "ink"], ["plan's end", "dashed", "muted"],
      ["lower bound", "dashed", "bound"]];
    for (const [text, style, color] of marks) {
      const line = make("i", { style: `border-style: ${style}; border-color: var(--${color})` });
      entries.push(make("li", { class: "mark" }, line, text));
    }
    element("legend").replaceChildren(...entries);
  }

  legendEntry(number) {
    const { name, color } = this.profile.categories[number];
    const swatch = make("i", { style: `background: var(--${color})` });
    const button = make("button", { type: "button", "aria-pressed": "false" }, swatch, name);
    button.addEventListener("click", () => {
      const strong = this.timeline.strong ?? new Set();
      if (!strong.delete(number)) strong.add(number);
      button.setAttribute("aria-pressed", String(strong.has(number)));
      this.timeline.set("strong", strong.size ? strong : null);
    });
    return make("li", {}, button);
  }

  fillTiles(tiles) {
    element("tiles").replaceChildren(...tiles.map(({ name, value, note }) => make("div", {},
      make("dt", {}, name), make("dd", { class: "value" }, value), make("dd", { class: "note" }, note))));
  }

  fillFindings(findings) {
    element("findings").hidden = !findings.length;
    element("findings").replaceChildren(...findings.map((text) => make("li", {}, text)));
  }

  fillStages({ columns, rows, note }) {
    element("stages-note").textContent = note;
    const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
    const body = rows.map((row) => make("tr", {}, ...row.map((cell, i) => (i === 0
      ? make("th", { scope: "row" }, cell.text)
      : make("td", { class: cell.worst ? "worst" : null, title: cell.title ?? null }, cell.text)))));
    element("stages").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  }

  /** For each rank a bar of what its step consists of, and the same in numbers. */
  fillWhere(step) {
    const { categories } = this.profile, spans = step.measured, whole = step.info.length;
    const rows = step.rows.map((row, rank) => {
      const sums = categories.map(() => 0);
      for (let i = spans.offset[rank]; i < spans.offset[rank + 1]; i++) {
        sums[spans.category[i]] += spans.length[i];
      }
      const parts = sums.map((sum, i) => [categories[i], sum / whole]).filter(([, share]) => share > 0);
      const bar = parts.map(([category, share]) => make("div", {
        style: `width: ${100 * share}%; background: var(--${category.color})`,
        title: `${category.name}: ${(100 * share).toFixed(1)}%`,
      }));
      const total = (test) => sums.reduce((sum, value, i) => sum + (test(categories[i]) ? value : 0), 0);
      const work = total((category) => category.work), wait = total((category) => category.waits);
      const after = total((category) => category.closes);
      const text = (ticks) => `${duration(ticks * step.tick)} (${((100 * ticks) / whole).toFixed(1)}%)`;
      return make("tr", {}, make("th", { scope: "row" }, row.name),
        make("td", { class: "stack" }, make("div", {}, ...bar)),
        ...[work, wait, after, whole - work - wait - after].map((ticks) => make("td", {}, text(ticks))));
    });
    const names = ["", "share of the step", "actions", "waiting, sending", "reduce, optimizer", "rest"];
    element("where").replaceChildren(
      make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...rows));
  }

  // -- details of a span ------------------------------------------------------------------

  told(place, chosen, event) {
    const { tooltip, details } = { tooltip: element("tooltip"), details: element("details") };
    if (chosen || place) {
      details.replaceChildren(...(place ? this.describe(place, " · ") : [this.hint()]));
    } else if (this.timeline.chosen) {
      details.replaceChildren(...this.describe(this.timeline.chosen, " · "));
    } else {
      details.replaceChildren(this.hint());
    }
    tooltip.hidden = !place || !event;
    if (tooltip.hidden) return;
    tooltip.replaceChildren(...this.describe(place, "\n"));
    const box = tooltip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
    const below = event.clientY + 18 + box.height < window.innerHeight;
    tooltip.style.left = `${Math.max(4, left)}px`;
    tooltip.style.top = `${below ? event.clientY + 18 : event.clientY - box.height - 12}px`;
  }

  hint() { return make("span", { class: "muted" }, "Point at an action, or choose one with the keys, for its details."); }

  /** What a span is, its times, and how it compares with its twin in the plan or the measurement. */
  describe({ spans, index }, separator) {
    const { step } = this, rank = spans.rankOf(index), planned = spans === step.plan;
    const category = this.profile.categories[spans.category[index]];
    const time = (ticks) => duration(ticks * step.tick);
    const lines = [` ${step.rows[rank].name}${planned ? ", as planned" : ""}`];
    const of = this.profile.categories[spans.of[index]];
    if (spans.microBatch[index] >= 0) {
      const chunk = step.info.chunks > 1 ? `, chunk ${spans.chunk[index]}` : "";
      const what = of === category ? "" : `for the input of ${of.kind}, `;
      const all = step.info.passes[spans.microBatch[index]];
      lines.push(`${what}micro-batch ${spans.microBatch[index]}, pass ${spans.pass[index]} of ${all}${chunk}`);
    }
    lines.push(`takes ${time(spans.length[index])}, from ${time(spans.start[index])} to ${time(spans.end(index))}`);
    for (const [part, ticks] of spans.parts.get(index) ?? []) {
      lines.push(`of which ${this.profile.categories[part].name} ${time(ticks)}`);
    }
    lines.push(...this.describeWait(spans, index, category, time));
    const other = planned ? step.measured : step.plan;
    const twin = other && category.letter ? other.same(rank, spans, index) : -1;
    if (twin >= 0) {
      const [real, plan] = planned ? [other.length[twin], spans.length[index]] : [spans.length[index], other.length[twin]];
      const change = plan > 0 ? ` (measured is ${signed(100 * (real / plan - 1))}% to it)` : "";
      const times = `${time(other.length[twin])}, from ${time(other.start[twin])}`;
      lines.push(planned ? `measured ${times}` : `plan ${times}${change}`);
    }
    const from = spans.source[index], to = spans.receiver(index);
    if (from >= 0) lines.push(`input from ${step.rows[spans.rankOf(from)].name}, ${time(spans.start[index] - spans.end(from))} before`);
    if (to >= 0) lines.push(`output to ${step.rows[spans.rankOf(to)].name}, used ${time(spans.start[to] - spans.end(index))} later`);
    return [make("b", {}, category.kind), lines.join(separator)];
  }

  /** Whether a wait was for the sender or for the hand-over itself. */
  describeWait(spans, index, category, time) {
    const next = index + 1, from = spans.source[next] ?? -1;
    if (category.kind !== "wait" || from < 0 || spans.category[next] !== spans.of[index]) return [];
    const whole = spans.length[index];
    const sender = Math.min(whole, Math.max(0, spans.end(from) - spans.start[index]));
    const name = this.step.rows[spans.rankOf(from)].name;
    return [`${time(sender)} until ${name} was done, ${time(whole - sender)} for the hand-over`];
  }
}

function signed(value) { return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(1)}`; }

window.page = new Page(JSON.parse(element("profile-data").textContent));
