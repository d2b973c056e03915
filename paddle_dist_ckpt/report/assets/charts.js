// Balance, element types, timeline.

const MOST_BARS = 40;

// Bars, one below the other; many things as columns side by side. Items have a name, a value, a text and a colour.
function bars(items, what, mean = null) {
  const top = Math.max(most(items.map((item) => item.value)), 1);
  if (items.length > MOST_BARS) return columns(items, what, top, mean);
  return el("ul", { class: "bars", "aria-label": what }, ...items.map((item) => {
    const fill = el("span", { class: "fill" });
    fill.style.width = `${(100 * item.value) / top}%`;
    fill.style.background = item.colour;
    const mark = mean === null ? "" : el("span", { class: "mean" });
    if (mark) mark.style.left = `${(100 * mean) / top}%`;
    return el("li", {}, el("span", { class: "name" }, own(item.name)), el("span", { class: "track", "aria-hidden": "true" }, fill, mark), el("span", { class: "number" }, item.text));
  }));
}

function chartWidth() {
  return Math.max(280, $("balance-chart").clientWidth);
}

function columns(items, what, largest, mean) {
  const [width, height, room] = [chartWidth(), 180, 22];
  const each = Math.max(1, Math.ceil(items.length / (width / 2)));
  const groups = [];
  for (let i = 0; i < items.length; i += each) groups.push(items.slice(i, i + each));
  const step = width / groups.length;
  const picture = svg("svg", { class: "columns", viewBox: `0 0 ${width} ${height + room}`, role: "img", "aria-label": `${what}: ${count(items.length)} columns, the largest ${bytes(largest)}. The table below has them as text.` });
  groups.forEach((group, i) => {
    const top = group.reduce((a, b) => (b.value > a.value ? b : a));
    const h = (top.value / largest) * (height - 10);
    const rect = svg("rect", { x: i * step, y: height - h, width: Math.max(step - (step > 4 ? 1 : 0), 0.8), height: h });
    rect.style.fill = group.length === 1 ? top.colour : "var(--accent)";
    const hit = svg("rect", { x: i * step, y: 0, width: step, height, fill: "transparent" });
    tipOn(hit, () => (group.length === 1 ? [top.name, top.text] : [`${group[0].name} to ${group[group.length - 1].name}`, `most: ${top.name}, ${top.text}`]));
    picture.append(rect, hit);
  });
  if (mean !== null) {
    const y = height - (mean / largest) * (height - 10);
    picture.append(svg("line", { class: "mean", x1: 0, x2: width, y1: y, y2: y }));
  }
  picture.append(svg("text", { class: "tick", x: 0, y: height + 16 }, items[0].name),
    svg("text", { class: "tick", x: width, y: height + 16, "text-anchor": "end" }, items[items.length - 1].name));
  return el("div", { class: "chart" }, picture, details("As a table", () => table(what, [what, "Bytes"], items.length, (i) => [own(items[i].name), items[i].text], [1])));
}

function details(title, make) {
  const node = el("details", {}, el("summary", {}, title));
  node.addEventListener("toggle", () => { if (node.open && node.childElementCount === 1) node.append(make()); });
  return node;
}

function startBalance() {
  const kinds = [];
  if (BY_RANK) kinds.push(["Rank", F.ranks.rank.map((rank, i) => ({ name: `rank ${rank}`, value: F.ranks.nbytes[i], colour: holderColour(i) }))]);
  kinds.push(["File", F.files.name.map((name, i) => ({ name, value: F.files.nbytes[i], colour: holderColour(holderOf(i)) }))]);
  const show = ([word, items]) => {
    for (const item of items) item.text = `${bytes(item.value)}, ${percent(item.value, F.totals.nbytes)}`;
    if (!items.length) return $("balance-says").replaceChildren("There are no data files.");
    const sizes = items.map((item) => item.value);
    const mean = F.totals.nbytes / items.length;
    const over = mean ? `The largest has ${(most(sizes) / mean).toFixed(2)} times the mean of ${bytes(mean)}, the smallest ${(least(sizes) / mean).toFixed(2)} times.` : "";
    $("balance-says").replaceChildren(`${plural(items.length, word.toLowerCase())}, ${bytes(F.totals.nbytes)} of tensors' data. ${items.length > 1 ? over : ""}`);
    return $("balance-chart").replaceChildren(bars(items, `Bytes by ${word.toLowerCase()}`, items.length > 1 ? mean : null));
  };
  $("balance-by").append(...kinds.map((kind, i) => el("label", {}, el("input", { type: "radio", name: "balance", checked: i === 0, onchange: () => show(kind) }), ` by ${kind[0].toLowerCase()}`)));
  show(kinds[0]);
}

function startDtypes() {
  const D = F.dtypes;
  $("dtypes").append(bars(D.name.map((name, i) => ({
    name, value: D.nbytes[i], colour: colour(i),
    text: `${bytes(D.nbytes[i])}, ${percent(D.nbytes[i], F.totals.nbytes)}; ${plural(D.tensors[i], "tensor")}, ${short(D.elements[i])} elements`,
  })), "Bytes by element type"));
}

