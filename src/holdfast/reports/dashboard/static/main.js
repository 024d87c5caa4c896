// Puts the page together: takes the topics of the stream, and shows each where it belongs.

import { Chart } from "./chart.js";
import { byId, make, showCount, showNumber, showSeconds, showShare, showTime, swatch } from "./dom.js";
import { Grid, stateName } from "./grid.js";
import { Machines } from "./machines.js";
import { giveOrder, showOrders } from "./orders.js";
import { goToIncident, showEvents, showGoodput, showIncidents, showNotes } from "./sections.js";
import { follow } from "./stream.js";
import { WorkerPanel } from "./worker_panel.js";

const HOSTS = new Set(["computing", "waiting", "ended", "changing view", "stopped", "joining"]);
const EVENTS_KEPT = 500;
const now = { run: null, link: null, status: null, goodput: null, loss: null, rates: null, left: null, known: [], connected: false, problem: "" };
let workers = new Map(); // by number
let events = [];
let eventsSeen = 0;

// The token must not stay in the address, where others may see it; a cookie has it.
if (location.search) history.replaceState(null, "", location.pathname);

const panel = new WorkerPanel(askToMove, () => grid.choose(null));
const grid = new Grid(byId("grid"), showWorker);
const loss = new Chart(byId("loss"), { name: "Loss by step", nothing: "No loss is known yet.", onMark: goToIncident, label: (x, short) => (short ? showCount(Math.round(x)) : `step ${showCount(x)}`) });
const rates = new Chart(byId("rates"), { name: "Steps per second", nothing: "No rate is known yet.", onMark: goToIncident, label: (x) => (x < 120 ? `${Math.round(x * 10) / 10} s` : showSeconds(x)) });
const machines = new Machines(goToIncident);

function showHead() {
  const { run, link, status, goodput, left, rates: rate, loss: last } = now;
  const [text, kind] = describeState();
  byId("state").textContent = text;
  byId("state").className = `chip ${kind}`;
  byId("name").textContent = run?.name ?? "–";
  byId("script").textContent = run?.script ?? "";
  document.title = run ? `${run.name}: ${text}` : "Holdfast";
  const step = status?.step ?? goodput?.steps;
  const hosting = status?.workers.filter((each) => HOSTS.has(each[2])).length;
  const live = link?.state === "live";
  const tiles = [
    ["step", showCount(step)],
    [live ? "steps per second" : "steps / s at the end", showNumber(rate?.now, 3)],
    ["loss", showNumber(last?.last)],
    ["goodput", showShare(goodput?.share)],
    ["ETTR", showShare(goodput?.ettr)],
    ["workers that train", showCount(hosting)],
    ["time left, about", live && left ? showSeconds(left) : "–"],
  ];
  const parts = tiles.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  byId("tiles").replaceChildren(...parts);
  showBanner();
}

function describeState() {
  const { run, link, status, connected } = now;
  if (!connected && !run) return ["connecting", "warn"];
  if (status) return [status.state, status.state === "training" ? "good" : "warn"];
  if (run?.outcome === "") return ["succeeded", "good"];
  if (run?.outcome) return ["failed", "bad"];
  return link ? ["not known", "warn"] : ["–", ""];
}

function showBanner() {
  const { run, link, connected, problem } = now;
  const lines = [];
  if (!connected) lines.push("The dashboard does not answer; trying again. If it was started again, open the URL that it has printed.");
  if (link?.state === "lost") {
    const since = link.answered ? ` It last answered at ${showTime(link.answered)}.` : "";
    lines.push(`The coordinator does not answer, so this is what the files of the run tell.${since} (${link.text})`);
  }
  if (problem) lines.push(problem);
  if (run?.outcome) lines.push(run.outcome);
  const box = byId("banner");
  const text = lines.join("\n");
  box.hidden = !text;
  if (box.textContent !== text) box.textContent = text;
}

function showWorkers() {
  const { status, known } = now;
  const found = new Map(known.map((each) => [each.id, { ...each, state: null, pid: null, ranks: null }]));
  for (const [id, node, state, pid, incarnation, step, ranks, detail] of status?.workers ?? []) {
    found.set(id, { id, node, state, pid, incarnation, step, ranks, detail, hosts: HOSTS.has(state) });
  }
  if (status) for (const id of [...found.keys()]) if (found.get(id).state === null) found.delete(id);
  const byNode = (a, b) => String(a.node ?? "").localeCompare(String(b.node ?? ""), "en", { numeric: true }) || a.id - b.id;
  workers = new Map([...found.values()].sort(byNode).map((each) => [each.id, each]));
  grid.show([...workers.values()]);
  const counts = new Map();
  for (const { state } of workers.values()) counts.set(state, (counts.get(state) ?? 0) + 1);
  const legend = [...counts].map(([state, count]) =>
    make("span", {}, swatch(stateName(state)), `${state ?? "not known"} ${showCount(count)}`));
  byId("legend").replaceChildren(...(legend.length ? legend : ["No worker is known yet."]));
  showNodes();
  if (grid.cursor !== null) showWorker(grid.cursor);
}

