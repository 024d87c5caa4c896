// Draws all workers as cells of one canvas, by node. Only the part that is scrolled to is drawn.

import { DASH, colour, oncePerFrame } from "./dom.js";

const PAD = 10;
const LABEL = 17;
const MANY = 400; // workers from which on cells are small
const ALARMS = new Set(["lost", "failed"]);

export class Grid {
  // `chosen(id)`: is called with the number of the worker to show, or null.
  constructor(box, chosen) {
    this.box = box;
    this.room = box.querySelector(".grid-room");
    this.canvas = box.querySelector("canvas");
    this.chosen = chosen;
    this.cells = []; // {id, state, node, x, y}
    this.labels = []; // {text, x, y}
    this.size = 26;
    this.cursor = null; // number of a worker
    this.draw = oncePerFrame(() => this.paint());
    box.addEventListener("scroll", () => this.draw());
    box.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas.addEventListener("click", (event) => this.onClick(event));
    new ResizeObserver(() => this.lay()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // `workers`: [{id, node, state}]; an unknown state is null.
  show(workers) {
    const moved =
      workers.length !== this.cells.length ||
      workers.some((each, i) => each.id !== this.cells[i].id || each.node !== this.cells[i].node);
    if (moved) {
      this.workers = workers;
      this.lay();
    } else {
      workers.forEach((each, i) => (this.cells[i].state = each.state));
      this.draw();
    }
  }

  // Puts the cells in their places: a block for each node, with at most 8 columns.
  lay() {
    const workers = this.workers ?? [];
    const size = workers.length > MANY ? 13 : 26;
    const step = size + 3;
    const width = this.box.clientWidth;
    const columns = Math.max(1, Math.min(8, Math.floor((width - 2 * PAD) / step)));
    const nodes = new Map();
    for (const each of workers) {
      if (!nodes.has(each.node)) nodes.set(each.node, []);
      nodes.get(each.node).push(each);
    }
    let [x, y, tallest] = [PAD, PAD, 0];
    this.size = size;
    this.cells = [];
    this.labels = [];
    for (const [node, theirs] of nodes) {
      const across = nodes.size === 1 ? Math.max(1, Math.floor((width - 2 * PAD) / step)) : columns;
      const wide = Math.max(Math.min(theirs.length, across) * step, 70) + 12;
      const tall = LABEL + Math.ceil(theirs.length / across) * step + 8;
      if (x > PAD && x + wide > width - PAD) [x, y, tallest] = [PAD, y + tallest, 0];
      this.labels.push({ text: node ?? DASH, x, y: y + 12, wide: wide - 12 });
      theirs.forEach((each, i) => {
        const at = { x: x + (i % across) * step, y: y + LABEL + Math.floor(i / across) * step };
        this.cells.push({ ...each, ...at });
      });
      x += wide;
      tallest = Math.max(tallest, tall);
    }
    // The order of `workers` must be that of the cells, so that states can be replaced in place.
    const order = new Map(workers.map((each, i) => [each.id, i]));
    this.cells.sort((a, b) => order.get(a.id) - order.get(b.id));
    this.room.style.height = `${y + tallest + PAD}px`;
    this.draw();
  }

  paint() {
    const [width, height] = [this.box.clientWidth, this.box.clientHeight];
    const scale = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale)) this.canvas.width = Math.round(width * scale);
    if (this.canvas.height !== Math.round(height * scale)) this.canvas.height = Math.round(height * scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const top = this.box.scrollTop;
    pen.fillStyle = colour("dim");
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "left";
    for (const { text, x, y, wide } of this.labels) {
      if (y - top > -20 && y - top < height + 20) pen.fillText(fit(pen, text, wide), x, y - top);
    }
    const colours = new Map();
    for (const cell of this.cells) {
      const y = cell.y - top;
      if (y < -this.size || y > height) continue;
      if (!colours.has(cell.state)) colours.set(cell.state, cell.state && colour(stateName(cell.state)));
      this.paintCell(pen, cell, y, colours.get(cell.state));
    }
  }

  paintCell(pen, cell, y, fill) {
    const { x } = cell;
    const size = this.size;
    pen.beginPath();
    pen.roundRect(x + 0.5, y + 0.5, size - 1, size - 1, size > 20 ? 5 : 3);
    if (fill) {
      pen.fillStyle = fill;
      pen.fill();
    } else {
      pen.setLineDash([3, 3]);
      pen.strokeStyle = colour("dim");
      pen.lineWidth = 1;
      pen.stroke();
      pen.setLineDash([]);
    }
    if (size > 20) {
      pen.fillStyle = fill ? "#fff" : colour("dim");
      pen.font = "600 11px system-ui, sans-serif";
      pen.textAlign = "center";
      if (fill) [pen.shadowColor, pen.shadowBlur] = ["rgb(0 0 0 / 70%)", 3];
      pen.fillText(String(cell.id), x + size / 2, y + size / 2 + 4);
      pen.shadowBlur = 0;
    }
    if (ALARMS.has(cell.state)) this.cross(pen, x, y, size);
    if (cell.id === this.cursor) {
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 2;
      pen.strokeRect(x - 1, y - 1, size + 2, size + 2);
    }
  }

  cross(pen, x, y, size) {
    pen.strokeStyle = "#fff";
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x + 3, y + size - 3);
    pen.lineTo(x + size - 3, y + 3);
    pen.stroke();
  }

