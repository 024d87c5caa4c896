// Gives orders in two steps: the server asks a question, and the reader confirms it.

import { byId, make, showTime } from "./dom.js";

const dialog = byId("confirm");
const [question, problem] = [byId("confirm-question"), byId("confirm-problem")];
const [target, reason] = [byId("confirm-target"), byId("confirm-reason")];
const [yes, no] = [byId("confirm-yes"), byId("confirm-no")];
let next = async () => {};

async function post(path, body) {
  const headers = { "content-type": "application/json" };
  try {
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    const text = await answer.text();
    return answer.headers.get("content-type")?.includes("json") ? JSON.parse(text) : { problem: text };
  } catch {
    return { problem: "The dashboard does not answer." };
  }
}

// `order`: without its reason. `targets`: names of nodes to choose `to` from; none for a drain.
export function giveOrder(order, first, targets = []) {
  question.textContent = first;
  problem.textContent = "";
  reason.value = "";
  reason.disabled = target.disabled = false;
  byId("confirm-target-label").hidden = !targets.length;
  target.replaceChildren(...targets.map((name) => make("option", { value: name }, name)));
  yes.textContent = "Continue";
  next = () => ask({ ...order, ...(targets.length ? { to: target.value } : {}), reason: reason.value });
  dialog.showModal();
  yes.focus();
}

async function ask(order) {
  const answer = await post("/api/orders", order);
  if (answer.problem) {
    problem.textContent = answer.problem;
    return;
  }
  question.textContent = answer.question;
  reason.disabled = target.disabled = true;
  yes.textContent = order.order === "drain" ? `Drain ${order.node}` : `Move worker ${order.worker}`;
  next = () => confirm(answer.confirm);
}

async function confirm(word) {
  const answer = await post("/api/orders/confirm", { confirm: word });
  if (answer.problem) problem.textContent = answer.problem;
  else dialog.close();
}

async function go() {
  yes.disabled = true;
  problem.textContent = "";
  await next();
  yes.disabled = false;
  if (dialog.open) yes.focus();
}

yes.addEventListener("click", go);
no.addEventListener("click", () => dialog.close());
reason.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  go();
});

export function showOrders(orders) {
  byId("orders-section").hidden = !orders.length;
  const states = { waiting: "waiting until it is done", done: "done", refused: "refused" };
  const rows = [...orders].reverse().map((each) => {
    const answer = each.answer ? `: ${each.answer}` : "";
    return make("li", { class: each.state === "refused" ? "problem" : "" }, `${showTime(each.at)}  ${each.text}: ${states[each.state]}${answer}`);
  });
  byId("orders").replaceChildren(...rows);
}
