// The profile as the page holds it: spans in typed arrays, sorted by rank and start.

/** Base64 of little-endian numbers to a typed array. */
function decode(text, Type) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Type(bytes.buffer);
}

/** Spans of all ranks: those that were measured, or those of the plan. Times are in ticks. */
class Spans {
  constructor(packed) {
    this.category = decode(packed.category, Uint8Array);
    this.pass = decode(packed.pass, Uint8Array);
    this.chunk = decode(packed.chunk, Uint8Array);
    this.microBatch = decode(packed.micro_batch, Int32Array);
    // Of a wait: the category of the action that waits; else that of the span itself.
    this.of = decode(packed.of, Uint8Array);
    this.start = decode(packed.start, Uint32Array);
    this.length = decode(packed.length, Uint32Array);
    // Index of the span whose output this one needed from another rank, or -1.
    this.source = decode(packed.source, Int32Array);
    // What the spans spent on parts of theirs, such as the fusion: [span, category, ticks].
    this.parts = new Map();
    for (const [span, category, length] of packed.parts) {
      if (!this.parts.has(span)) this.parts.set(span, []);
      this.parts.get(span).push([category, length]);
    }
    this.offset = [0];
    for (const count of packed.counts) this.offset.push(this.offset.at(-1) + count);
    this.receivers = null;
    this.byAction = [];
  }

  get ranks() { return this.offset.length - 1; }

  rankOf(index) {
    let low = 0, high = this.ranks - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.offset[middle] <= index) low = middle; else high = middle - 1;
    }
    return low;
  }

  end(index) { return this.start[index] + this.length[index]; }

  /** The last span of a rank that starts at or before a time; one before the first if none does. */
  before(rank, time) {
    let low = this.offset[rank] - 1, high = this.offset[rank + 1] - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.start[middle] <= time) low = middle; else high = middle - 1;
    }
    return low;
  }

  /** The span of a rank at a time, else the nearest one within a distance, else -1. */
  near(rank, time, distance) {
    const at = this.before(rank, time);
    let best = -1, least = Infinity;
    for (const index of [at, at + 1]) {
      if (index < this.offset[rank] || index >= this.offset[rank + 1]) continue;
      const gap = Math.max(this.start[index] - time, time - this.end(index), 0);
      if (gap <= distance && gap < least) { best = index; least = gap; }
    }
    return best;
  }

  /** Where the output of a span went, or -1. */
  receiver(index) {
    if (!this.receivers) {
      this.receivers = new Int32Array(this.start.length).fill(-1);
      this.source.forEach((from, to) => { if (from >= 0) this.receivers[from] = to; });
    }
    return this.receivers[index];
  }

  /** The span of a rank that is the same action as one of other spans, or -1. */
  same(rank, other, index) {
    if (!this.byAction[rank]) {
      const known = new Map();
      for (let i = this.offset[rank]; i < this.offset[rank + 1]; i++) known.set(this.key(i), i);
      this.byAction[rank] = known;
    }
    return this.byAction[rank].get(other.key(index)) ?? -1;
  }

  key(index) {
    const place = this.microBatch[index] * 256 + this.pass[index];
    return (place * 256 + this.chunk[index]) * 256 + this.category[index];
  }
}

/** One recorded step with its plan. */
class Step {
  constructor(packed) {
    this.info = packed;
    this.tick = packed.tick_nanoseconds;
    this.rows = packed.rows;
    this.measured = new Spans(packed.measured);
    this.plan = packed.plan ? new Spans(packed.plan) : null;
    let end = packed.length;
    for (const spans of [this.measured, this.plan]) {
      for (let rank = 0; spans && rank < spans.ranks; rank++) {
        const last = spans.offset[rank + 1] - 1;
        if (last >= spans.offset[rank]) end = Math.max(end, spans.end(last));
      }
    }
    this.end = end;
  }
}

/** A time for people, from nanoseconds. */
function duration(nanoseconds) {
  const size = Math.abs(nanoseconds);
  const [unit, scale] = size >= 1e9 ? ["s", 1e9] : size >= 1e6 ? ["ms", 1e6]
    : size >= 1e3 ? ["µs", 1e3] : ["ns", 1];
  return `${Number((nanoseconds / scale).toPrecision(4))} ${unit}`;
}

/** Round times between two times, about `most` of them, with texts that tell them apart. */
function axisTicks(from, to, most) {
  const rough = Math.max((to - from) / Math.max(1, most), 1e-9);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * (1 - 1e-9));
  const [unit, scale] = step >= 1e8 ? ["s", 1e9] : step >= 1e5 ? ["ms", 1e6] : ["µs", 1e3];
  const digits = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) {
    ticks.push([i * step, `${(i * step / scale).toFixed(digits)} ${unit}`]);
  }
  return ticks;
}