  choose(id, reveal = true) {
    this.cursor = id;
    const cell = this.cells.find((each) => each.id === id);
    if (cell && reveal) {
      const [top, height] = [this.box.scrollTop, this.box.clientHeight];
      if (cell.y < top + LABEL) this.box.scrollTop = cell.y - LABEL - PAD;
      else if (cell.y + this.size > top + height) this.box.scrollTop = cell.y + this.size + PAD - height;
    }
    this.chosen(id);
    this.draw();
  }

  onClick(event) {
    const [x, y] = [event.offsetX, event.offsetY + this.box.scrollTop];
    const hit = (cell) => x >= cell.x - 1 && x <= cell.x + this.size + 2 && y >= cell.y - 1 && y <= cell.y + this.size + 2;
    const found = this.cells.find(hit);
    this.choose(found ? found.id : null, false);
  }

  onKey(event) {
    if (event.key === "Escape") return this.choose(null);
    const now = this.cells.find((each) => each.id === this.cursor);
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const way = ways[event.key];
    if (!way && event.key !== "Enter" && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    if (!this.cells.length) return;
    const placed = [...this.cells].sort((a, b) => a.y - b.y || a.x - b.x);
    if (event.key === "End") return this.choose(placed.at(-1).id);
    if (!now || event.key === "Home") return this.choose(placed[0].id);
    if (event.key === "Enter") return this.choose(now.id);
    const next = way[0] ? placed[placed.indexOf(now) + way[0]] : nearest(placed, now, way[1]);
    if (next) this.choose(next.id);
  }
}

// Returns the cell in the next row above (-1) or below (1) that is nearest.
function nearest(cells, from, way) {
  const beyond = cells.filter((each) => (each.y - from.y) * way > 0);
  if (!beyond.length) return null;
  const row = beyond.reduce((best, each) => (Math.abs(each.y - from.y) < Math.abs(best.y - from.y) ? each : best)).y;
  const near = (best, each) => (Math.abs(each.x - from.x) < Math.abs(best.x - from.x) ? each : best);
  return beyond.filter((each) => each.y === row).reduce(near);
}

function fit(pen, text, wide) {
  if (pen.measureText(text).width <= wide) return text;
  let length = text.length;
  while (length > 1 && pen.measureText(`${text.slice(0, length)}…`).width > wide) length -= 1;
  return `${text.slice(0, length)}…`;
}

export function stateName(state) {
  return state ? state.replaceAll(" ", "-") : "unknown";
}
