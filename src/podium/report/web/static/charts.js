// Charts. A curve is {label, metric, steps, mean, low?, high?, dots?, colour?}; `low` and `high` exist if a point stands
// for several steps. A chart is drawn at its real width, so that text keeps its size on a phone.

const COLOURS = 8, EDGE = {left: 52, right: 10, top: 8, bottom: 20};
const drawn = [];  // charts on the page, redrawn when the window changes

function curveOf(metric, label, extra) {
  const column = data.series.columns[metric];
  return column ? {label, metric, steps: data.series.steps, ...column, ...extra} : null;
}
function evalCurve(metric, label) {
  const lines = data.evals.filter(line => Number.isFinite(line[metric]));
  return lines.length ? {label, metric, steps: lines.map(line => line.step), mean: lines.map(line => line[metric]), dots: true} : null;
}

// Exponential moving average, corrected for its start.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map(value => {
    if (!Number.isFinite(value)) return null;
    sum = sum * weight + value; total = total * weight + 1;
    return sum / total;
  });
}

function ticks(low, high, count) {
  const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw)), rest = raw / unit;
  const step = unit * (rest > 5 ? 10 : rest > 2 ? 5 : rest > 1 ? 2 : 1), found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  return found;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (Number.isFinite(value)) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

function chart(parent, title, curves, options = {}) {
  const present = curves.filter(curve => curve && curve.mean.some(Number.isFinite) && !(curve.optional && curve.mean.every(value => !value)));
  if (!present.length) return null;
  const box = make(parent, "div", undefined, "card chart" + (ui.expanded[title] ? " wide" : ""));
  const head = make(box, "div", undefined, "charthead");
  make(head, "h3", title);
  button(head, ui.expanded[title] ? "smaller" : "larger", () => { ui.expanded[title] = !ui.expanded[title]; keep(); redrawAll(); }, "plain small", {"aria-label": (ui.expanded[title] ? "make smaller: " : "make larger: ") + title});
  const figure = make(box, "div"), readout = make(box, "div", "", "readout", {"aria-live": "polite"}), legend = make(box, "div", undefined, "legend");
  present.forEach((curve, index) => {
    curve.colour = curve.colour || `var(--c${index % COLOURS})`;
    const id = title + "/" + curve.label;
    const item = button(legend, "", () => { ui.hidden[id] = !ui.hidden[id]; keep(); redrawAll(); }, "", {"aria-pressed": String(!ui.hidden[id])});
    make(item, "i").style.setProperty("--c", curve.colour);
    term(item, curve.label, curve.metric).tabIndex = -1;
    item.dataset.tip = item.lastChild.dataset.tip;
  });
  const visibleCurves = present.filter(curve => !ui.hidden[title + "/" + curve.label]);
  const draw = () => plot(figure, readout, title, visibleCurves, options);
  drawn.push(draw);
  return box;
}

function redrawAll() { keep(); drawPage(); }

function scales(curves, width, height, options) {
  let [x0, x1] = extent(curves.flatMap(curve => [curve.steps[0], curve.steps.at(-1)]));
  let [y0, y1] = extent(curves.flatMap(curve => [...extent(curve.mean), ...extent(curve.low || []), ...extent(curve.high || [])]));
  if (options.stacked) y0 = 0;
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (y0 === y1) { const room = Math.abs(y0) * 0.1 || 0.5; y0 -= room; y1 += room; }
  const room = (y1 - y0) * 0.04;
  if (!options.stacked) y0 -= room;
  y1 += room;
  return {
    x0, x1, y0, y1,
    X: x => EDGE.left + (x - x0) / (x1 - x0) * (width - EDGE.left - EDGE.right),
    Y: y => height - EDGE.bottom - (y - y0) / (y1 - y0) * (height - EDGE.top - EDGE.bottom),
  };
}

function axes(root, scale, width, height) {
  for (const y of ticks(scale.y0, scale.y1, 5)) {
    svg(root, "line", {x1: EDGE.left, x2: width - EDGE.right, y1: scale.Y(y), y2: scale.Y(y), stroke: "var(--grid)"});
    svg(root, "text", {x: EDGE.left - 7, y: scale.Y(y) + 4, "text-anchor": "end"}, show(y));
  }
  const marks = ticks(scale.x0, scale.x1, Math.max(2, width / 110)).filter(x => Number.isInteger(x));
  for (const x of marks) svg(root, "text", {x: scale.X(x), y: height - 4, "text-anchor": "middle"}, show(x));
}

function lineOf(steps, values, scale) {
  let path = "", pen = "M";
  values.forEach((value, index) => {
    if (!Number.isFinite(value)) { pen = "M"; return; }
    path += pen + scale.X(steps[index]).toFixed(1) + " " + scale.Y(value).toFixed(1);
    pen = "L";
  });
  return path;
}

