// Writes the sections below the charts: where the time went, incidents, checkpoints, events.

import { byId, make, showCount, showSeconds, showShare, showTime, swatch } from "./dom.js";

const EVENTS_SHOWN = 150;
const BAD = new Set(["lost", "failed", "silent", "wrong", "quarantined", "back", "rot", "refused", "stop_view", "record", "straggler", "late", "unsaved"]);
const partColour = (name) => (name === "lost" ? "losing" : name);
const open = new Set(); // incidents whose story is shown

export function showGoodput(goodput) {
  const box = byId("goodput");
  if (!goodput) {
    box.replaceChildren(make("p", { class: "dim" }, "The workers have written no times yet."));
    return;
  }
  const bar = make("div", { class: "bar", role: "img", "aria-label": `goodput ${showShare(goodput.share)}` });
  const body = make("tbody");
  for (const part of goodput.parts) {
    const piece = make("span", { title: `${part.name} ${showShare(part.share)}` });
    piece.style.width = `${100 * part.share}%`;
    piece.style.background = `var(--${partColour(part.name)})`;
    bar.append(piece);
    const row = [
      make("td", {}, swatch(partColour(part.name)), part.name),
      make("td", { class: "number" }, showSeconds(part.seconds)),
      make("td", { class: "number" }, showShare(part.share)),
      make("td", { class: "dim meaning" }, part.meaning),
    ];
    body.append(make("tr", {}, ...row));
  }
  const step = goodput.step_s ? `, steps of ${showSeconds(goodput.step_s.p50)} at the median` : "";
  const head = `${showSeconds(goodput.total_s)} of ${goodput.workers} workers in ${showSeconds(goodput.wall_s)}${step}.`;
  box.replaceChildren(make("p", { class: "dim" }, head), bar, make("div", { class: "scroll" }, make("table", {}, body)));
}

// `toMark(id)`: shows the mark of an incident in the charts.
export function showIncidents(incidents, toMark) {
  const box = byId("incidents");
  if (!incidents.items.length) {
    box.replaceChildren(make("p", { class: "dim" }, "None so far."));
    return;
  }
  const rows = [...incidents.items].reverse().map((each) => incidentRow(each, toMark));
  const more = incidents.total - incidents.items.length;
  if (more > 0) rows.push(make("p", { class: "dim" }, `${showCount(more)} older ones: holdfast explain`));
  box.replaceChildren(...rows);
}

// Opens the story of an incident and goes there.
export function goToIncident(id) {
  const found = [...byId("incidents").querySelectorAll("details")].find((each) => each.dataset.id === id);
  if (!found) return;
  found.open = true;
  found.scrollIntoView({ block: "center" });
  found.querySelector("summary").focus({ preventScroll: true });
}

function incidentRow(each, toMark) {
  const lost = each.worker_s === null ? "" : `; ${showSeconds(each.worker_s)} of workers’ time`;
  const cost = each.ended === null ? `open: ${each.cost}` : `${each.cost}${lost}`;
  const summary = make("summary", {}, `${showTime(each.began)}  ${each.title}`, make("span", { class: "cost" }, cost));
  const mark = make("button", { type: "button", click: () => toMark(each.id) }, "Show in the charts");
  const story = make("pre", {}, each.story.join("\n"));
  const found = make("details", { open: open.has(each.id), "data-id": each.id }, summary, mark, story);
  found.addEventListener("toggle", () => (found.open ? open.add(each.id) : open.delete(each.id)));
  return found;
}

function eventRow(event) {
  const bad = BAD.has(event.kind) ? " bad" : "";
  const cells = [
    make("span", { class: "dim" }, showTime(event.time)),
    make("span", { class: "kind" }, event.kind),
    make("span", { class: "text" }, event.text),
  ];
  return make("div", { class: `event${bad}` }, ...cells);
}

export function showEvents(events) {
  const box = byId("events");
  const rows = events.slice(-EVENTS_SHOWN).reverse().map(eventRow);
  box.replaceChildren(...(rows.length ? rows : ["None so far."]));
}

export function showNotes(name, events, nothing, head = "") {
  const rows = [...events].reverse().map(eventRow);
  const parts = head ? [make("p", { class: "dim" }, head)] : [];
  if (rows.length) parts.push(make("div", { class: "log", tabindex: "0" }, ...rows));
  else if (!head) parts.push(make("p", { class: "dim" }, nothing));
  byId(name).replaceChildren(...parts);
}
