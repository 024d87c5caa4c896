// Makes elements and writes values. Text always goes in as text, never as HTML.

export const DASH = "–";

export function byId(name) {
  return document.getElementById(name);
}

// make("p", {class: "dim"}, "text", child): children that are strings become text nodes.
export function make(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") found.addEventListener(name, value);
    else if (value === true) found.setAttribute(name, "");
    else if (value !== false && value !== null) found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Returns a function that has `paint` called with the next frame, however often it is called itself.
export function oncePerFrame(paint) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      paint();
    });
  };
}

// Colours come as styles set by script, which the page's policy allows; style attributes it does not.
export function swatch(name) {
  const found = make("span", { class: "swatch" });
  if (name === "unknown") found.classList.add("unknown");
  else found.style.background = `var(--${name})`;
  return found;
}

const known = (value) => value !== null && value !== undefined;

export const showCount = (value) => (known(value) ? value.toLocaleString("en") : DASH);
export const showShare = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : DASH);
export const showText = (value) => (known(value) && value !== "" ? String(value) : DASH);

export function showNumber(value, digits = 4) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(digits - 2);
  return String(Number(value.toPrecision(digits)));
}

export function showSeconds(value) {
  if (!known(value)) return DASH;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

export function showTime(seconds) {
  return known(seconds) ? new Date(seconds * 1000).toTimeString().slice(0, 8) : DASH;
}
