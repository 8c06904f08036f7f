// The table of models: sorted by any column, filtered by name.

(() => {
  const columns = [
    ["name", "Model", (row) => row.name],
    ["image", "Image", (row) => row.image_size[0] * row.image_size[1], (row) => size(row.image_size)],
    ["patch", "Patch", (row) => row.patch_size[0] * row.patch_size[1], (row) => size(row.patch_size)],
    ["tokens", "Tokens", (row) => row.tokens, (row) => integer(row.tokens)],
    ["parameters", "Parameters", (row) => row.parameters, (row) => short(row.parameters)],
    ["flops", "FLOPs", (row) => row.flops, (row) => short(row.flops)],
    ["scores", "N² a head", (row) => row.tokens ** 2, (row) => short(row.tokens ** 2)],
  ];
  let sorted = "parameters";
  let rising = true;

  function sortBy(key) {
    rising = sorted === key ? !rising : true;
    sorted = key;
    show();
  }
  const heads = columns.map(([key, label]) => (
    make("th", { scope: "col", "data-key": key }, make("button", { type: "button", onclick: () => sortBy(key) }, label))
  ));
  const body = make("tbody");
  $("models-table").append(tableHead(heads), body);

  const search = { type: "search", placeholder: "dinov2, 384, …", autocomplete: "off", spellcheck: false, oninput: show };
  const filter = field($("models-controls"), "Names that contain", make("input", search));
  const count = make("span", { className: "note", role: "status" });
  $("models-controls").append(count);

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const value = columns.find(([key]) => key === sorted)[2];
    const rows = DATA.models.filter((row) => words.every((word) => row.name.toLowerCase().includes(word)));
    const order = new Intl.Collator("en", { numeric: true });
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return (typeof x === "string" ? order.compare(x, y) : x - y) * (rising ? 1 : -1) || order.compare(a.name, b.name);
    });
    for (const th of heads) {
      if (th.dataset.key === sorted) th.setAttribute("aria-sort", rising ? "ascending" : "descending");
      else th.removeAttribute("aria-sort");
    }
    body.replaceChildren(...rows.map((row) => (
      tableRow(columns.map(([, , of, text = of]) => text(row)), { className: row.name === DATA.model.name ? "chosen" : "" })
    )));
    count.textContent = `${rows.length} of ${DATA.models.length} models`;
  }
  show();
})();
