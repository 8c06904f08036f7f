// Mean attention distance of every head, and CLS after every block.

(() => {
  const { layers } = DATA;
  $("layers-note").textContent = layers.note;
  if (!layers.distance) {
    $("layers-lede").remove();
    $("distance-chart").parentElement.remove();
  }
  if (!layers.cosine) $("evolution-chart").parentElement.remove();
  if (!layers.distance && !layers.cosine) {
    $("layers-body").remove();
    return;
  }
  const pixels = (x) => x.toFixed(1);
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const count = (layers.distance ?? layers.cosine).length;

  // A chart over layers: [svg, x of a layer, y of a value]
  function chart(box, columns, low, high, label) {
    const width = Math.max(260, box.clientWidth);
    const [height, left, right, top, bottom] = [270, 44, 12, 12, 46];
    const x = (layer) => left + 8 + (layer / Math.max(1, columns - 1)) * (width - left - right - 16);
    const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
    const rough = (high - low) / 8;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((s) => s * power >= rough);
    const rows = [];
    for (let k = Math.ceil(low / step); k * step <= high * 1.0001; k++) {
      rows.push([y(k * step), step < 1 ? signed(k * step, 1) : integer(k * step)]);
    }
    const names = [...Array(columns).keys()].map((layer) => [x(layer), layer]);
    const svg = newChart(width, height, label, { left, right, bottom, room: 24 }, rows, names);
    shape(svg, "text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "layer");
    return [svg, x, y];
  }

  function distances() {
    const { distance, uniform } = layers;
    const box = $("distance-chart");
    const means = distance.map(mean);
    const label = `Attention distance by layer: on average ${pixels(means[0])} px in layer 0 and ${pixels(means.at(-1))} px in layer ${count - 1}; uniform attention has ${pixels(uniform)} px`;
    const [svg, x, y] = chart(box, count, 0, Math.max(uniform, ...distance.flat()) * 1.04, label);
    dashed(svg, x(0) - 8, x(Math.max(1, count - 1)) + 8, y(uniform));
    polyline(svg, means.map((value, i) => `${x(i)},${y(value)}`), "sdpa");
    distance.forEach((heads, i) => heads.forEach((value, head) => {
      const dot = shape(svg, "circle", { cx: x(i), cy: y(value), r: 3.5, fill: "var(--sdpa)", "fill-opacity": 0.7 });
      shape(dot, "title", {}, `layer ${i}, head ${head}: ${pixels(value)} px`);
    }));
    box.replaceChildren(svg);
    $("distance-caption").textContent = `Mean attention distance of each head, in pixels. Line: mean of the heads. Dashed: uniform attention, ${pixels(uniform)} px.`;
  }

  function evolution() {
    const { cosine, state } = layers;
    const box = $("evolution-chart");
    const label = `Cosine of ${state} after each block to the last: ${signed(cosine[0])} after block 0, ${signed(cosine.at(-2) ?? 1)} after the last but one`;
    const [svg, x, y] = chart(box, cosine.length, Math.min(0, ...cosine) * 1.04, 1, label);
    polyline(svg, cosine.map((value, i) => `${x(i)},${y(value)}`), "fastvit");
    cosine.forEach((value, i) => {
      const dot = shape(svg, "circle", { cx: x(i), cy: y(value), r: 4, fill: "var(--fastvit)" });
      shape(dot, "title", {}, `after block ${i}: ${signed(value)}`);
    });
    box.replaceChildren(svg);
    $("evolution-caption").textContent = `Cosine of ${state} after each block to its state after the last one.`;
  }

  function table() {
    const columns = [["Layer", (i) => i]];
    if (layers.distance) {
      columns.push(
        ["Distance, px", (i) => pixels(mean(layers.distance[i]))], ["Least", (i) => pixels(Math.min(...layers.distance[i]))],
        ["Most", (i) => pixels(Math.max(...layers.distance[i]))], ["Of uniform", (i) => percent(mean(layers.distance[i]) / layers.uniform)],
      );
    }
    if (layers.cosine) columns.push(["Cosine", (i) => (i < layers.cosine.length ? signed(layers.cosine[i]) : "–")]);
    const rows = [...Array(count).keys()].map((i) => tableRow(columns.map(([, of]) => of(i))));
    $("layers-table").replaceChildren(tableHead(columns.map(([name]) => name)), make("tbody", {}, ...rows));
  }

  if (layers.distance) onWidth($("distance-chart"), distances);
  if (layers.cosine) onWidth($("evolution-chart"), evolution);
  table();
})();
