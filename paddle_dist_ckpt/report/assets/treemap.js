// Bytes by layer: a treemap of buttons, a few levels deep, into which one can go.

const L = F.layers;
const MOST_CELLS = 1500;
const MOST_HUES = 12;  // more would tell nothing
const LAYER_CHILDREN = L.parent.map(() => []);
L.parent.forEach((parent, i) => { if (parent >= 0) LAYER_CHILDREN[parent].push(i); });

// Rectangles in the proportion of sizes, as square as may be (Bruls, Huizing, van Wijk 2000). Sizes descend.
function squarified(sizes, x, y, w, h) {
  const total = sizes.reduce((a, b) => a + b, 0);
  const areas = sizes.map((size) => (total ? (size / total) * w * h : 0));
  const places = [];
  let start = 0;
  while (start < areas.length && areas[start] > 0) {
    const side = Math.min(w, h);
    let [stop, sum, worst] = [start, 0, Infinity];
    while (stop < areas.length) {
      const more = sum + areas[stop];
      const thick = more / side;
      const ratio = Math.max(areas[start] / thick / thick, (thick * thick) / Math.max(areas[stop], 1e-9));
      if (ratio > worst) break;
      [worst, sum, stop] = [ratio, more, stop + 1];
    }
    const thick = sum / side;
    let along = w >= h ? y : x;
    for (; start < stop; start += 1) {
      const length = areas[start] / thick;
      places.push(w >= h ? [x, along, thick, length] : [along, y, length, thick]);
      along += length;
    }
    if (w >= h) [x, w] = [x + thick, Math.max(w - thick, 1e-6)];
    else [y, h] = [y + thick, Math.max(h - thick, 1e-6)];
  }
  while (places.length < areas.length) places.push([x, y, 0, 0]);
  return places;
}

function layerText(i) {
  const many = L.tensors[i] === 1 ? "" : `, ${plural(L.tensors[i], "tensor")}`;
  return `${L.name[i]}: ${bytes(L.nbytes[i])}${many}, ${percent(L.nbytes[i], L.nbytes[0])} of all`;
}

// Draws one layer and what is in it; "choose" is called with the number of the one that a person chooses.
function drawTreemap(box, current, choose) {
  const inside = LAYER_CHILDREN[current].length ? LAYER_CHILDREN[current] : [current];
  const nodes = [];
  let level = [{ inside, hueOf: hue, x: 0, y: 0, w: box.clientWidth, h: box.clientHeight }];
  for (let depth = 0; depth < 4 && level.length; depth += 1) {
    const cells = level.flatMap((part) => cellsOf(part, depth ? 5 : 1));
    if (depth && nodes.length + cells.length > MOST_CELLS) break;
    level = [];
    for (const { i, hueAt, place, alone } of cells) {
      const [x, y, w, h] = place;
      const nested = LAYER_CHILDREN[i].length > 0 && depth < 3 && w > 64 && h > 52;
      nodes.push(layerButton(i, hueAt, depth, place, nested, choose));
      if (nested) level.push({ inside: LAYER_CHILDREN[i], hueOf: alone ? hue : () => hueAt, x: x + 3, y: y + 21, w: w - 7, h: h - 25 });
    }
  }
  box.replaceChildren(...nodes);
}

// The layers that stand in a place together, each with a place of its own, if they are large enough to be seen.
function cellsOf({ inside, hueOf, x, y, w, h }, least) {
  const places = squarified(inside.map((i) => L.nbytes[i]), x, y, w, h);
  return inside.map((i, k) => ({ i, hueAt: inside.length > MOST_HUES ? hueOf(0) : hueOf(k), place: places[k], alone: inside.length === 1 }))
    .filter(({ place }) => place[2] >= least && place[3] >= least);
}

function layerButton(i, hueAt, depth, [x, y, w, h], nested, choose) {
  const dead = L.key[i] === "" && !LAYER_CHILDREN[i].length;
  const node = el("button", {
    type: "button", class: w > 34 && h > 16 ? "layer" : "layer tiny", "aria-label": layerText(i), "aria-disabled": dead ? "true" : null,
    tabindex: w < 18 || h < 12 ? -1 : null, onclick: () => { if (!dead) choose(i); },
  });
  Object.assign(node.style, { left: `${x}px`, top: `${y}px`, width: `${Math.max(w - 1, 1)}px`, height: `${Math.max(h - 1, 1)}px` });
  node.style.setProperty("--hue", hueAt);
  node.style.setProperty("--depth", depth);
  if (w > 34 && h > 16) node.append(el("span", {}, own(L.name[i]), " ", el("small", { class: !nested && h > 36 ? "below" : null }, bytes(L.nbytes[i]))));
  tipOn(node, () => [L.key[i] || L.name[i], layerText(i)]);
  return node;
}

function startTreemap(openTensor, listLayer) {
  const box = $("treemap");
  let current = 0;
  const show = (i, focus) => {
    current = i;
    const trail = [];
    for (let node = i; node >= 0; node = L.parent[node]) trail.unshift(node);
    $("crumbs").replaceChildren(...trail.flatMap((node, k) => [
      k ? el("span", { "aria-hidden": "true" }, "›") : "",
      el("button", { type: "button", "aria-current": node === i ? "true" : null, onclick: () => show(node, true) }, own(L.name[node]), ` ${bytes(L.nbytes[node])}`),
    ]).filter((node) => node !== ""));
    drawTreemap(box, i, choose);
    if (focus) $("crumbs").lastChild.focus();
  };
  const choose = (i) => {
    if (LAYER_CHILDREN[i].length) show(i, true);
    else openTensor(L.key[i]);
  };
  $("layer-list").addEventListener("click", () => {
    let node = current;
    while (node > 0 && L.key[node] === "") node = L.parent[node];
    listLayer(L.key[node]);
  });
  show(0, false);
  let width = box.clientWidth;
  new ResizeObserver(() => {
    if (box.clientWidth !== width) {
      width = box.clientWidth;
      drawTreemap(box, current, choose);
    }
  }).observe(box);
}