// -- the timeline: the ranks' clocks need not agree, but all are told the plan at one time, which is its zero

function startTimeline() {
  const T = F.times;
  const [all, before] = [T.phases.map((_, p) => p), T.phases.indexOf("plan")];
  if (!T.rank.length || !all.length) {
    $("timeline").remove();
    return;
  }
  const after = all.filter((p) => p !== before);
  const of = (p, i) => (p < 0 ? 0 : T.milliseconds[p][i]);
  const ends = T.rank.map((_, i) => after.reduce((sum, p) => sum + of(p, i), 0));
  const slowest = ends.indexOf(most(ends));
  const rate = ends[slowest] > 0 ? ` That is ${bytes(F.totals.nbytes / (ends[slowest] / 1000))} a second of all ranks together.` : "";
  const left = T.left_out ? ` The times of ${plural(T.left_out, "more rank")} are not on this page.` : "";
  $("timeline-says").textContent = `What each rank did until it had written its files; the commit follows. Zero is when ranks were told the plan. ` +
    `The last to be done was rank ${T.rank[slowest]}, after ${seconds(ends[slowest])}.${rate}${left}`;
  const legend = el("ul", { class: "legend" }, ...all.map((p) => {
    const mark = el("span", { class: "mark", "aria-hidden": "true" });
    mark.style.background = colour(p);
    return el("li", {}, mark, T.phases[p]);
  }));
  const rows = all.map((p) => {
    const column = T.milliseconds[p];
    const slow = column.indexOf(most(column));
    return [T.phases[p], seconds(least(column)), seconds(column.reduce((a, b) => a + b, 0) / column.length), seconds(column[slow]), T.rank[slow]];
  });
  $("timeline-chart").append(legend, drawTimeline(all, before, after, of, ends),
    table("Phases", ["Phase", "Least", "Mean", "Most", "Slowest rank"], rows.length, (i) => rows[i], [1, 2, 3, 4]),
    details("All ranks as a table", () => table("Times of ranks", ["Rank", ...T.phases], T.rank.length, (i) => [T.rank[i], ...all.map((p) => seconds(of(p, i)))], [0, ...all.map((p) => p + 1)])));
}

function drawTimeline(all, before, after, of, ends) {
  const T = F.times;
  const each = Math.ceil(T.rank.length / 240);
  const lines = [];  // of so many ranks that are together the slowest
  for (let i = 0; i < T.rank.length; i += each) {
    const group = ends.slice(i, i + each);
    lines.push([i + group.indexOf(most(group)), i, i + group.length - 1]);
  }
  const [width, left, row] = [chartWidth(), 76, Math.max(3, Math.min(20, Math.floor(480 / lines.length)))];
  const early = most(T.rank.map((_, i) => of(before, i)));
  const whole = Math.max(early + most(ends), 1);
  const scale = (ms) => left + ((ms + early) / whole) * (width - left - 34);
  const [top, height] = [6, lines.length * row + 6];
  const picture = svg("svg", { class: "timeline", viewBox: `0 0 ${width} ${height + 26}`, role: "img", "aria-label": `Phases of ${plural(T.rank.length, "rank")} over time. The tables below have them as text.` });
  const step = tickStep(whole, Math.max(2, Math.floor(width / 110)));
  for (let at = -Math.floor(early / step) * step; at <= whole - early; at += step) {
    picture.append(svg("line", { class: at === 0 ? "zero" : "grid", x1: scale(at), x2: scale(at), y1: 0, y2: height + 4 }),
      svg("text", { class: "tick", x: scale(at), y: height + 20, "text-anchor": "middle" }, at === 0 ? "0" : at < 0 ? `−${seconds(-at)}` : seconds(at)));
  }
  lines.forEach(([i, first, last], k) => {
    const node = svg("g");
    let at = -of(before, i);
    for (const p of [...(before < 0 ? [] : [before]), ...after]) {
      const rect = svg("rect", { x: scale(at), y: top + k * row + (row > 6 ? 2 : 0), width: Math.max(scale(at + of(p, i)) - scale(at), 0.6), height: Math.max(row - (row > 6 ? 4 : 0.5), 1) });
      rect.style.fill = colour(p);
      node.append(rect);
      at += of(p, i);
    }
    const name = first === last ? `rank ${T.rank[i]}` : `ranks ${T.rank[first]} to ${T.rank[last]}`;
    tipOn(node, () => [name + (first === last ? "" : `; shown is rank ${T.rank[i]}`), ...all.map((p) => `${T.phases[p]}: ${seconds(of(p, i))}`)]);
    if (row >= 12 || k % Math.ceil(14 / row) === 0) node.append(svg("text", { class: "tick", x: left - 8, y: top + k * row + Math.min(row, 14) / 2 + 4, "text-anchor": "end" }, `rank ${T.rank[i]}`));
    picture.append(node);
  });
  return el("div", { class: "chart" }, picture);
}

function tickStep(whole, most) {
  const power = 10 ** Math.floor(Math.log10(whole / most));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => whole / step <= most);
}
