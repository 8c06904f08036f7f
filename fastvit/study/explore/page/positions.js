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
  const cosine = (i, j) => (j <= i ? triangle[(i * (i + 1)) / 2 + j] / 127 : cosine(j, i));
  const n = rows * columns;
  const view = gridView($("position-map"), {
    grid: () => positions.grid,
    draw(context, width, height) {
      heat(context, Array.from({ length: n }, (_, i) => 0.5 + cosine(index(), i) / 2), rows, columns, width, height, SIGNED, 1);
    },
    chosen: show,
    name: () => `Similarity of positions to row ${view.at[0]}, column ${view.at[1]}; the arrow keys choose another`,
  });
  const index = () => view.at[0] * columns + view.at[1];

  function show() {
    view.draw();
    const [row, column] = view.at;
    const to = (r, c) => (r < 0 || c < 0 || r >= rows || c >= columns ? "–" : signed(cosine(index(), r * columns + c)));
    const place = (i) => `row ${Math.floor(i / columns)}, column ${i % columns}`;
    const others = [...Array(n).keys()].filter((i) => i !== index()).map((i) => [cosine(index(), i), i]);
    const [most, nearest] = others.reduce((a, b) => (b[0] > a[0] ? b : a));
    const [least, farthest] = others.reduce((a, b) => (b[0] < a[0] ? b : a));
    const mean = others.reduce((sum, [q]) => sum + q, 0) / others.length;
    numbers($("position-numbers"), [
      ["Position", `${row}, ${column}`, "row, column"],
      ["Most alike", signed(most), place(nearest)],
      ["Least alike", signed(least), place(farthest)],
      ["Left and right", `${to(row, column - 1)}, ${to(row, column + 1)}`, "the neighbours of the row"],
      ["Above and below", `${to(row - 1, column)}, ${to(row + 1, column)}`, "the neighbours of the column"],
      ["Mean", signed(mean), "over all others"],
    ]);
  }
  legend($("position-legend"), SIGNED, "−1", "1");
  show();
})();
