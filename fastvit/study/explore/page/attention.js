// Rows of attention by layer, head and query, and their rollout.

await (async () => {
  const { attention } = DATA;
  if (!attention.maps) {
    $("attention-lede").textContent = attention.note;
    $("attention-body").remove();
    return;
  }
  $("attention-note").textContent = attention.note;
  const { grid: [rows, columns], prefix, tokens, layers, heads, queries, stride } = attention;

  // Matrices (queries, tokens) of bytes by name: 255 is the largest weight of each row
  const matrices = {};
  for (const [name, { values, most }] of Object.entries(attention.maps)) {
    matrices[name] = { values: await arrayOf(values, Uint8Array), most: await arrayOf(most, Float32Array) };
  }

  const controls = $("attention-controls");
  const layer = slider(controls, "Layer", layers, layers.at(-1), show, (l) => `${l} of 0–${layers.length - 1}`);
  const headStops = ["mean", ...Array(heads).keys()];
  const head = slider(controls, "Head", headStops, "mean", show, (h) => (h === "mean" ? "mean of all" : `${h} of 0–${heads - 1}`));
  const names = [["patch", "the chosen patch"], ...attention.prefix_names.map((name, i) => [i, name])];
  const options = names.map(([value, text]) => make("option", { value }, text));
  const from = field(controls, "Query", make("select", { onchange: show }, ...options));
  from.closest(".field").hidden = names.length === 1;
  // Weights differ by orders of magnitude: square roots make small ones visible
  const scale = choice(controls, "Brightness", [["root", "Root of weight"], ["linear", "Weight"]], show);

  // Queries are in every `stride`-th row and column
  const nearest = (i, count) => stride * Math.max(0, Math.min(Math.round(i / stride), Math.floor((count - 1) / stride)));
  let at = [nearest(Math.floor(rows / 2), rows), nearest(Math.floor(columns / 2), columns)];
  const ofPatch = () => from.value === "patch";
  const where = () => (ofPatch() ? `row ${at[0]}, column ${at[1]}` : attention.prefix_names[from.value]);

  // The weights of all tokens for the query
  function weightsOf(name) {
    const { values, most } = matrices[name];
    const i = queries.indexOf(ofPatch() ? prefix + at[0] * columns + at[1] : Number(from.value));
    return Float32Array.from(values.subarray(i * tokens, (i + 1) * tokens), (q) => (q / 255) * most[i]);
  }

  const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

  function paint(context, name, width, height) {
    const patches = weightsOf(name).subarray(prefix);
    const most = largest(patches) || 1;
    heat(context, patches.map((x) => (scale.value === "root" ? Math.sqrt(x / most) : x / most)), rows, columns, width, height);
  }

  const nameOf = (h) => `${layer.value}.${h}`;
  const view = (id, name, title) => gridView($(id), {
    grid: () => [rows, columns],
    draw(context, width, height) { paint(context, name(), width, height); },
    chosen: choose,
    name: () => `${title()} of the query ${where()}; the arrow keys choose a patch`,
  });
  const views = [
    view("attention-map", () => nameOf(head.value), () => `Attention in layer ${layer.value}`),
    view("rollout-map", () => "rollout", () => "Rollout"),
  ];

  // Choose a patch; from a neighbour of the last one go on to the next query in that direction
  function choose(to) {
    const [down, right] = to.map((i, axis) => i - at[axis]);
    const step = Math.abs(down) + Math.abs(right) === 1 ? stride : 1;
    at = [nearest(at[0] + down * step, rows), nearest(at[1] + right * step, columns)];
    from.value = "patch";
    show();
  }

  const buttons = headStops.slice(1).map((h) => {
    const button = make("button", { type: "button", "aria-label": `Head ${h}` }, make("canvas", { "aria-hidden": "true" }), `${h}`);
    button.addEventListener("click", () => { head.value = head.value === h ? "mean" : h; show(); });
    return button;
  });
  $("attention-heads").append(...buttons);

  function drawHeads() {
    for (const [h, button] of buttons.entries()) {
      button.hidden = !matrices[nameOf(h)];
      button.setAttribute("aria-pressed", head.value === h);
      if (!button.hidden) {
        const [context, width, height] = canvasFor(button.firstChild);
        paint(context, nameOf(h), width, height);
      }
    }
    const none = buttons.every((button) => button.hidden);
    $("attention-heads").hidden = none;
    $("attention-heads").previousElementSibling.textContent = none ? "Of this layer the page has the mean of its heads only" : "Heads of this layer";
  }

  function caption(name, title) {
    const weights = weightsOf(name);
    const most = largest(weights.subarray(prefix));
    const toPrefix = weights.subarray(0, prefix).reduce((a, b) => a + b, 0);
    const towards = prefix ? ` ${percent(toPrefix)} goes to ${attention.prefix_text}.` : "";
    return `${title}, query ${where()}. The brightest patch gets ${percent(most)}.${towards}`;
  }

  function show() {
    if (!matrices[nameOf(head.value)]) head.value = "mean";
    for (const one of views) {
      one.marked = ofPatch();
      one.at = at;
      one.draw();
    }
    drawHeads();
    const title = head.value === "mean" ? "mean of the heads" : `head ${head.value}`;
    $("attention-caption").textContent = caption(nameOf(head.value), `Layer ${layer.value}, ${title}`);
    $("rollout-caption").textContent = caption("rollout", "Rollout");
  }

  legend($("attention-legend"), HEAT, "none", "the most of this picture");
  drawn.push(drawHeads);
  show();
})();
