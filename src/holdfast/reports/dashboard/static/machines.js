// Shows how busy a node is, or one of its workers, over time.

import { Chart } from "./chart.js";
import { byId, make, showSeconds } from "./dom.js";

const EVERY_MS = 5000;
// By the id of a chart: the measure, the line in it (empty: the chosen one), the unit, a name.
const CHARTS = {
  cores: ["cores", "", 1, "Busy processors"],
  memory: ["memory", "", 1e9, "Memory in GB"],
  received: ["network", "received", 1e6, "Received, MB per second"],
  sent: ["network", "sent", 1e6, "Sent, MB per second"],
};

export class Machines {
  constructor(onMark) {
    this.began = 0;
    this.marks = [];
    this.found = null;
    this.nodes = byId("machine-node");
    this.lines = byId("machine-line");
    const label = (x) => (x < 120 ? `${Math.round(x * 10) / 10} s` : showSeconds(x));
    const nothing = "Not known.";
    this.charts = Object.entries(CHARTS).map(([id, [, , , name]]) => new Chart(byId(`machine-${id}`), { name, nothing, label, onMark }));
    this.nodes.addEventListener("change", () => this.load());
    this.lines.addEventListener("change", () => this.show());
    setInterval(() => this.load(), EVERY_MS);
  }

  // `began`: when the run began, in seconds since the epoch. `marks`: of incidents, in seconds since then.
  mark(began, marks) {
    [this.began, this.marks] = [began, marks];
    this.show();
  }

  list(nodes) {
    byId("machines-section").hidden = !nodes.length;
    choose(this.nodes, nodes);
    this.load();
  }

  async load() {
    const node = this.nodes.value;
    if (!node || document.hidden) return;
    const answer = await fetch(`/api/usage?node=${encodeURIComponent(node)}`).catch(() => null);
    if (!answer?.ok || node !== this.nodes.value) return;
    this.found = await answer.json();
    choose(this.lines, Object.keys(this.found?.curves.cores ?? {}));
    this.show();
  }

  show() {
    if (!this.found) return;
    Object.values(CHARTS).forEach(([measure, line, unit], i) => {
      const isNode = this.lines.value === "node";
      const points = line && !isNode ? [] : (this.found.curves[measure][line || this.lines.value] ?? []);
      this.charts[i].show(points.map(([at, y]) => [at - this.began, y === null ? null : y / unit]), this.marks);
    });
  }
}

// Fills a list, and keeps what is chosen in it.
function choose(list, names) {
  const shown = JSON.stringify(names);
  if (list.dataset.shown === shown) return;
  const chosen = list.value;
  list.dataset.shown = shown;
  list.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(chosen)) list.value = chosen;
}
