// What all parts of the page use: the facts, elements, numbers with units, colours, the tip.

const F = JSON.parse(document.getElementById("facts").textContent);
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

// An element. Attributes that begin with "on" are listeners; text is only ever set as text.
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

// The largest and the smallest number of a list of any length.
function most(list) {
  return list.reduce((a, b) => Math.max(a, b), -Infinity);
}

function least(list) {
  return list.reduce((a, b) => Math.min(a, b), Infinity);
}

function count(n) {
  return n.toLocaleString("en-US");
}

function plural(n, word) {
  return `${count(n)} ${word}${n === 1 ? "" : "s"}`;
}

// 1.50 GiB. Three digits: more are of no use to a person, and the exact number stands beside it where it matters.
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  let unit = 0;
  while (n >= 1023.5 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${n} B` : `${n >= 100 ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2)} ${units[unit]}`;
}

function exactBytes(n) {
  return n < 1024 ? plural(n, "byte") : `${bytes(n)} (${count(n)} bytes)`;
}

function short(n) {
  for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"]]) {
    if (n >= size) return `${(n / size).toPrecision(3)}${unit}`;
  }
  return count(n);
}

function percent(part, whole) {
  if (!whole) return "0 %";
  const value = (100 * part) / whole;
  return value > 0 && value < 0.1 ? "< 0.1 %" : `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : ms < 60000 ? `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s` : minutes(ms);
}

function minutes(ms) {
  const whole = Math.round(ms / 1000);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

const HUES = [212, 32, 152, 338, 266, 52, 186, 4];

function hue(i) {
  return i < HUES.length ? HUES[i] : (i * 137.508) % 360;
}

// The colour of the i-th of several things; lightness and saturation are those of the light or dark scheme.
function colour(i) {
  return `hsl(${hue(i)} var(--saturation) var(--lightness))`;
}

// -- who holds what: ranks where file names tell them, else files

const BY_RANK = F.ranks.rank.length > 0;
const HOLDERS = BY_RANK ? F.ranks.rank.length : F.files.name.length;
const RANK_PLACE = new Map(F.ranks.rank.map((rank, i) => [rank, i]));
const HOLDER_WORD = BY_RANK ? "rank" : "file";

function holderOf(file) {
  return BY_RANK ? RANK_PLACE.get(F.files.rank[file]) : file;
}

// Of few holders colours that tell them apart, of many the colours of the rainbow in their order.
function holderColour(holder) {
  return HOLDERS <= 32 ? colour(holder) : `hsl(${(330 * holder) / HOLDERS} var(--saturation) var(--lightness))`;
}

function holderName(holder) {
  return BY_RANK ? `rank ${F.ranks.rank[holder]}` : F.files.name[holder];
}

function holderShort(holder) {
  return BY_RANK ? `${F.ranks.rank[holder]}` : `${holder}`;
}

// -- the tip beside the pointer

function tipOn(node, lines) {
  node.addEventListener("pointermove", (event) => {
    const tip = $("tip");
    tip.replaceChildren(...lines().map((line) => el("div", {}, line)));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, window.innerWidth - width - 8);
    const y = event.clientY + 18 + height > window.innerHeight ? event.clientY - height - 10 : event.clientY + 18;
    tip.style.left = `${Math.max(8, x)}px`;
    tip.style.top = `${Math.max(8, y)}px`;
  });
  node.addEventListener("pointerleave", () => { $("tip").hidden = true; });
}

// -- tables and pairs

function cell(value) {
  return value instanceof Node ? value : String(value);
}

// A table of n rows, which "row" makes; a button shows those beyond the first ones. "right" are the columns of numbers.
function table(caption, heads, n, row, right = [], first = 200) {
  const side = (i) => (right.includes(i) ? "number" : null);
  const body = el("tbody");
  const add = (from, to) => {
    for (let k = from; k < to; k += 1) body.append(el("tr", {}, ...row(k).map((value, i) => el("td", { class: side(i) }, cell(value)))));
  };
  add(0, Math.min(n, first));
  const made = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head, i) => el("th", { scope: "col", class: side(i) }, head)))), body));
  if (n <= first) return made;
  const more = el("button", { type: "button", onclick: () => { add(first, n); more.remove(); } }, `Show all ${count(n)}`);
  return el("div", {}, made, more);
}

function pairs(list, entries) {
  list.replaceChildren(...entries.filter(([, value]) => value !== "" && value !== null)
    .map(([name, value, hint]) => el("div", { title: hint }, el("dt", {}, name), el("dd", {}, cell(value)))));
}

// Text of the checkpoint: one direction of its own, so that it cannot turn around what stands beside it.
function own(text, kind = "own") {
  return el("bdi", { class: kind, dir: "ltr" }, text);
}

// A key or a name of a file, which may go on in a new line behind a dot.
function ownKey(text) {
  return el("bdi", { class: "own key", dir: "ltr" }, ...(text.match(/[^._/]+[._/]*|[._/]+/g) ?? []).flatMap((part, i) => (i ? [el("wbr"), part] : [part])));
}
