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

  const head = make("tr", {}, ...columns.map(([key, label]) => {
    const button = make("button", { type: "button" }, label);
    button.addEventListener("click", () => {
      rising = sorted === key ? !rising : true;
      sorted = key;
      show();
    });
    return make("th", { scope: "col", "data-key": key }, button);
  }));
  const body = make("tbody");
  const table = $("models-table");
  table.append(make("thead", {}, head), body);

  const id = "models-filter";
  const filter = make("input", { type: "search", id, placeholder: "dinov2, 384, …", autocomplete: "off", spellcheck: false });
  filter.addEventListener("input", show);
  const count = make("span", { className: "note", role: "status" });
  $("models-controls").append(make("div", { className: "field" }, make("label", { htmlFor: id, className: "label" }, "Names that contain"), filter), count);

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const value = columns.find(([key]) => key === sorted)[2];
    const rows = DATA.models.filter((row) => words.every((word) => row.name.toLowerCase().includes(word)));
    const order = new Intl.Collator("en", { numeric: true });
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return (typeof x === "string" ? order.compare(x, y) : x - y) * (rising ? 1 : -1) || order.compare(a.name, b.name);
    });
    for (const th of head.children) {
      if (th.dataset.key === sorted) th.setAttribute("aria-sort", rising ? "ascending" : "descending");
      else th.removeAttribute("aria-sort");
    }
    body.replaceChildren(...rows.map((row) => {
      const cells = columns.map(([, , of, text], i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, text ? text(row) : of(row)));
      return make("tr", { className: row.name === DATA.model.name ? "chosen" : "" }, ...cells);
    }));
    count.textContent = `${rows.length} of ${DATA.models.length} models`;
  }
  show();
})();
