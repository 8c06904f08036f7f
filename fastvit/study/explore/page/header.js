// The model and its figures.

(() => {
  const { model } = DATA;
  $("name").textContent = model.name;
  numbers($("facts"), [
    ["Image", `${size(model.image_size)} px`], ["Patch", `${size(model.patch_size)} px`], ["Tokens", integer(model.tokens)],
    ["Width", integer(model.width)], ["Parameters", short(model.parameters)], ["FLOPs an image", short(model.flops)],
  ]);
  $("provenance").textContent = DATA.provenance;
  $("footer").textContent = `Made by fastvit ${DATA.version}. This page is one file: it fetches nothing, and sends nothing.`;
})();
