// The planned memory of a step: three providers side by side, and over image sizes.

(() => {
  const { memory } = DATA;
  if (!memory.plan) {
    $("memory-body").replaceChildren(make("p", { className: "note" }, memory.note));
    return;
  }
  const GIB = 2 ** 30;
  const NAMES = { eager: "Eager", sdpa: "SDPA", fastvit: "fastvit" };
  const PARTS = {
    weights: "Weights", gradients: "Gradients", optimizer: "Optimizer state", inputs: "Images", saved: "Saved activations",
    attention: "Attention matrices", temporaries: "Temporaries",
  };
  const row = $("memory-controls");
  const controls = {
    size: slider(row, "Image size", memory.sizes, memory.start.size, show, (s) => `${s} px`),
    patch: slider(row, "Patch size", memory.patches, memory.start.patch, show, (p) => `${p} px`),
    batch: slider(row, "Batch", memory.batches, memory.start.batch, show),
    budget: slider(row, "Budget", memory.budgets, 24, show, (b) => `${b} GiB`),
    mode: choice(row, "Step", memory.modes.map((m) => [m, { train: "Training", infer: "Inference" }[m]]), show),
    dtype: choice(row, "Type", memory.dtypes.map((d) => [d, d]), show),
  };

  // Bytes of every part
  const planned = (provider, image = controls.size.value) => (
    memory.plan[provider][controls.mode.value][controls.dtype.value][`${image}x${controls.patch.value}`][controls.batch.value]
  );
  const dtype = () => ({ bfloat16: "bf16", float32: "fp32" })[controls.dtype.value];
  const total = (parts) => parts.reduce((sum, x) => sum + x, 0);
  const unit = (most) => (most >= GIB / 4 ? [GIB, "GiB"] : [2 ** 20, "MiB"]);
  const power = (bytes) => (bytes >= 1024 * GIB ? `${bytes / GIB / 1024} TiB` : bytes >= GIB ? `${bytes / GIB} GiB` : `${bytes / 2 ** 20} MiB`);
  const rounded = (x) => (x === 0 ? "–" : x < 0.005 ? "< 0.01" : x < 1000 ? x.toFixed(x < 100 ? 2 : 1) : integer(x));

  function show() {
    const plans = memory.providers.map((provider) => [provider, planned(provider)]);
    const totals = plans.map(([, parts]) => total(parts));
    const [scale, name] = unit(Math.max(...totals));
    bars(plans, totals, scale, name);
    table(plans, totals, scale, name);
    chart();
    const budget = controls.budget.value * GIB;
    const fits = memory.providers.filter((_, i) => totals[i] <= budget).map((p) => NAMES[p]);
    const verb = fits.length === totals.length ? "All of them fit" : fits.length ? `${fits.join(" and ")} ${fits.length > 1 ? "fit" : "fits"}` : "None of them fits";
    const tokens = memory.tokens[`${controls.size.value}x${controls.patch.value}`];
    $("memory-sum").textContent = `${integer(tokens)} tokens an image, ${controls.batch.value} image${controls.batch.value > 1 ? "s" : ""} a step. ${verb} into ${controls.budget.value} GiB.`;
    $("memory-command").textContent = `fastvit memory ${DATA.model.quoted} --image-size ${controls.size.value} --patch-size ${controls.patch.value} --batch ${controls.batch.value} --mode ${controls.mode.value} --dtype ${dtype()} --device ${memory.device}`;
    recomputation(totals[memory.providers.indexOf("fastvit")] > budget);
  }

  // What the blocks of the fused step recompute where it is over the budget, which the page has for the model's own sizes
  function recomputation(over) {
    const box = $("memory-fit");
    box.hidden = !over || !memory.fit || controls.mode.value !== "train";
    if (box.hidden) return;
    const { size, patch } = memory.start;
    const [batch, budget, own] = [controls.batch.value, controls.budget.value, controls.patch.value === patch];
    const found = own && controls.size.value === size ? memory.fit[controls.dtype.value][batch]?.[budget] : undefined;
    let words = `What the blocks recompute so that fastvit’s step fits is on this page for ${size} px, patches of ${patch} px and two images or more.`;
    if (found) words = `fastvit’s step fits into ${budget} GiB if it recomputes: ${found.words}. Its planned peak is then ${(found.peak / GIB).toFixed(2)} GiB, and ${percent(found.recomputed)} of the step’s FLOPs are computed again.`;
    if (found === null) words = `fastvit’s step does not fit into ${budget} GiB, whatever its blocks recompute. Smaller batches whose gradients are accumulated may.`;
    const command = `fastvit fit ${DATA.model.quoted} --budget ${budget}GiB --batch ${batch} --image-size ${controls.size.value} --dtype ${dtype()} --device ${memory.device}`;
    box.replaceChildren(words, ...(own ? [" Planned for this step by itself: ", make("code", {}, command)] : []));
  }

  function bars(plans, totals, scale, name) {
    const budget = controls.budget.value * GIB;
    const most = Math.max(...totals);
    const wide = Math.max(most, budget <= 2 * most ? budget : 0) * 1.02; // a distant budget is off the scale
    const far = budget > wide;
    const limit = `left: ${(100 * budget) / wide}%`;
    const children = plans.flatMap(([provider, parts], i) => {
      const label = make("b", { className: provider }, `${NAMES[provider]} ${rounded(totals[i] / scale)} ${name}`);
      const pieces = parts.map((bytes, k) => make("i", {
        title: `${PARTS[memory.parts[k]]}: ${rounded(bytes / scale)} ${name}`,
        style: `width: ${(100 * bytes) / wide}%; --colour: var(--${memory.parts[k]})`,
      }));
      return [label, make("div", { className: "bar" }, ...pieces, ...(far ? [] : [make("div", { className: "limit", style: limit })]))];
    });
    const text = far
      ? make("span", { style: "right: 0; transform: none" }, `the budget of ${controls.budget.value} GiB is far to the right`)
      : make("span", { style: `left: ${Math.min(94, Math.max(6, (100 * budget) / wide))}%` }, `${controls.budget.value} GiB`);
    $("memory-bars").replaceChildren(...children, make("span"), make("div", { className: "axis" }, text));
  }

  function table(plans, totals, scale, name) {
    const names = plans.map(([provider]) => make("th", { scope: "col", className: provider }, NAMES[provider]));
    const row = (part, heading, values) => tableRow([heading, ...values.map((bytes, i) => (
      make("td", { "data-provider": plans[i][0], "data-bytes": bytes }, rounded(bytes / scale))
    ))], { "data-part": part });
    const rows = memory.parts.map((part, k) => {
      const swatch = make("span", { className: "swatch", style: `--colour: var(--${part})` });
      return row(part, [swatch, PARTS[part]], plans.map(([, parts]) => parts[k]));
    });
    const foot = make("tfoot", {}, row("peak", "Peak", totals));
    $("memory-table").replaceChildren(tableHead([`In ${name}`, ...names]), make("tbody", {}, ...rows), foot);
  }

  // ---- peak against image size, both logarithmic ----

  function chart() {
    const box = $("memory-chart");
    const width = Math.max(280, box.clientWidth);
    const [height, left, right, top, bottom] = [Math.min(300, Math.max(230, width * 0.34)), 62, 62, 12, 28];
    const { sizes } = memory;
    const lines = memory.providers.map((p) => [p, sizes.map((s) => total(planned(p, s)))]);
    const values = lines.flatMap(([, line]) => line);
    const budget = controls.budget.value * GIB;
    const low = 2 ** Math.floor(Math.log2(Math.min(...values)));
    const high = 2 ** Math.ceil(Math.log2(Math.max(...values, budget) * 1.01));
    const x = (s) => left + (Math.log(s / sizes[0]) / Math.log(sizes.at(-1) / sizes[0] || 2)) * (width - left - right);
    const y = (bytes) => height - bottom - (Math.log(bytes / low) / Math.log(high / low)) * (height - top - bottom);
    const label = lines.map(([p, line]) => `${NAMES[p]} from ${rounded(line[0] / GIB)} to ${rounded(line.at(-1) / GIB)} GiB`).join("; ");
    const steps = Math.log2(high / low);
    const rows = [];
    for (let k = 0; k <= steps; k += Math.ceil(steps / 6)) rows.push([y(low * 2 ** k), power(low * 2 ** k)]);
    const columns = sizes.map((s) => [x(s), s]);
    const svg = newChart(width, height, `Peak against image size: ${label}`, { left, right, bottom, room: 38 }, rows, columns);
    shape(svg, "line", { x1: x(controls.size.value), x2: x(controls.size.value), y1: top, y2: height - bottom, stroke: "var(--soft)", "stroke-opacity": 0.6 });
    dashed(svg, left, width - right, y(budget));
    const labels = [];
    for (const [provider, line] of lines) {
      polyline(svg, line.map((bytes, i) => `${x(sizes[i])},${y(bytes)}`), provider);
      line.forEach((bytes, i) => shape(svg, "circle", { cx: x(sizes[i]), cy: y(bytes), r: sizes[i] === controls.size.value ? 5 : 3, fill: `var(--${provider})` }));
      labels.push([y(line.at(-1)), provider]);
    }
    labels.sort((a, b) => a[0] - b[0]);
    labels.forEach(([at, provider], i) => {
      if (i) labels[i][0] = Math.max(at, labels[i - 1][0] + 16); // move names apart that would overlap
      shape(svg, "text", { x: width - right + 10, y: labels[i][0] + 4, style: `fill: var(--${provider}); font-weight: 600` }, NAMES[provider]);
    });
    box.replaceChildren(svg);
    $("memory-caption").textContent = `Peak against image size, both axes logarithmic, at this patch, batch, step and type; the dashed line is the budget. ${memory.note}`;
  }

  onWidth($("memory-chart"), chart);
  show();
})();
