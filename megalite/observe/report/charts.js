// Charts that follow their reader: logarithmic axes, smoothing, a range, steps or tokens or hours along the axis,
// values under the pointer. What comes from a run becomes text and numbers, never markup. page.py puts this file before
// report.js, which says what is drawn, into one function.

const LEFT = 52, RIGHT = 12, TOP = 26, BOTTOM = 38, LETTER = 6.6, ROW = 16;
const page = JSON.parse(document.getElementById("records").textContent);
// Runs whose batches differ are compared over tokens.
const paces = page.runs.flatMap((run) => (run.series.tokens || []).map((point) => point[1] / point[0]));
const usual = page.compared && Math.max(...paces) > 1.001 * Math.min(...paces) ? "token" : "step";
const look = { logValues: false, logSteps: false, smooth: 40, over: usual, ranges: {} };
const OVER = { step: "step", token: "tokens", hour: "hours of training" };

// --- elements

function add(parent, name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function tag(parent, name, style, text) {
  const element = document.createElement(name);
  if (style) element.className = style;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

const tip = (element, words) => add(element, "title", {}, words);

function card(section, title, wide = false, legend = []) {
  const place = document.querySelector(`[data-charts="${section}"]`);
  if (!place) return null;
  const element = tag(place, "div", wide ? "card wide" : "card");
  tag(element, "h3", "", title);
  if (legend.length > 1) {
    const list = tag(element, "ul", "legend");
    for (const line of legend) {
      const item = tag(list, "li");
      tag(item, "i", "c" + line.colour);
      tag(item, "span", "", line.name);
    }
  }
  return element;
}

function picture(parent, title, height) {
  const svg = add(parent, "svg", { role: "img", class: "chart", "aria-label": title });
  return { svg, height };
}

function short(value, share) {
  if (share) return +(100 * value).toPrecision(4) + "%";
  const size = Math.abs(value);
  if (size && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  for (const [limit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (size >= Math.max(limit, 1e4)) return +(value / limit).toPrecision(4) + letter;
  return String(+value.toPrecision(5));
}

// --- axes

function ticksOf(low, high, count, logarithmic, whole) {
  if (logarithmic) {
    const found = [], decades = Math.log10(high / low) / 6;
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += Math.max(1, Math.ceil(decades)))
      for (const factor of decades < 0.35 ? [1, 2, 5] : [1]) found.push(factor * 10 ** power);
    const inside = found.filter((tick) => tick >= low && tick <= high);
    if (inside.length > 1) return inside;
  }
  const least = (high - low) / count, power = 10 ** Math.floor(Math.log10(least));
  let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= least * 0.999999);
  if (whole) step = Math.max(1, Math.round(step));
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => +((first + at) * step).toPrecision(12));
}

function axis(low, high, from, to, logarithmic) {
  const scale = logarithmic ? Math.log : (value) => value, back = logarithmic ? Math.exp : (value) => value;
  const start = scale(low), perUnit = (to - from) / (scale(high) - start);
  const at = (value) => from + (scale(logarithmic ? Math.max(value, low) : value) - start) * perUnit;
  return { low, high, logarithmic, at, value: (place) => back(start + (place - from) / perUnit) };
}

// Values of the middle, and what is not far from them: first steps and spikes leave the chart.
function limits(values) {
  const sorted = values.sort((one, other) => one - other), last = sorted.length - 1;
  if (last < 19) return [sorted[0], sorted[last]];
  const low = sorted[Math.floor(0.05 * last)], high = sorted[Math.floor(0.95 * last)];
  const room = high > low ? (high - low) / 2 : Infinity;
  return [Math.max(sorted[0], low - room), Math.min(sorted[last], high + room)];
}

// A step as tokens or hours, between those of the steps that are known.
function along(run, step) {
  if (look.over === "step") return step;
  const known = run.series[look.over === "token" ? "tokens" : "training_s"] || [];
  const after = known.findIndex((point) => point[0] >= step), unit = look.over === "token" ? 1 : 3600;
  if (!known.length) return step;
  const [next, before] = [known.at(after), after > 0 ? known[after - 1] : [0, 0]];
  const end = (point) => point[3] ?? point[1];
  if (after < 0 || next[0] === before[0]) return end(next) / unit;
  return (end(before) + (end(next) - end(before)) * (step - before[0]) / (next[0] - before[0])) / unit;
}

function across(lines, width) {
  const xs = lines.flatMap((line) => [line.points[0][0], line.points.at(-1)[0]]);
  let [low, high] = look.ranges[look.over] || [Math.min(...xs), Math.max(...xs)];
  const logarithmic = look.logSteps && high > 0;
  if (logarithmic) low = Math.max(low, look.over === "hour" ? high / 1e4 : 1);
  if (!(high > low)) [low, high] = [low - 1, low + 1];
  return axis(low, high, LEFT, width - RIGHT, logarithmic);
}

function up(chart, shown) {
  const floor = chart.height - BOTTOM;
  if (chart.area) return axis(0, 1, floor, TOP, false);
  const values = shown.map((line) => line.points.map((point) => point[1]));
  const positive = values.flat().filter((value) => value > 0);
  if (look.logValues && positive.length)
    return axis(Math.min(...positive) * 0.95, Math.max(...positive) * 1.05, floor, TOP, true);
  const ends = values.flatMap(limits);
  let low = Math.min(...ends, chart.zero ? 0 : Infinity), high = Math.max(...ends);
  if (!(high > low)) [low, high] = [low && low - Math.abs(low) / 2, high + (Math.abs(high) / 2 || 1)];
  const room = 0.04 * (high - low);
  return axis(chart.zero && low === 0 ? 0 : low - room, high + room, floor, TOP, false);
}

function frame(chart, x, y, xName, xTicks) {
  const { svg, height } = chart, width = svg.clientWidth, floor = height - BOTTOM;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  if (chart.unit) add(svg, "text", { x: 4, y: 12 }, chart.unit);
  for (const tick of ticksOf(y.low, y.high, 5, y.logarithmic)) {
    add(svg, "path", { d: `M${LEFT} ${y.at(tick)}H${width - RIGHT}`, class: "grid" });
    add(svg, "text", { x: LEFT - 6, y: y.at(tick) + 4, class: "end" }, short(tick, chart.share));
  }
  for (const [at, words] of xTicks)
    add(svg, "text", { x: x.at(at), y: floor + 16, class: x.at(at) > width - RIGHT - 14 ? "end" : "mid" }, words);
  add(svg, "text", { x: (LEFT + width - RIGHT) / 2, y: floor + 33, class: "mid" }, xName);
  add(svg, "path", { d: `M${LEFT} ${floor}H${width - RIGHT}`, class: "floor" });
  return { width, floor };
}

// --- lines over steps

function smoothed(points, window) {
  const sums = [0];
  for (const point of points) sums.push(sums.at(-1) + point[1]);
  return points.map((point, at) => {
    const reach = Math.min(window >> 1, at, points.length - 1 - at);
    return [point[0], (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)];
  });
}

function drawLine(inner, chart, line, x, y) {
  const { points, colour } = line;
  const place = ([at, value]) => `${x.at(at).toFixed(1)} ${y.at(value).toFixed(1)}`;
  const path = (corners, style, end = "") =>
    add(inner, "path", { d: "M" + corners.map(place).join("L") + end, class: style + colour });
  if (points.some((point) => point.length > 2)) {
    const single = chart.area && points.length === 1; // its shares go over the whole width
    const wide = single ? [x.low, x.high].map((at) => [at, ...points[0].slice(1)]) : points;
    const above = wide.map(([at, mean, , high]) => [at, high ?? mean]);
    const below = wide.map(([at, mean, low]) => [at, low ?? mean]);
    path([...above, ...below.reverse()], chart.area ? "area c" : "band c", "Z");
  }
  if (chart.area) return;
  if (line.smoothed && points.length > 1) path(points, "faint c");
  if (points.length > 1) path(line.smoothed || points, "curve c");
  if ((line.dots && points.length <= 60) || points.length === 1)
    for (const point of points)
      add(inner, "circle", { cx: x.at(point[0]), cy: y.at(point[1]), r: 3, class: `dot c${colour}` });
}

// What is seen of a line: its points in the range, and one more on each side.
function visible(line, x) {
  const within = (points) => points.filter((point, at) =>
    (points[at + 1] ?? point)[0] >= x.low && (points[at - 1] ?? point)[0] <= x.high);
  const window = look.smooth && line.smooth ? Math.floor(line.points.length / look.smooth) : 1;
  return { ...line, points: within(line.points), smoothed: window > 1 && within(smoothed(line.points, window)) };
}

const placed = (line) =>
  ({ ...line, points: line.points.map(([step, ...values]) => [along(line.run, step), ...values]) });

function draw(chart) {
  const { svg, height } = chart, lines = chart.lines.map(placed), x = across(lines, svg.clientWidth);
  const shown = lines.map((line) => visible(line, x)).filter((line) => line.points.length);
  if (!shown.length) {
    svg.replaceChildren();
    return add(svg, "text", { x: LEFT, y: TOP + ROW }, "no values in this range");
  }
  const y = up(chart, shown), count = Math.max(2, Math.floor(svg.clientWidth / 90));
  const ticks = ticksOf(x.low, x.high, count, x.logarithmic, look.over !== "hour").map((tick) => [tick, short(tick)]);
  const { width, floor } = frame(chart, x, y, OVER[look.over], ticks);
  const inside = [LEFT - 4, TOP - 4, width - LEFT - RIGHT + 8, floor - TOP + 8]; // with room for dots
  const [left, top, wide, high] = inside;
  const inner = add(svg, "svg", { x: left, y: top, width: wide, height: high, viewBox: inside.join(" ") });
  for (const line of shown) drawLine(inner, chart, line, x, y);
  if (chart.marks) drawMarks(inner, x, floor);
  const highest = Math.max(...shown.flatMap((line) => line.points.map((point) => point[3] ?? point[1])));
  if (highest > y.high && !chart.area)
    add(svg, "text", { x: width - RIGHT, y: 12, class: "end" }, `up to ${short(highest, chart.share)}`);
  chart.drawn = { x, shown, width, floor, over: add(svg, "g", {}) };
}

// Steps whose loss or gradient was not finite: they have no value to draw.
function drawMarks(inner, x, floor) {
  for (const run of page.runs)
    for (const step of run.not_finite) {
      const at = x.at(along(run, step));
  tip(add(inner, "path", { d: `M${at} ${floor - 9}l5 9h-10z`, class: "mark" }), `step ${step}: not finite`);
    }
}

// --- the pointer

function showValues(chart, where) {
  const { x, shown, width, floor, over } = chart.drawn;
  const away = (point) => Math.abs(x.at(point[0]) - where);
  const nearest = (points) => points.reduce((best, point) => (away(point) < away(best) ? point : best));
  const at = nearest(shown.flatMap((line) => line.points))[0];
  const place = at < 1e6 && look.over !== "hour" ? Math.round(at).toLocaleString("en") : short(at);
  const rows = [[`${look.over} ${place}`, "strong"]];
  for (const line of shown) {
    const point = nearest(line.points), value = chart.area ? point[3] - point[2] : point[1];
    rows.push([`${line.name} ${short(value, chart.share)}`, `tip c${line.colour}`]);
  }
  const wide = 16 + LETTER * Math.max(...rows.map(([text]) => text.length)), side = x.at(at) + 8;
  const left = side + wide < width ? side : Math.max(2, side - 16 - wide);
  over.replaceChildren();
  add(over, "path", { d: `M${x.at(at)} ${TOP}V${floor}`, class: "cross" });
  add(over, "rect", { x: left, y: TOP + 2, width: wide, height: ROW * rows.length + 8, rx: 4, class: "tip-box" });
  rows.forEach(([text, style], row) =>
    add(over, "text", { x: left + 8, y: TOP + 2 + ROW * (row + 1), class: style }, text));
}

// `choose` is called with the range that was dragged over, or null.
function listen(chart, choose) {
  const { svg } = chart;
  const place = (event) =>
    Math.min(Math.max(event.clientX - svg.getBoundingClientRect().left, LEFT), chart.drawn.width - RIGHT);
  let start = null;
  svg.addEventListener("pointerdown", (event) => { start = chart.drawn && place(event); });
  svg.addEventListener("pointermove", (event) => {
    if (!chart.drawn) return;
    showValues(chart, place(event));
    if (start === null) return;
    const { over, floor } = chart.drawn, left = Math.min(start, place(event)), width = Math.abs(place(event) - start);
    add(over, "rect", { x: left, y: TOP, width, height: floor - TOP, class: "chosen" });
  });
  svg.addEventListener("pointerup", (event) => {
    const ends = [start, chart.drawn && place(event)].sort((one, other) => one - other);
    if (start !== null && ends[1] - ends[0] > 6) choose(ends.map((at) => chart.drawn.x.value(at)));
    start = null;
  });
  svg.addEventListener("pointerleave", () => { start = null; chart.drawn?.over.replaceChildren(); });
  svg.addEventListener("dblclick", () => choose(null));
}
