// Puts the page together.

const O = F.origin;

function startOverview() {
  document.title = `Checkpoint ${O.unique_id}`;
  $("title").textContent = `Checkpoint ${O.unique_id}`;
  $("location").replaceChildren(own(O.location));
  const S = F.totals;
  const native = O.format === "native";
  pairs($("tiles"), [
    ["Tensors' data", bytes(S.nbytes - S.stored_value_bytes), `${count(S.nbytes - S.stored_value_bytes)} bytes`],
    ["Tensors", count(S.tensors - S.stored_values)],
    ["Elements", short(S.elements - S.stored_value_bytes), count(S.elements - S.stored_value_bytes)],
    ["Stored shards", count(S.shards)],
    ["Values", S.values ? count(S.values) : ""],
    ["Files", count(F.files.name.length), exactBytes(S.file_bytes)],
    ["Ranks that saved", O.world_size > 0 ? count(O.world_size) : ""],
  ]);
  pairs($("origin"), [
    ["Format", native ? "paddle_dist_ckpt" : own(O.format)], ["Saved", own(O.created)], ["Written by", own(O.library)], ["Paddle", own(O.paddle_version)],
    ["unique_id", String(O.unique_id)], ["Save id", native ? ownKey(O.save_id) : ""], ["On disk", bytes(S.file_bytes)],
    ["A checksum for each", native ? bytes(O.block_bytes) : ""],
  ].filter(([, value]) => !(value instanceof Node) || value.textContent));
  const wrong = F.files.state.filter((state) => state).length;
  if (wrong) $("warnings").append(el("p", { class: "warning" }, `${plural(wrong, "file")} of ${count(F.files.name.length)} ${wrong === 1 ? "is" : "are"} missing or not as large as written. The table of files tells which.`));
  const unread = F.unread.key.length + F.unread.left_out;
  if (unread) $("warnings").append(el("p", { class: "warning" }, `${plural(unread, "key")} of this checkpoint cannot be read. A table below the values tells why.`));
}

function startValues() {
  const V = F.values;
  const rows = (columns) => columns.key.map((key, i) => [ownKey(key), own(columns.type[i]), own(columns.text[i], "own value")]);
  const left = (columns) => (columns.left_out ? ` ${plural(columns.left_out, "more value")} ${columns.left_out === 1 ? "is" : "are"} not on this page.` : "");
  const all = rows(V);
  const text = V.key.map((key, i) => `${key} ${V.text[i]}`.toLowerCase());
  const show = () => {
    const words = $("value-search").value.toLowerCase().split(/\s+/).filter((word) => word);
    const found = all.filter((_, i) => words.every((word) => text[i].includes(word)));
    $("values-found").textContent = `${words.length ? `${count(found.length)} of ` : ""}${plural(all.length, "value")}.${left(V)}`;
    $("values-table").replaceChildren(found.length ? table("Values", ["Key", "Type", "Value"], found.length, (i) => found[i]) : "");
  };
  $("value-search").addEventListener("input", show);
  show();
  const user = rows(F.user);
  if (user.length) $("user-table").append(table("User metadata", ["Key", "Type", "Value"], user.length, (i) => user[i]), left(F.user));
  else $("user-h").remove();
  const unread = rows(F.unread);
  if (unread.length) $("unread-table").append(table("Not read", ["Key", "Why"], unread.length, (i) => [unread[i][0], unread[i][2]]), left(F.unread));
  else $("unread-h").remove();
}

function startFiles() {
  const C = F.files;
  const odd = C.state.some((state) => state);
  $("files-table").append(table("Files", ["Name", ...(BY_RANK ? ["Rank"] : []), "Shards", "Data", "Size", ...(odd ? ["State"] : [])],
    C.name.length, (i) => [ownKey(C.name[i]), ...(BY_RANK ? [C.rank[i]] : []), count(C.shards[i]), bytes(C.nbytes[i]), bytes(C.size[i]), ...(odd ? [own(C.state[i])] : [])],
    BY_RANK ? [1, 2, 3, 4] : [1, 2, 3], 100));
}

startOverview();
startList();
startTreemap(openKey, listLayer);
startDtypes();
startBalance();
startTimeline();
startValues();
startFiles();
if (find.found.length) openTensor(find.found[0], false);
else $("detail").remove();
$("nav").append(...[...document.querySelectorAll("main > section")].map((section) => el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
$("made").textContent = "Made by paddle-dist-ckpt report. Sizes are in powers of 1024.";
let detailWidth = $("detail")?.clientWidth;
window.addEventListener("resize", () => {
  const width = $("detail")?.clientWidth;
  if (width === detailWidth || find.chosen < 0) return;
  detailWidth = width;
  drawDetail(find.chosen);
});
document.documentElement.dataset.drawn = String(Math.round(performance.now()));
