// Rows of attention by layer, head and query, and their rollout.

await (async () => {
  const { attention } = DATA;
  if (!attention.maps) {
    $("attention-lede").textContent = attention.note;
    $("attention-body").remove();
    return;
  }
  $("attention-note").textContent = attention.note;
  const { grid: [rows, columns], prefix, tokens, layers, heads, queries } = attention;
  const rowOf = new Map(queries.map((token, i) => [token, i]));

  // A matrix (queries, tokens) of bytes: 255 is the largest weight of each row
  const unpacked = async ([name, { values, most }]) => [name, { values: await arrayOf(values, Uint8Array), most: await arrayOf(most, Float32Array) }];
  const matrices = new Map(await Promise.all(Object.entries(attention.maps).map(unpacked)));
  const matrix = (name) => matrices.get(name);
  const nameOf = (layer, head) => `${layer}.${head}`;

  // The weights of a query: of all tokens, and the largest of patches
  function row(name, token) {
    const { values, most } = matrix(name);
    const at = rowOf.get(token);
    return Float32Array.from(values.subarray(at * tokens, (at + 1) * tokens), (q) => (q / 255) * most[at]);
  }

  const layer = slider($("attention-controls"), "Layer", layers, layers.at(-1), changed, (l) => `${l} of 0–${layers.length - 1}`);
  const headStops = ["mean", ...Array(heads).keys()];
  const head = slider($("attention-controls"), "Head", headStops, "mean", changed, (h) => (h === "mean" ? "mean of all" : `${h} of 0–${heads - 1}`));
  const names = [["patch", "the chosen patch"], ...attention.prefix_names.map((name, i) => [String(i), name])];
  const from = select($("attention-controls"), "Query", names, "patch", show);
  from.closest(".field").hidden = attention.prefix_names.length === 0;
  // Weights differ by orders of magnitude: square roots make small ones visible
  const scale = choice($("attention-controls"), "Brightness", [["root", "Root of weight"], ["linear", "Weight"]], "root", show);

  let at = [Math.floor(rows / 2), Math.floor(columns / 2)];
  // The token with rows that is nearest to the chosen patch
  function query() {
    if (from.value !== "patch") return Number(from.value);
    const wanted = prefix + at[0] * columns + at[1];
    if (rowOf.has(wanted)) return wanted;
    let [best, least] = [queries.at(-1), Infinity];
    for (const token of queries) {
      const [r, c] = place(token);
      const distance = (r - at[0]) ** 2 + (c - at[1]) ** 2;
      if (token >= prefix && distance < least) [best, least] = [token, distance];
    }
    return best;
  }
  const place = (token) => [Math.floor((token - prefix) / columns), (token - prefix) % columns];

  function paint(context, name, width, height) {
    const patches = row(name, query()).subarray(prefix);
    const most = patches.reduce((a, b) => Math.max(a, b), 0) || 1;
    heat(context, patches.map((x) => (scale.value === "root" ? Math.sqrt(x / most) : x / most)), rows, columns, width, height);
    return [patches, most];
  }

  const chosenHead = () => (matrix(nameOf(layer.value, head.value)) ? head.value : "mean");
  const where = () => (query() < prefix ? attention.prefix_names[query()] : `row ${place(query())[0]}, column ${place(query())[1]}`);
  const view = (id, name, title) => gridView($(id), {
    grid: () => [rows, columns],
    draw(context, width, height) { paint(context, name(), width, height); },
    chosen(to) { step(to); from.value = "patch"; show(); },
    name: () => `${title()} of the query ${where()}; the arrow keys choose a patch`,
  });
  const views = [
    view("attention-map", () => nameOf(layer.value, chosenHead()), () => `Attention in layer ${layer.value}`),
    view("rollout-map", () => "rollout", () => "Rollout"),
  ];

  // Go to the next query with rows in that direction
  function step([row, column]) {
    const stride = attention.stride;
    if (Math.abs(row - at[0]) + Math.abs(column - at[1]) === 1) {
      row = at[0] + (row - at[0]) * stride;
      column = at[1] + (column - at[1]) * stride;
    }
    at = [Math.min(rows - 1, Math.max(0, row)), Math.min(columns - 1, Math.max(0, column))];
    if (stride > 1) at = place(query());
  }

  const buttons = headStops.slice(1).map((h) => {
    const button = make("button", { type: "button" }, make("canvas", { "aria-hidden": "true" }), `${h}`);
    button.setAttribute("aria-label", `Head ${h}`);
    button.addEventListener("click", () => { head.value = head.value === h ? "mean" : h; changed(); });
    return button;
  });
  $("attention-heads").append(...buttons);

  function drawHeads() {
    for (const [h, button] of buttons.entries()) {
      const name = nameOf(layer.value, h);
      button.hidden = !matrix(name);
      button.setAttribute("aria-pressed", head.value === h);
      if (button.hidden) continue;
      const [context, width, height] = canvasFor(button.firstChild, DATA.picture.height / DATA.picture.width);
      paint(context, name, width, height);
    }
    const none = buttons.every((button) => button.hidden);
    $("attention-heads").dataset.none = none;
    $("attention-heads").hidden = none;
    $("attention-heads").previousElementSibling.textContent = none ? "Of this layer the page has the mean of its heads only" : "Heads of this layer";
  }

  function caption(name, title) {
    const weights = row(name, query());
    const patches = weights.subarray(prefix);
    const most = patches.reduce((a, b) => Math.max(a, b), 0);
    const toPrefix = weights.subarray(0, prefix).reduce((a, b) => a + b, 0);
    const towards = prefix ? ` ${percent(toPrefix)} goes to ${attention.prefix_text}.` : "";
    return `${title}, query ${where()}. The brightest patch gets ${percent(most)}.${towards}`;
  }

  function show() {
    for (const one of views) {
      one.marked = from.value === "patch";
      one.at = from.value === "patch" && query() >= prefix ? place(query()) : at;
      one.draw();
    }
    drawHeads();
    const h = chosenHead();
    $("attention-caption").textContent = caption(nameOf(layer.value, h), `Layer ${layer.value}, ${h === "mean" ? "mean of the heads" : `head ${h}`}`);
    $("rollout-caption").textContent = caption("rollout", "Rollout");
  }
  function changed() {
    if (head.value !== "mean" && !matrix(nameOf(layer.value, head.value))) head.value = "mean";
    show();
  }

  legend($("attention-legend"), HEAT, "none", "the most of this picture");
  drawn.push(drawHeads);
  show();
})();
