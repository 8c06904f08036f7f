// Shared by all sections: data, numbers, controls, and pictures under a grid of patches.

const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

// ---- numbers ----

const integer = (x) => x.toLocaleString("en", { maximumFractionDigits: 0 }).replaceAll(",", "\u202f");

// 1234567 -> "1.23 M": three digits
function short(x) {
  for (const [unit, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (x >= scale) return `${(x / scale).toPrecision(3).replace(/e.*/, "")} ${unit}`;
  }
  return String(x);
}

const size = ([height, width]) => (height === width ? `${height}` : `${height} × ${width}`);
const signed = (x, digits = 2) => x.toFixed(digits).replace(/^-(?!0\.0+$)/, "−").replace("-", "");
const percent = (x) => `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)}\u00a0%`;

// Base64 of a deflated array
async function arrayOf(text, kind) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new kind(await new Response(stream).arrayBuffer());
}

// <dt>label<dd>value, with its derivation below
function numbers(list, rows) {
  list.replaceChildren(...rows.map(([label, value, more]) => {
    const dd = make("dd", {}, value);
    if (more) dd.append(make("small", {}, more));
    return make("div", { "data-name": label }, make("dt", {}, label), dd);
  }));
}

// ---- controls ----

let fields = 0;

// Append a control under its label, which `more` follows
function field(parent, label, control, ...more) {
  control.id = `f${++fields}`;
  control.dataset.name = label;
  const name = make("label", { htmlFor: control.id }, label);
  parent.append(make("div", { className: "field" }, make("span", { className: "label" }, name, ...more), control));
  return control;
}

// A slider over discrete stops; its text is the stop, not the index
function slider(parent, label, stops, chosen, onchange, text = String) {
  const output = make("output");
  const input = make("input", { type: "range", min: 0, max: stops.length - 1, step: 1, disabled: stops.length < 2 });
  output.htmlFor = field(parent, label, input, output).id;
  const show = () => {
    output.textContent = text(stops[input.value]);
    input.setAttribute("aria-valuetext", output.textContent);
  };
  const control = {
    get value() { return stops[input.value]; },
    set value(stop) { input.value = stops.indexOf(stop); show(); },
  };
  control.value = chosen;
  input.addEventListener("input", () => { show(); onchange(control.value); });
  return control;
}

function number(parent, label, value, oninput, least) {
  return field(parent, label, make("input", { type: "number", min: least, max: 1e5, step: 1, inputMode: "numeric", value, oninput }));
}

// A choice of a few, as radio buttons; the first is chosen
function choice(parent, label, options, onchange) {
  const name = `f${++fields}`;
  const group = make("div", { className: "choice" }, ...options.map(([value, text], i) => (
    make("label", {}, make("input", { type: "radio", name, value, checked: i === 0, onchange }), text)
  )));
  parent.append(make("fieldset", { className: "field", "data-name": label }, make("legend", {}, label), group));
  return { get value() { return group.querySelector(":checked").value; } };
}

// A cell of a table is an element or the content of one
const cell = (tag, properties, content) => (content instanceof Node ? content : make(tag, properties, content));
const tableHead = (names) => make("thead", {}, make("tr", {}, ...names.map((name) => cell("th", { scope: "col" }, name))));

// A row of a table, whose first cell is its heading
function tableRow([heading, ...cells], properties = {}) {
  const name = make("th", { scope: "row" }, ...[heading].flat());
  return make("tr", properties, name, ...cells.map((content) => cell("td", {}, content)));
}

// ---- pictures ----

const photograph = new Image();
const grey = document.createElement("canvas"); // the picture without colours, under heat maps
const drawn = []; // functions that draw again when the picture has loaded

photograph.addEventListener("load", () => {
  [grey.width, grey.height] = [photograph.naturalWidth, photograph.naturalHeight];
  const context = grey.getContext("2d");
  context.drawImage(photograph, 0, 0);
  context.globalCompositeOperation = "saturation"; // of black, which has none
  context.fillRect(0, 0, grey.width, grey.height);
  for (const draw of drawn) draw();
});
photograph.src = DATA.picture.uri;

// A context in CSS pixels, and its size, with the picture's aspect ratio
function canvasFor(canvas) {
  const width = Math.max(1, Math.round(canvas.clientWidth));
  const height = Math.max(1, Math.round((width * DATA.picture.height) / DATA.picture.width));
  const scale = devicePixelRatio || 1;
  canvas.style.aspectRatio = `${width} / ${height}`;
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width, height];
}

