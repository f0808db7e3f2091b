"use strict";
// What every part of the page needs: elements, numbers, explanations, tooltips, the user's choices. All text is set
// through textContent, so no text ever becomes markup.

let data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);

function make(parent, tag, text, cls, attributes) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (cls) node.className = cls;
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (parent) parent.append(node);
  return node;
}

function svg(parent, tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function button(parent, text, act, cls, attributes) {
  const node = make(parent, "button", text, cls, {type: "button", ...attributes});
  node.addEventListener("click", act);
  return node;
}

function show(value) {
  if (value === undefined || value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size && size < 0.0001) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  return String(+value.toPrecision(size >= 1000 ? 4 : 3)).replace(/^-/, "−");
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 60) return show(seconds) + " s";
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? minutes + " min" : Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}

// Invisible characters, and those that change the text direction, are shown by their names.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
const named = sign => {
  const code = sign.charCodeAt(0);
  return code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "␡" : "⟨U+" + code.toString(16).toUpperCase().padStart(4, "0") + "⟩";
};
const visible = text => String(text).replace(HIDDEN, named);

// Tooltips: the `data-tip` of any element, shown by pointer, touch or keyboard.
const tip = byId("tip");
function showTip(node) {
  tip.textContent = node.dataset.tip;
  tip.hidden = false;
  const place = node.getBoundingClientRect(), own = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(place.left, innerWidth - own.width - 8)) + "px";
  tip.style.top = (place.bottom + own.height + 10 < innerHeight ? place.bottom + 6 : Math.max(4, place.top - own.height - 6)) + "px";
}
const hideTip = () => { tip.hidden = true; };
const tipped = event => event.target instanceof Element && event.target.closest("[data-tip]");
for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, event => tipped(event) ? showTip(tipped(event)) : hideTip());
for (const kind of ["focusout", "scroll"]) document.addEventListener(kind, hideTip, true);
document.addEventListener("keydown", event => { if (event.key === "Escape") hideTip(); });

// A label of a metric. Its tooltip has the formula and what a bad value means.
function term(parent, text, metric, tag = "span") {
  const words = (data.words || {})[metric];
  const node = make(parent, tag, text);
  const inner = tag === "span" ? node : (node.textContent = "", make(node, "span", text));
  inner.className = "term";
  inner.tabIndex = 0;
  inner.dataset.tip = words ? metric + "\n" + plain(words[0]) + (words[1] ? "\n\nBad: " + plain(words[1]) : "") : metric;
  return node;
}
const plain = text => text.replaceAll("`", "");

// What the user has selected; it is kept when the page is redrawn or reloaded.
const ui = {step: "", verifier: "", finish: "", low: "", high: "", trained: "", search: "", sort: "newest", selected: "", colour: "text", smooth: 0, hidden: {}, expanded: {}, rows: 25, shown: 60, window: 0, more: false, runs: {}};
try { Object.assign(ui, JSON.parse(sessionStorage.getItem("podium:" + location.pathname) || "{}")); } catch { /* no storage: the selection is not kept */ }
function keep() { try { sessionStorage.setItem("podium:" + location.pathname, JSON.stringify(ui)); } catch { /* no storage */ } }

function choice(parent, label, key, options, redraw) {
  const box = make(parent, "label", label), select = make(box, "select", undefined, "", {id: "pick-" + key});
  if (!options.some(([value]) => value === ui[key])) ui[key] = options[0][0];
  for (const [value, text] of options) make(select, "option", text, "", {value});
  select.value = ui[key];
  select.addEventListener("change", () => { ui[key] = select.value; keep(); redraw(); });
}

function field(parent, label, key, type, redraw, attributes) {
  const box = make(parent, "label", label), input = make(box, "input", undefined, "", {type, id: "pick-" + key, ...attributes});
  input.value = ui[key];
  input.addEventListener("input", () => { ui[key] = input.value; keep(); redraw(); });
  return input;
}
