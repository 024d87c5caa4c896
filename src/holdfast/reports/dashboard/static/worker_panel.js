// Shows one worker: its facts, and the last lines of its log while the panel is open.

import { byId, make, showCount, showText, showTime } from "./dom.js";

const LOG_MS = 2000;

export class WorkerPanel {
  // `move(worker)`: asks to migrate a worker; `close()`: lets it go.
  constructor(move, close) {
    this.box = byId("worker");
    this.move = move;
    this.close = close;
    this.id = null;
    this.log = make("div", { class: "log", tabindex: "0", role: "log", "aria-label": "last lines of its log" });
    this.logName = make("p", { class: "dim small" });
    setInterval(() => this.readLog(), LOG_MS);
  }

  // `worker`: null if none is chosen; `live`: whether orders can be given.
  show(id, worker, live) {
    const fresh = id !== this.id;
    this.id = id;
    if (id === null) {
      this.box.replaceChildren(make("p", { class: "dim" }, "No worker is chosen."));
      return;
    }
    const title = make("h3", {}, `Worker ${id}`);
    title.append(make("button", { type: "button", "aria-label": "close", click: this.close }, "✕"));
    if (!this.facts || fresh) {
      this.facts = make("dl", { class: "facts" });
      const text = "Move to another node…";
      this.button = make("button", { type: "button", click: () => this.move(this.id) }, text);
      this.log.replaceChildren("…");
      this.logName.textContent = "";
      this.box.replaceChildren(title, this.facts, this.button, this.logName, this.log);
      this.readLog();
    }
    this.button.disabled = !live || !worker?.hosts;
    const facts = factsOf(worker ?? {}).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
    this.facts.replaceChildren(...facts);
  }

  async readLog() {
    const id = this.id;
    if (id === null || document.hidden) return;
    try {
      const answer = await fetch(`/api/log?worker=${id}`);
      const found = await answer.json();
      if (id !== this.id) return;
      const stay = this.log.scrollTop + this.log.clientHeight < this.log.scrollHeight - 4;
      const text = (found.lines ?? [found.problem]).join("\n");
      if (this.log.textContent !== text) this.log.textContent = text || "The log is empty.";
      this.logName.textContent = found.name ? `logs/${found.name}` : "No log of it was found.";
      if (!stay) this.log.scrollTop = this.log.scrollHeight;
    } catch {
      // The stream says that the dashboard is away; the next look tries again.
    }
  }
}

function factsOf(worker) {
  const ranks = worker.ranks ? worker.ranks.join(" ") || "none" : null;
  const found = [
    ["state", showText(worker.state)],
    ["host", showText(worker.node)],
    ["pid", showText(worker.pid)],
    ["incarnation", showText(worker.incarnation)],
    ["steps", showCount(worker.step)],
    ["virtual ranks", showText(ranks)],
  ];
  if (worker.seen) found.push(["last line at", showTime(worker.seen)]);
  if (worker.detail) found.push(["detail", worker.detail]);
  return found;
}