function showNodes() {
  const nodes = now.status?.nodes ?? [];
  const box = byId("nodes");
  const shown = JSON.stringify(nodes);
  if (box.dataset.shown === shown) return; // so that the focus stays on a button
  box.dataset.shown = shown;
  const focused = document.activeElement?.dataset?.node;
  const rows = nodes.map((node) => {
    const marks = [node.silent ? "silent" : "", node.draining ? `draining: ${node.draining}` : "", ...node.domains];
    const drain = make("button", { type: "button", "data-node": node.id, click: () => askToDrain(node) }, "Drain…");
    drain.disabled = Boolean(node.draining);
    return make("tr", {},
      make("td", {}, node.id),
      make("td", { class: "number" }, `${showCount(node.members)} train`),
      make("td", { class: "dim" }, marks.filter(Boolean).join(", ")),
      make("td", { class: "number" }, drain));
  });
  box.replaceChildren(...rows);
  if (focused) [...box.querySelectorAll("button")].find((each) => each.dataset.node === focused)?.focus();
}

function showWorker(id) {
  const found = id === null ? null : workers.get(id);
  panel.show(id, found, now.status !== null);
  const said = id === null ? "" : `worker ${id} on ${found?.node ?? "a node not known"}: ${found?.state ?? "not known"}`;
  if (byId("said").textContent !== said) byId("said").textContent = said;
}

function askToDrain(node) {
  giveOrder({ order: "drain", node: node.id }, `Drain node ${node.id}?`);
}

function askToMove(id) {
  const own = workers.get(id)?.node;
  const others = (now.status?.nodes ?? []).map((node) => node.id).filter((name) => name !== own);
  if (others.length) giveOrder({ order: "migrate", worker: id }, `Move worker ${id} to another node?`, others);
  else giveOrder({ order: "migrate", worker: id, to: String(own) }, `Worker ${id} has no other node to move to.`);
}

function takeEvents({ first, items, whole }) {
  if (whole) [events, eventsSeen] = [[], first];
  const fresh = items.slice(Math.max(eventsSeen - first, 0)); // some may come once more
  eventsSeen = Math.max(eventsSeen, first + items.length);
  events = [...events, ...fresh].slice(-EVENTS_KEPT);
  showEvents(events);
}

function showMarks() {
  const faults = now.incidents?.items ?? [];
  const began = now.rates?.began ?? 0;
  loss.show(null, faults.filter((each) => each.step !== null).map((each) => ({ id: each.id, at: each.step, text: each.title })));
  const marks = faults.map((each) => ({ id: each.id, at: each.began - began, text: each.title }));
  rates.show(now.rates?.points, marks);
  machines.mark(began, marks);
}

function goToMark(id) {
  const shown = [loss, rates, ...machines.charts].filter((chart) => chart.pointTo(id));
  shown[0]?.box.scrollIntoView({ block: "center" });
}

function showSaves() {
  const saved = now.run?.saved ?? [];
  const head = saved.length ? `The job can begin from ${saved.length === 1 ? "step" : "steps"} ${saved.join(", ")}.` : "";
  showNotes("saves", now.saves ?? [], "No checkpoint is known.", head);
}

const keep = (name, ...then) => (value) => {
  now[name] = value;
  for (const show of then) show();
};

follow(
  {
    run: keep("run", showHead, showSaves),
    link: keep("link", showHead),
    status: keep("status", showHead, showWorkers),
    known: keep("known", showWorkers),
    goodput: keep("goodput", showHead, () => showGoodput(now.goodput)),
    loss: keep("loss", showHead, () => loss.show(now.loss.points, null)),
    rates: keep("rates", showHead, showMarks),
    left: keep("left", showHead),
    saves: keep("saves", showSaves),
    troubles: (value) => showNotes("troubles", value, "None so far."),
    incidents: keep("incidents", showMarks, () => showIncidents(now.incidents, goToMark)),
    machines: (nodes) => machines.list(nodes),
    events: takeEvents,
    orders: showOrders,
    files: ({ problem }) => keep("problem", showHead)(problem),
    dropped: ({ count }) => console.info(`${count} updates were dropped, since this page was too slow`),
  },
  (connected) => keep("connected", showHead)(connected),
);
