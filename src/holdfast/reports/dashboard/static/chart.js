// Draws a line through points, with gaps where a value is null, and marks for faults.

import { colour, make, oncePerFrame, showNumber } from "./dom.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [58, 14, 14, 28];

export class Chart {
  // `label(x)`: names a place of the horizontal axis, long or short.
  // `onMark(id)`: the reader chooses a mark.
  constructor(box, { label, nothing, name, onMark }) {
    this.box = box;
    this.label = label;
    this.points = [];
    this.marks = []; // {id, at, text}
    this.onMark = onMark;
    this.at = null; // where the reader points
    this.canvas = make("canvas", { tabindex: "0", role: "img", "aria-label": name });
    this.tip = make("div", { class: "tip", role: "status", hidden: true });
    this.nothing = make("div", { class: "nothing" }, nothing);
    this.name = name;
    this.draw = oncePerFrame(() => this.paint());
    box.append(this.canvas, this.tip, this.nothing);
    this.canvas.addEventListener("pointermove", (event) => this.point(this.value(event.offsetX)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", () => this.choose());
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show(points, marks) {
    if (points) this.points = points;
    if (marks) this.marks = marks;
    const known = this.points.filter((each) => each[1] !== null);
    this.nothing.hidden = known.length > 0;
    const last = known.at(-1);
    const now = last ? `; last ${showNumber(last[1])} at ${this.label(last[0])}` : "";
    this.canvas.setAttribute("aria-label", `${this.name}${now}; ${this.marks.length} faults`);
    this.draw();
  }

  measure() {
    const known = this.points.filter((each) => each[1] !== null);
    if (!known.length) return null;
    const values = known.map((each) => each[1]);
    const xs = this.points.map((each) => each[0]);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (low > 0 && low < high * 0.5) low = 0;
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    if (low !== 0) low -= margin;
    const span = { first: Math.min(...xs), last: Math.max(...xs), low, high: high + margin };
    if (span.first === span.last) span.last += 1;
    span.width = this.box.clientWidth;
    span.height = this.box.clientHeight;
    span.x = (v) => LEFT + ((v - span.first) / (span.last - span.first)) * (span.width - LEFT - RIGHT);
    span.y = (v) => span.height - BOTTOM - ((v - span.low) / (span.high - span.low)) * (span.height - TOP - BOTTOM);
    return span;
  }

  paint() {
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(this.box.clientWidth * scale);
    this.canvas.height = Math.round(this.box.clientHeight * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const span = (this.span = this.measure());
    if (!span) return;
    this.paintAxes(pen, span);
    this.paintMarks(pen, span);
    this.paintLine(pen, span);
    if (this.at !== null) this.paintPointer(pen, span);
  }

  paintAxes(pen, span) {
    pen.font = "11.5px system-ui, sans-serif";
    pen.fillStyle = colour("dim");
    pen.strokeStyle = colour("rule");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const tick of ticks(span.low, span.high, 5)) {
      const y = Math.round(span.y(tick)) + 0.5;
      line(pen, LEFT, y, span.width - RIGHT, y);
      pen.fillText(showNumber(tick), LEFT - 7, y + 4);
    }
    pen.textAlign = "center";
    for (const tick of ticks(span.first, span.last, Math.max(2, Math.floor(span.width / 110)))) {
      pen.fillText(this.label(tick, true), span.x(tick), span.height - 9);
    }
  }

  paintMarks(pen, span) {
    pen.strokeStyle = pen.fillStyle = colour("mark");
    for (const mark of this.marks) {
      if (mark.at < span.first || mark.at > span.last) continue;
      const x = span.x(mark.at);
      pen.setLineDash([3, 3]);
      line(pen, x, TOP - 4, x, span.height - BOTTOM);
      pen.setLineDash([]);
      pen.beginPath();
      pen.arc(x, TOP - 5, 4, 0, 7);
      pen.fill();
    }
  }

  paintLine(pen, span) {
    pen.strokeStyle = pen.fillStyle = colour("accent");
    pen.lineWidth = 1.7;
    pen.lineJoin = "round";
    pen.beginPath();
    let open = false;
    this.points.forEach(([x, y], i) => {
      if (y === null) open = false;
      else if (open) pen.lineTo(span.x(x), span.y(y));
      else {
        pen.moveTo(span.x(x), span.y(y));
        open = true;
        const alone = i + 1 === this.points.length || this.points[i + 1][1] === null;
        if (alone) pen.fillRect(span.x(x) - 1.5, span.y(y) - 1.5, 3, 3);
      }
    });
    pen.stroke();
  }

  paintPointer(pen, span) {
    const found = this.nearest();
    if (!found) return;
    const x = span.x(found[0]);
    pen.strokeStyle = colour("dim");
    line(pen, x, TOP, x, span.height - BOTTOM);
    if (found[1] === null) return;
    pen.fillStyle = colour("accent");
    pen.beginPath();
    pen.arc(x, span.y(found[1]), 3.5, 0, 7);
    pen.fill();
  }

  nearest() {
    let best = null;
    for (const each of this.points) {
      if (!best || Math.abs(each[0] - this.at) < Math.abs(best[0] - this.at)) best = each;
    }
    return best;
  }

  value(pixel) {
    const span = this.span;
    if (!span) return null;
    return span.first + ((pixel - LEFT) / (span.width - LEFT - RIGHT)) * (span.last - span.first);
  }

  point(at) {
    this.at = this.span ? at : null;
    this.tip.hidden = this.at === null;
    if (this.at !== null) {
      const found = this.nearest();
      const near = this.nearMarks();
      const faults = near.map((mark) => mark.text);
      this.canvas.style.cursor = near.length ? "pointer" : "";
      const value = found[1] === null ? "not known" : showNumber(found[1], 5);
      this.tip.textContent = [`${this.label(found[0])}: ${value}`, ...faults].join(" · ");
      const right = this.span.x(found[0]) < this.span.width / 2;
      this.tip.style.left = right ? "auto" : `${LEFT + 6}px`;
      this.tip.style.right = right ? `${RIGHT}px` : "auto";
    }
    this.draw();
  }

  nearMarks() {
    if (this.at === null) return [];
    return this.marks.filter((mark) => Math.abs(this.span.x(mark.at) - this.span.x(this.at)) < 7);
  }

  choose() {
    const [mark] = this.nearMarks();
    if (mark) this.onMark(mark.id);
  }

  // Points at a mark; returns whether it is in the chart.
  pointTo(id) {
    const mark = this.marks.find((each) => each.id === id);
    const shown = Boolean(mark && this.span && mark.at >= this.span.first && mark.at <= this.span.last);
    if (shown) this.point(mark.at);
    return shown;
  }

  onKey(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") return this.point(null);
    if (event.key === "Enter") return this.choose();
    if (!way || !this.points.length) return;
    event.preventDefault();
    const now = this.at === null ? this.points.length - 1 : this.points.indexOf(this.nearest()) + way;
    this.point(this.points[Math.max(0, Math.min(now, this.points.length - 1))][0]);
  }
}

function line(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

function ticks(least, most, count) {
  const raw = (most - least) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let k = Math.ceil(least / step - 1e-9); k * step <= most + step * 1e-9; k += 1) found.push(k * step + 0); // no negative zero
  return found;
}
