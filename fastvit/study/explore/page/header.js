// The model and its figures.

(() => {
  const { model } = DATA;
  $("name").textContent = model.name;
  const facts = [
    ["Image", `${size(model.image_size)} px`], ["Patch", `${size(model.patch_size)} px`], ["Tokens", integer(model.tokens)],
    ["Width", integer(model.width)], ["Parameters", short(model.parameters)], ["FLOPs an image", short(model.flops)],
  ];
  $("facts").append(...facts.map(([label, value]) => make("div", { "data-name": label }, make("dt", {}, label), make("dd", {}, value))));
  $("provenance").textContent = DATA.provenance;
  $("footer").textContent = `Made by fastvit ${DATA.version}. This page is one file: it fetches nothing, and sends nothing.`;
})();
