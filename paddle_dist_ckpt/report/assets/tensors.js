// The list of tensors: search, filters, order; and beside it the tensor that was chosen.

const T = F.tensors;
const PAGE = 100;
const KINDS = ["tensor", "numpy array", "value in a data file"];
const TENSOR_TEXT = T.key.map((key, i) => `${key} ${T.name[i]}`.toLowerCase());
const MOST_BYTES = Math.max(most(T.nbytes), 1);
const CUT_HOLDERS = F.regions.files.map(() => null);
const find = { words: [], dtype: -1, holder: -1, layer: "", by: "nbytes", down: true, shown: PAGE, chosen: -1, found: [] };
const HEADS = [["key", "Key"], ["dtype", "Type"], ["layout", "Shape"], ["nbytes", "Bytes"], ["shards", "Shards"]];

function holdersOf(i) {
  const cut = T.cut[i];
  if (cut < 0) return null;
  CUT_HOLDERS[cut] ??= new Set(F.regions.files[cut].map(holderOf));
  return CUT_HOLDERS[cut];
}

function matches(i) {
  if (find.dtype >= 0 && T.dtype[i] !== find.dtype) return false;
  if (find.layer && T.key[i] !== find.layer && !T.key[i].startsWith(`${find.layer}.`)) return false;
  if (find.holder >= 0 && !holdersOf(i)?.has(find.holder)) return false;
  return find.words.every((word) => TENSOR_TEXT[i].includes(word));
}

function updateList() {
  const elements = (i) => T.nbytes[i] / Math.max(F.dtypes.nbytes[T.dtype[i]] / Math.max(F.dtypes.elements[T.dtype[i]], 1), 1);
  const rank = { key: (i) => i, layout: elements }[find.by] ?? ((i) => T[find.by][i]);
  const sign = find.down ? -1 : 1;
  find.found = T.key.map((_, i) => i).filter(matches).sort((a, b) => sign * (rank(a) - rank(b)) || a - b);
  find.shown = PAGE;
  const total = find.found.reduce((sum, i) => sum + T.nbytes[i], 0);
  const left = F.totals.tensors - T.key.length;
  const says = find.found.length === T.key.length ? plural(T.key.length, "tensor") : `${count(find.found.length)} of ${plural(T.key.length, "tensor")}`;
  $("found").replaceChildren(`${says}, ${bytes(total)}.`, left ? ` Only the ${count(T.key.length)} largest are listed here, of ${count(F.totals.tensors)}.` : "");
  if (find.layer) {
    $("found").append(" In ", ownKey(find.layer), " ", el("button", { type: "button", onclick: () => { find.layer = ""; updateList(); } }, "Show all layers"));
  }
  drawList();
}

function drawList() {
  $("table").tBodies[0].replaceChildren(...find.found.slice(0, find.shown).map((i) => {
    const fill = el("span", { class: "fill", "aria-hidden": "true" });
    fill.style.width = `${(100 * T.nbytes[i]) / MOST_BYTES}%`;
    return el("tr", { "data-tensor": i, class: i === find.chosen ? "chosen" : null, onclick: () => openTensor(i) },
      el("td", {}, el("button", { type: "button", class: "link", "aria-current": i === find.chosen ? "true" : null }, ownKey(T.key[i]))),
      el("td", {}, F.dtypes.name[T.dtype[i]]),
      el("td", { class: "shape" }, shapeText(F.regions.layouts[T.layout[i]].shape)),
      el("td", { class: "number size" }, fill, el("span", {}, bytes(T.nbytes[i]))),
      el("td", { class: "number" }, count(T.shards[i])));
  }));
  $("more").hidden = find.found.length <= find.shown;
  $("more").textContent = `Show more (${count(find.found.length - find.shown)} left)`;
}

function startList() {
  const head = $("table").tHead;
  const order = (by) => {
    find.down = find.by === by ? !find.down : by === "nbytes" || by === "shards" || by === "layout";
    find.by = by;
    heads();
    updateList();
    head.querySelector(`[data-by="${by}"]`).focus();
  };
  const heads = () => head.replaceChildren(el("tr", {}, ...HEADS.map(([by, name]) => el("th", {
    scope: "col", class: by === "nbytes" || by === "shards" ? "number" : null, "aria-sort": find.by !== by ? null : find.down ? "descending" : "ascending",
  }, el("button", { type: "button", "data-by": by, onclick: () => order(by) }, name, el("span", { "aria-hidden": "true" }, find.by !== by ? "" : find.down ? " ▾" : " ▴"))))));
  heads();
  $("search").addEventListener("input", () => {
    find.words = $("search").value.toLowerCase().split(/\s+/).filter((word) => word);
    updateList();
  });
  const options = (select, names) => {
    select.append(el("option", { value: -1 }, "all"), ...names.map((name, i) => el("option", { value: i }, name)));
  };
  options($("pick-dtype"), F.dtypes.name);
  $("pick-dtype").addEventListener("change", () => { find.dtype = Number($("pick-dtype").value); updateList(); });
  $("pick-holder-what").textContent = BY_RANK ? "Written by" : "In file";
  options($("pick-holder"), (BY_RANK ? F.ranks.rank : F.files.name).map((_, i) => holderName(i)));
  $("pick-holder").addEventListener("change", () => { find.holder = Number($("pick-holder").value); updateList(); });
  $("more").addEventListener("click", () => { find.shown += 5 * PAGE; drawList(); });
  $("table").tBodies[0].addEventListener("keydown", (event) => {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const row = next && event.target.closest("tr")[next];
    if (!row) return;
    event.preventDefault();
    row.querySelector("button").focus();
  });
  updateList();
}

