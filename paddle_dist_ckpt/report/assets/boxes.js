// A tensor's stored shards: the boxes that it is cut in, drawn on one or two of its dimensions.

// The boxes of a layout as pairs of corners, in the layout's order; null where the page does not say them.
function boxesOf(layout) {
  if (layout.cuts !== null) {
    let boxes = [{ low: [], high: [] }];
    layout.cuts.forEach((cuts, d) => {
      const edges = [0, ...cuts, layout.shape[d]];
      boxes = boxes.flatMap(({ low, high }) => edges.slice(1).map((end, i) => ({ low: [...low, edges[i]], high: [...high, end] })));
    });
    return boxes;
  }
  if (!layout.offset.length) return null;
  return layout.offset[0].map((_, i) => {
    const low = layout.offset.map((column) => column[i]);
    return { low, high: low.map((start, d) => start + layout.extent[d][i]) };
  });
}

function boxText(box) {
  return box.low.length ? `[${box.low.map((start, d) => `${start}:${box.high[d]}`).join(", ")}]` : "whole";
}

function shapeText(shape) {
  return shape.length ? shape.join(" × ") : "scalar";
}

// The boxes that are on the chosen slices, those together that look alike on the two dimensions.
function projected(boxes, [down, across], slices) {
  const found = new Map();
  boxes.forEach((box, i) => {
    if (slices.some((at, d) => at !== null && !(box.low[d] <= at && at < box.high[d]))) return;
    const span = (d) => (d === null ? [0, 1] : [box.low[d], box.high[d]]);
    const [y, x] = [span(down), span(across)];
    const key = `${y} ${x}`;
    if (!found.has(key)) found.set(key, { x, y, members: [] });
    found.get(key).members.push(i);
  });
  return [...found.values()];
}

// A picture of a tensor. "holders" are those of its boxes, "say" has the lines that tell of some of the boxes.
function drawRegions(shape, boxes, holders, axes, slices, width, say) {
  const [down, across] = axes;
  const rows = down === null ? 1 : shape[down];
  const columns = across === null ? 1 : shape[across];
  const [left, top, right] = [down === null ? 8 : 58, across === null ? 8 : 24, 20];
  const room = Math.max(120, width - left - right);
  let [w, h] = [room, down === null ? 64 : (room * rows) / columns];
  if (down !== null && h > 380) [w, h] = [Math.max(Math.min(room, 150), (380 * columns) / rows), 380];
  if (across === null) [w, h] = [Math.min(room, 120), 64];
  h = Math.max(h, down === null ? 64 : 96);
  const sx = (x) => left + (x / columns) * w;
  const sy = (y) => top + (y / rows) * h;
  const groups = projected(boxes, axes, slices);
  const who = new Set(groups.flatMap((group) => group.members.map((i) => holders[i])));
  const dims = axes.filter((d) => d !== null);
  const picture = svg("svg", {
    class: "regions", viewBox: `0 0 ${left + w + right} ${top + h + 8}`, width: left + w + right, height: top + h + 8, role: "img",
    "aria-label": `${plural(boxes.length, "shard")} ${BY_RANK ? "of" : "in"} ${plural(who.size, HOLDER_WORD)}, drawn on ${dims.length ? `dimension ${dims.join(" and ")}` : "no dimension"}. The table below has them as text.`,
  });
  for (const group of groups) picture.append(drawGroup(group, holders, sx, sy, say));
  picture.append(...ticks(groups.map((g) => g.x), columns, across, sx, (x) => ({ x, y: top - 7, "text-anchor": "middle" }), 46));
  picture.append(...ticks(groups.map((g) => g.y), rows, down, sy, (y) => ({ x: left - 6, y: y + 4, "text-anchor": "end" }), 15));
  return picture;
}

function drawGroup({ x, y, members }, holders, sx, sy, say) {
  const [x0, x1, y0, y1] = [sx(x[0]), sx(x[1]), sy(y[0]), sy(y[1])];
  const distinct = [...new Set(members.map((i) => holders[i]))];
  const node = svg("g", { class: "region", "data-members": members.join(" ") });
  const bands = distinct.slice(0, 8);
  bands.forEach((holder, k) => {
    const height = (y1 - y0) / bands.length;
    const rect = svg("rect", { x: x0, y: y0 + k * height, width: Math.max(x1 - x0, 0.5), height: Math.max(height, 0.5) });
    rect.style.fill = holderColour(holder);
    node.append(rect);
  });
  if (x1 - x0 > 3 && y1 - y0 > 3) node.append(svg("rect", { class: "edge", x: x0, y: y0, width: x1 - x0, height: y1 - y0 }));
  const name = distinct.length === 1 ? (x1 - x0 > 64 ? `${HOLDER_WORD} ${holderShort(distinct[0])}` : holderShort(distinct[0])) : plural(members.length, "shard");
  if (x1 - x0 > 8 * name.length && y1 - y0 > 15) {
    node.append(svg("text", { x: (x0 + x1) / 2, y: (y0 + y1) / 2 + 4, "text-anchor": "middle" }, name));
  }
  tipOn(node, () => say(members));
  return node;
}

// Numbers at the edges of the boxes, as many as have room.
function ticks(spans, end, dimension, scale, place, gap) {
  if (dimension === null) return [];
  const edges = [...new Set(spans.flat())].sort((a, b) => a - b);
  const shown = [];
  for (const edge of edges) {
    if (edge !== end && (!shown.length || scale(edge) - scale(shown[shown.length - 1]) >= gap)) shown.push(edge);
  }
  while (shown.length > 1 && scale(end) - scale(shown[shown.length - 1]) < gap) shown.pop();
  return [...shown, end].map((edge) => svg("text", { class: "tick", ...place(scale(edge)) }, count(edge)));
}
