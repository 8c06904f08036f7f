// Cosine similarity of one position's embedding to those of all others.

await (async () => {
  const { positions } = DATA;
  if (!positions.cosine) {
    $("positions-lede").textContent = positions.note;
    $("positions-body").remove();
    return;
  }
  if (positions.fixed) {
    $("positions-lede").textContent =
      "Cosine similarity of one position’s embedding to those of all others. They are fixed: computed from row and column, or from the place in the sequence, and not learnt.";
  }
  $("positions-note").textContent = positions.note;
  const [rows, columns] = positions.grid;
  const triangle = await arrayOf(positions.cosine, Int8Array); // in 1/127; row i has its columns up to i
  const cosine = (i, j) => (j <= i ? triangle[(i * (i + 1)) / 2 + j] : cosine(j, i));
  const n = rows * columns;
  const view = gridView($("position-map"), {
    grid: () => positions.grid,
    draw(context, width, height) {
      heat(context, Array.from({ length: n }, (_, i) => 0.5 + cosine(index(), i) / 254), rows, columns, width, height, SIGNED, 1);
    },
    chosen: show,
    name: () => `Similarity of positions to row ${view.at[0]}, column ${view.at[1]}; the arrow keys choose another`,
  });
  view.at = [Math.floor(rows / 2), Math.floor(columns / 2)];
  const signed = (q) => (q / 127).toFixed(2).replace(/^-(?!0\.00)/, "−").replace("-", "");
  const index = () => view.at[0] * columns + view.at[1];

  function show() {
    view.draw();
    const [row, column] = view.at;
    const to = (r, c) => (r < 0 || c < 0 || r >= rows || c >= columns ? "–" : signed(cosine(index(), r * columns + c)));
    const place = (i) => `row ${Math.floor(i / columns)}, column ${i % columns}`;
    let [sum, most, where, least, far] = [0, -128, 0, 128, 0];
    for (let i = 0; i < n; i++) {
      if (i === index()) continue;
      const q = cosine(index(), i);
      sum += q;
      if (q > most) [most, where] = [q, i];
      if (q < least) [least, far] = [q, i];
    }
    numbers($("position-numbers"), [
      ["Position", `${row}, ${column}`, "row, column"],
      ["Most alike", signed(most), place(where)],
      ["Least alike", signed(least), place(far)],
      ["Left and right", `${to(row, column - 1)}, ${to(row, column + 1)}`, "the neighbours of the row"],
      ["Above and below", `${to(row - 1, column)}, ${to(row + 1, column)}`, "the neighbours of the column"],
      ["Mean", signed(sum / Math.max(1, n - 1)), "over all others"],
    ]);
  }
  legend($("position-legend"), SIGNED, "−1", "1");
  show();
})();
