// A picture under its grid of patches, and the embedding calculator.

(() => {
  const { picture, model } = DATA;
  let patch = model.patch_size[0];
  const grid = () => [Math.floor(picture.height / patch), Math.floor(picture.width / patch)];
  const context = $("patch-zoom").getContext("2d");

  const view = gridView($("patch-grid"), {
    grid,
    draw(paint, width, height) {
      paint.drawImage(photograph, 0, 0, width, height);
      const [rows, columns] = grid();
      paint.strokeStyle = "rgb(255 255 255 / .62)";
      paint.lineWidth = rows > 60 ? 0.5 : 1;
      paint.beginPath();
      for (let i = 1; i < columns; i++) { paint.moveTo((i * width) / columns, 0); paint.lineTo((i * width) / columns, height); }
      for (let i = 1; i < rows; i++) { paint.moveTo(0, (i * height) / rows); paint.lineTo(width, (i * height) / rows); }
      paint.stroke();
    },
    chosen: show,
    name: () => `The picture under a grid of ${grid().join(" by ")} patches; row ${view.at[0]}, column ${view.at[1]} is chosen`,
  });

  function show() {
    view.draw();
    const [rows, columns] = grid();
    const tokens = rows * columns + model.prefix;
    numbers($("patch-numbers"), [
      ["Patches", integer(rows * columns), `${rows} × ${columns}`],
      ["Tokens", integer(tokens), model.prefix ? `with ${model.prefix} prefix token${model.prefix > 1 ? "s" : ""}` : "no prefix tokens"],
      ["Scores of a head", short(tokens * tokens), `${integer(tokens)}²`],
      ["Numbers of a patch", integer(model.channels * patch * patch), `${model.channels} × ${patch} × ${patch}`],
    ]);
    const [row, column] = view.at;
    const zoom = $("patch-zoom");
    zoom.width = zoom.height = 208;
    context.imageSmoothingEnabled = false;
    const [sx, sy] = [photograph.naturalWidth / picture.width, photograph.naturalHeight / picture.height];
    if (photograph.naturalWidth) context.drawImage(photograph, column * patch * sx, row * patch * sy, patch * sx, patch * sy, 0, 0, 208, 208);
    const token = model.prefix + row * columns + column;
    $("patch-caption").textContent = `Row ${row}, column ${column}: token ${token} of the sequence.`;
    zoom.setAttribute("aria-label", `The patch in row ${row}, column ${column}, enlarged`);
  }

  slider($("patch-controls"), "Patch size", picture.patch_stops, patch, (stop) => {
    const [row, column] = view.at.map((i) => (i + 0.5) * patch); // the same place in the picture
    patch = stop;
    view.at = [Math.floor(row / patch), Math.floor(column / patch)];
    show();
  }, (stop) => `${stop} × ${stop}${stop === model.patch_size[0] ? ", the model’s" : ""}`);
  drawn.push(show);
  show();
})();

(() => {
  const { model } = DATA;
  const form = $("embedding-form");
  const start = [["Image size", model.image_size[0]], ["Patch size P", model.patch_size[0]], ["Width D", model.width], ["Prefix tokens", model.prefix]];
  const inputs = start.map(([label, value], i) => number(form, label, value, show, i === 3 ? 0 : 1));
  $("channels").textContent = model.channels;

  function show() {
    const [image, patch, width, prefix] = inputs.map((input) => input.valueAsNumber);
    const note = $("embedding-note");
    inputs.forEach((input) => input.setAttribute("aria-invalid", !input.checkValidity() || Number.isNaN(input.valueAsNumber)));
    note.className = "note wrong";
    if (inputs.some((input) => input.getAttribute("aria-invalid") === "true")) {
      note.textContent = "Sizes are whole numbers.";
      return;
    }
    if (image % patch) {
      inputs[1].setAttribute("aria-invalid", true);
      const near = Math.max(1, Math.round(image / patch)) * patch;
      note.textContent = `A patch of ${patch} does not divide an image of ${image}; ${near} would do.`;
      return;
    }
    note.className = "note";
    note.textContent = `Parameters: ${model.channels} × P² × D weights${model.bias ? " and D biases" : "; this model has no bias here"}. FLOPs: two for each multiply-add, of one square image.`;
    const numbersOfPatch = model.channels * patch * patch;
    const patches = (image / patch) ** 2;
    const flops = 2 * patches * numbersOfPatch * width;
    const parameters = numbersOfPatch * width + (model.bias ? width : 0);
    numbers($("embedding-numbers"), [
      ["Patches", integer(patches), `${image / patch} × ${image / patch}`],
      ["Tokens", integer(patches + prefix), `a sequence of ${integer(patches + prefix)} × ${integer(width)}`],
      ["Parameters", integer(parameters), short(parameters)],
      ["FLOPs", integer(flops), short(flops)],
    ]);
  }
  show();
})();