// A canvas over a grid of patches, one of which is chosen by pointer or keys, at first the one in the centre
//   grid() -> [rows, columns]; draw(context, width, height); chosen([row, column]); name() -> its label
function gridView(canvas, { grid, draw, chosen, name }) {
  const view = { at: grid().map((n) => Math.floor(n / 2)), marked: true };
  const bounded = (at) => at.map((i, axis) => Math.min(grid()[axis] - 1, Math.max(0, i)));
  view.draw = () => {
    view.at = bounded(view.at);
    const [context, width, height] = canvasFor(canvas);
    draw(context, width, height);
    if (view.marked) mark(context, view.at, grid(), width, height);
    canvas.setAttribute("aria-label", name());
  };
  const choose = (at) => { view.at = bounded(at); chosen(view.at); };
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "grid of patches");
  canvas.addEventListener("keydown", (event) => {
    const [row, column] = view.at;
    const to = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
      Home: [row, 0], End: [row, Infinity], PageUp: [0, column], PageDown: [Infinity, column],
    }[event.key];
    if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(to);
  });
  const point = (event) => {
    const [rows, columns] = grid();
    const box = canvas.getBoundingClientRect();
    choose([Math.floor(((event.clientY - box.top) / box.height) * rows), Math.floor(((event.clientX - box.left) / box.width) * columns)]);
  };
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1 && event.pointerType !== "touch") point(event); });
  drawn.push(view.draw);
  onWidth(canvas, view.draw);
  return view;
}

// The frame of the chosen patch, visible on any background
function mark(context, [row, column], [rows, columns], width, height) {
  const [h, w] = [height / rows, width / columns];
  for (const [stroke, line] of [["#000", 4], ["#fff", 2]]) {
    context.strokeStyle = stroke;
    context.lineWidth = line;
    context.strokeRect(column * w, row * h, w, h);
  }
}

// Colour ramps by control points; lighter is more
const HEAT = [[18, 16, 46], [52, 44, 122], [44, 98, 158], [48, 152, 152], [122, 198, 118], [250, 232, 140]];
const SIGNED = [[0, 92, 150], [86, 160, 200], [244, 243, 238], [232, 150, 80], [176, 66, 0]];

function ramp(points, x) {
  const at = Math.min(1, Math.max(0, x)) * (points.length - 1);
  const i = Math.min(points.length - 2, Math.floor(at));
  return points[i].map((c, k) => Math.round(c + (at - i) * (points[i + 1][k] - c)));
}

// values: rows * columns numbers in 0..1
function heat(context, values, rows, columns, width, height, points = HEAT, opacity = 0.78) {
  const cells = document.createElement("canvas");
  [cells.width, cells.height] = [columns, rows];
  const image = cells.getContext("2d").createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) image.data.set([...ramp(points, values[i]), 255], 4 * i);
  cells.getContext("2d").putImageData(image, 0, 0);
  if (opacity < 1) context.drawImage(grey, 0, 0, width, height);
  context.globalAlpha = opacity;
  context.imageSmoothingEnabled = false;
  context.drawImage(cells, 0, 0, width, height);
  context.globalAlpha = 1;
}

function legend(parent, points, from, to) {
  const style = `background: linear-gradient(to right, ${points.map((point) => `rgb(${point})`)})`;
  const bar = make("i", { role: "img", "aria-label": `colours from ${from} to ${to}`, style });
  parent.replaceChildren(make("span", {}, from), bar, make("span", {}, to));
}

// ---- charts ----

const SVG = "http://www.w3.org/2000/svg";

// Append an SVG element
function shape(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// A chart's SVG: a line for each of rows [y, text], and below the texts of columns [x, text], where there is room
function newChart(width, height, label, { left, right, bottom, room }, rows, columns) {
  const svg = shape(new DocumentFragment(), "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const [y, text] of rows) {
    shape(svg, "line", { x1: left, x2: width - right, y1: y, y2: y, stroke: "var(--line)" });
    shape(svg, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, text);
  }
  let last = -Infinity;
  for (const [x, text] of columns) {
    if (x - last < room) continue;
    last = x;
    shape(svg, "text", { x, y: height - bottom + 20, "text-anchor": "middle" }, text);
  }
  return svg;
}

function dashed(svg, x1, x2, y) {
  shape(svg, "line", { x1, x2, y1: y, y2: y, stroke: "var(--ink)", "stroke-width": 1.5, "stroke-dasharray": "6 4" });
}

function polyline(svg, points, colour) {
  shape(svg, "polyline", { points: points.join(" "), fill: "none", stroke: `var(--${colour})`, "stroke-width": 2.5, "stroke-linejoin": "round" });
}

// Draw whenever the box has another width
function onWidth(box, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth !== width) { width = box.clientWidth; draw(); }
  }).observe(box);
}