function bandOf(curve, lows, highs, scale) {
  const places = curve.steps.map((_, index) => index).filter(index => Number.isFinite(lows[index]) && Number.isFinite(highs[index]));
  if (places.length < 2) return "";
  const point = (index, values) => scale.X(curve.steps[index]).toFixed(1) + " " + scale.Y(values[index]).toFixed(1);
  return "M" + places.map(index => point(index, highs)).join("L") + "L" + places.reverse().map(index => point(index, lows)).join("L") + "Z";
}

function plot(figure, readout, title, curves, options) {
  const width = Math.max(260, figure.clientWidth), height = options.height || (figure.parentNode.classList.contains("wide") ? 320 : 190);
  figure.textContent = "";
  if (!curves.length) return;
  const layers = options.stacked ? stack(curves) : curves.map(curve => ({...curve}));
  const scale = scales(layers, width, height, options);
  const latest = curves.map(curve => `${curve.label} ${show(curve.mean.findLast(Number.isFinite))}`).join(", ");
  const root = svg(figure, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": `${title}: ${latest}. Use the arrow keys to read single steps.`});
  axes(root, scale, width, height);
  for (const curve of layers) {
    if (options.stacked) { svg(root, "path", {d: bandOf(curve, curve.low, curve.high, scale), fill: curve.colour, opacity: 0.75}); continue; }
    if (curve.low) svg(root, "path", {d: bandOf(curve, curve.low, curve.high, scale), fill: curve.colour, opacity: 0.16});
    const weight = curve.dots ? 0 : +ui.smooth;
    svg(root, "path", {class: "curve", d: lineOf(curve.steps, curve.mean, scale), fill: "none", stroke: curve.colour, "stroke-width": 1.7, "stroke-linejoin": "round", opacity: weight ? 0.25 : 1, ...(curve.dots ? {"stroke-dasharray": "5 4"} : {})});
    if (weight) svg(root, "path", {d: lineOf(curve.steps, smoothed(curve.mean, weight), scale), fill: "none", stroke: curve.colour, "stroke-width": 2});
    if (curve.dots || curve.mean.length === 1) curve.mean.forEach((value, index) => Number.isFinite(value) && svg(root, "circle", {cx: scale.X(curve.steps[index]), cy: scale.Y(value), r: 3.2, fill: curve.colour}));
  }
  reader(root, readout, curves, scale, width, height);
}

// The pointer and the arrow keys select a step; its values are shown below the chart.
function reader(root, readout, curves, scale, width, height) {
  const steps = [...new Set(curves.flatMap(curve => curve.steps))].sort((a, b) => a - b);
  const cursor = svg(root, "line", {y1: EDGE.top, y2: height - EDGE.bottom, stroke: "var(--soft)", "stroke-dasharray": "3 3", visibility: "hidden"});
  let place = steps.length - 1;
  const read = () => {
    const step = steps[place], x = scale.X(step);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
    const parts = curves.map(curve => {
      const index = curve.steps.indexOf(step);
      if (index < 0 || !Number.isFinite(curve.mean[index])) return null;
      const range = curve.low && curve.low[index] !== curve.high[index] ? ` (${show(curve.low[index])} … ${show(curve.high[index])})` : "";
      return `${curve.label} ${show(curve.mean[index])}${range}`;
    }).filter(Boolean);
    readout.textContent = `step ${step}: ` + parts.join(" · ");
  };
  const leave = () => { cursor.setAttribute("visibility", "hidden"); readout.textContent = ""; };
  root.addEventListener("pointermove", event => {
    const box = root.getBoundingClientRect(), x = scale.x0 + (((event.clientX - box.left) * width / box.width) - EDGE.left) / (width - EDGE.left - EDGE.right) * (scale.x1 - scale.x0);
    place = steps.reduce((best, step, index) => Math.abs(step - x) < Math.abs(steps[best] - x) ? index : best, 0);
    read();
  });
  root.addEventListener("pointerleave", leave);
  root.addEventListener("blur", leave);
  root.addEventListener("focus", read);
  root.addEventListener("keydown", event => {
    const moves = {ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: steps.length - 1};
    if (!(event.key in moves)) return;
    place = Math.max(0, Math.min(steps.length - 1, moves[event.key]));
    event.preventDefault();
    read();
  });
}

// Stacks curves: `low` and `high` are the edges of a curve's band, `mean` its own value.
function stack(curves) {
  let floor = curves[0].steps.map(() => 0);
  return curves.map(curve => {
    const top = floor.map((value, index) => value + (curve.mean[index] || 0)), low = floor;
    floor = top;
    return {...curve, low, high: top};
  });
}

function sparkline(parent, values, colour) {
  const known = values.slice(-60);
  if (known.filter(Number.isFinite).length < 2) return;
  let [low, high] = extent(known);
  if (low === high) { low -= 1; high += 1; }
  const root = svg(parent, "svg", {viewBox: "0 0 120 26", preserveAspectRatio: "none", "aria-hidden": "true"});
  const scale = {X: x => x / (known.length - 1) * 120, Y: y => 24 - (y - low) / (high - low) * 22};
  svg(root, "path", {d: lineOf(known.map((_, index) => index), known, scale), fill: "none", stroke: colour, "stroke-width": 1.5, "vector-effect": "non-scaling-stroke"});
}