function openTensor(i, focus = true) {
  find.chosen = i;
  for (const row of $("table").tBodies[0].rows) {
    const chosen = Number(row.dataset.tensor) === i;
    row.classList.toggle("chosen", chosen);
    chosen ? row.querySelector("button").setAttribute("aria-current", "true") : row.querySelector("button").removeAttribute("aria-current");
  }
  drawDetail(i);
  if (!focus) return;
  const place = $("detail").getBoundingClientRect();
  if (place.top > window.innerHeight - 160 || place.bottom < 80) $("detail").scrollIntoView({ block: "start" });
  $("detail").focus({ preventScroll: true });
}

function openKey(key) {
  const i = T.key.indexOf(key);
  if (i >= 0) openTensor(i);
  else listLayer(key);
}

function listLayer(key) {
  find.layer = key;
  updateList();
  $("tensors").scrollIntoView({ block: "start" });
  $("search").focus({ preventScroll: true });
}

// -- the chosen one

function drawDetail(i) {
  const layout = F.regions.layouts[T.layout[i]];
  const shape = layout.shape;
  const facts = el("dl", { class: "pairs" });
  const elements = shape.reduce((a, b) => a * b, 1);
  pairs(facts, [["Shape", shapeText(shape)], ["Type", F.dtypes.name[T.dtype[i]]], ["Elements", count(elements)], ["Size", exactBytes(T.nbytes[i])],
    ["Kind", KINDS[T.kind[i]]], ["Variable", T.name[i] ? ownKey(T.name[i]) : ""], ["Shards", count(T.shards[i])]]);
  const title = el("h3", { id: "detail-h" }, ownKey(T.key[i]));
  const boxes = T.cut[i] < 0 ? null : boxesOf(layout) ?? [{ low: [], high: [] }];
  const parts = boxes === null ? [el("p", { class: "hint" }, `It is cut in ${plural(T.shards[i], "shard")}, more than this page draws.`)] : drawBoxes(i, shape, boxes, elements);
  $("detail").replaceChildren(title, facts, ...parts);
}

function drawBoxes(i, shape, boxes, elements) {
  const files = F.regions.files[T.cut[i]];
  const holders = files.map(holderOf);
  const item = elements ? T.nbytes[i] / elements : 0;
  const size = (box) => box.low.reduce((product, start, d) => product * (box.high[d] - start), 1) * item;
  const say = (members) => {
    const lines = members.slice(0, 8).map((b) => `${boxText(boxes[b])} ${holderName(holders[b])}, ${bytes(size(boxes[b]))}`);
    return members.length > 8 ? [...lines, `and ${count(members.length - 8)} more`] : lines;
  };
  const row = (b) => [
    el("span", { class: "key" }, boxText(boxes[b])), ...(BY_RANK ? [F.files.rank[files[b]]] : []), bytes(size(boxes[b])),
    ...(T.start[i].length ? [count(T.start[i][b])] : []), own(F.files.name[files[b]], "own key")];
  const heads = ["Box", ...(BY_RANK ? ["Rank"] : []), "Bytes", ...(T.start[i].length ? ["From byte"] : []), "File"];
  const list = table("Shards of this tensor", heads, boxes.length, row, heads.map((head, k) => (["Rank", "From byte", "Bytes"].includes(head) ? k : -1)), 100);
  return elements && shape.length ? [chooser(shape, boxes, holders, say), list] : [list];
}

// The picture, and above it which dimensions it shows, and which slice of the others.
function chooser(shape, boxes, holders, say) {
  const n = shape.length;
  const cuts = shape.map((_, d) => [...new Set(boxes.map((box) => box.low[d]))].sort((a, b) => a - b));
  const likely = shape.map((_, d) => d).sort((a, b) => (cuts[b].length > 1) - (cuts[a].length > 1) || shape[b] - shape[a] || a - b);
  const axes = n === 1 ? [null, 0] : likely.slice(0, 2).sort((a, b) => a - b);
  const slices = shape.map(() => null);
  const frame = el("div", { class: "frame" });
  const controls = el("div", { class: "controls" });
  const draw = () => frame.replaceChildren(drawRegions(shape, boxes, holders, axes, slices, Math.min(Math.max($("detail").clientWidth - 32, 200), 760), say));
  const pick = (name, values, value, change) => {
    const select = el("select", {}, ...values.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
    select.addEventListener("change", () => { change(Number(select.value)); });
    return el("label", {}, name, " ", select);
  };
  const showControls = () => {
    const named = shape.map((length, d) => [d, `${d} (of ${count(length)})`]);
    controls.replaceChildren(
      pick("Down", named, axes[0], (d) => { if (d === axes[1]) axes[1] = axes[0]; axes[0] = d; again(); }),
      pick("Across", named, axes[1], (d) => { if (d === axes[0]) axes[0] = axes[1]; axes[1] = d; again(); }),
      ...shape.map((_, d) => d).filter((d) => !axes.includes(d) && cuts[d].length > 1).map((d) =>
        pick(`Dimension ${d}`, [[-1, "all"], ...cuts[d].map((at) => [at, `from ${count(at)}`])], slices[d] ?? -1, (at) => { slices[d] = at < 0 ? null : at; draw(); })));
  };
  const again = () => {
    axes.forEach((d) => { slices[d] = null; });
    showControls();
    draw();
  };
  if (n > 2) showControls();
  draw();
  return el("div", {}, n > 2 ? controls : "", frame);
}
