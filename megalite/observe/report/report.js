// What a report draws. charts.js has the means.

const many = page.compared, charts = [];
const NATS = "nats per token", ADDED = "added to the loss, coefficient included";
const chart = (title, series, options = {}) => ({ title, series, ...options });
const known = [...new Set(page.runs.flatMap(({ series }) => Object.keys(series)))];
const within = (prefix, more = "") => Object.fromEntries( // the series of a group, each with the rest of its name
  known.filter((key) => key.startsWith(prefix)).map((key) => [key, key.slice(prefix.length) + more]));
const SECTIONS = { // charts by section: their series of metrics.jsonl, each with a name where there are two
  learning: [
    chart("Loss", { loss: "training", val_loss: "validation", val_loss_ema: "validation (ema)" },
      { unit: NATS, wide: true, smooth: true, marks: true }),
    chart("Validation loss by set", { ...within("val_loss/"), ...within("val_loss_ema/", " (ema)") },
      { unit: NATS, colour: 1 }),
    chart("Training loss by source", within("source_loss/"), { unit: NATS, smooth: true }),
    chart("Tokens by source", within("source_tokens/"), { unit: "of the steps since the line before", zero: true }),
    chart("Learning rate", { lr: "" }, { zero: true }),
    chart("Gradient norm", { grad_norm: "" }, { unit: "before clipping", smooth: true, marks: true }),
    chart("Bits per byte, validation", { val_bits_per_byte: "", ...within("val_bits_per_byte/") },
      { unit: "bits", colour: 1 }),
    chart("Loss scale", { loss_scale: "" }, { unit: "factor" }),
  ],
  layers: [
    chart("Update over weights, by group", within("group_relative_update/"),
      { unit: "root mean squares", zero: true, smooth: true }),
    chart("Largest attention logit", { max_attention_logit: "" }, { unit: "before softmax", colour: 3, smooth: true }),
  ],
  speed: [
    chart("Tokens per second", { tokens_per_s: "" }, { unit: "tokens", colour: 2, zero: true, smooth: true }),
    chart("Time of a step", { step_time_s: "" }, { unit: "seconds", zero: true, smooth: true }),
    chart("Model FLOPs utilisation", { mfu: "full attention", mfu_causal: "causal half" },
      { unit: "of the device's peak", zero: true, share: true, smooth: true }),
    chart("Peak memory", { memory_gib: "" }, { unit: "GiB", colour: 5, zero: true }),
  ],
  experts: [
    chart("Load imbalance", { "moe/imbalance_mean": "mean of layers", "moe/imbalance_max": "worst layer" },
      { unit: "tokens of the busiest expert over the mean", smooth: true }),
    chart("Waiting for the exchange of tokens", { "time_split/exchange": "" },
      { unit: "seconds of a step, rank 0", colour: 3, zero: true, smooth: true, optional: true }),
    chart("Balancing loss", { "moe/balancing_loss": "" }, { unit: ADDED, smooth: true }),
    chart("Router z-loss", { "moe/z_loss": "" }, { unit: ADDED, smooth: true, optional: true }),
    chart("Dropped choices", { "moe/dropped_share": "" },
      { unit: "of all choices", zero: true, share: true, smooth: true, optional: true }),
    chart("Router entropy", { "moe/entropy": "" }, { unit: NATS, smooth: true }),
  ],
};

// --- curves

// One card for all series of a run; for several runs a card for each series.
function lineCharts(section, { title, series, colour = 0, ...options }) {
  const named = Object.entries(series), [run] = page.runs;
  const single = named.map(([key, name], at) => ({ key, run, name: name || title.toLowerCase(), colour: (colour + at) % 10 }));
  if (!many) return lineChart(section, title, single, options);
  for (const [key, name] of named) {
    const lines = page.runs.map((run, at) => ({ key, run, name: run.name, colour: at % 10 }));
    lineChart(section, name ? `${title}: ${name}` : title, lines, { ...options, wide: false });
  }
}

function lineChart(section, title, all, options) {
  const lines = all.map((line) => {
    const few = line.key.startsWith("val_"); // each of few values is marked
    return { ...line, points: line.run.series[line.key] || [], dots: few, smooth: options.smooth && !few };
  }).filter((line) => line.points.length);
  const nothing = options.optional && lines.every((line) => line.points.every((point) => !point[1]));
  const place = lines.length && !nothing && card(section, title, options.wide, many ? [] : lines);
  if (place) charts.push({ ...options, lines, draw, ...picture(place, title, options.wide ? 300 : 240) });
}

// How the time of a step is divided: areas that lie on each other.
function shareChart([run]) {
  const split = Object.entries(run.series).filter(([key]) => key.startsWith("time_split/"));
  if (!split.length) return;
  const sum = (points) => points.reduce((all, point) => all + point[1], 0);
  const totals = split[0][1].map((_, at) => split.reduce((all, [, points]) => all + points[at][1], 0) || 1);
  const whole = totals.reduce((all, total) => all + total, 0);
  let below = totals.map(() => 0);
  const lines = split.map(([key, points], colour) => {
    const above = points.map((point, at) => below[at] + point[1] / totals[at]);
    const drawn = points.map(([step], at) => [step, above[at], below[at], above[at]]);
    below = above;
    return { name: `${key.split("/")[1]} ${short(sum(points) / whole, true)}`, run, colour, points: drawn };
  });
  const drawn = picture(card("shares", "Time of a step by part", true, lines), "time of a step by part", 250);
  charts.push({ lines, draw, unit: "of a step", area: true, share: true, ...drawn });
}

// --- columns by rank: of very many ranks, neighbours share a column, which shows the largest

function rankChart(title, unit, values, marked = []) {
  const place = values.length > 1 && Math.max(...values) > 0 && card("ranks", title);
  if (!place) return;
  const together = Math.ceil(values.length / 160), columns = [];
  for (let first = 0; first < values.length; first += together) {
    const its = values.slice(first, first + together), last = first + its.length - 1;
    const name = together > 1 ? `ranks ${first} to ${last}` : `rank ${first}`;
    columns.push({ first, name, value: Math.max(...its), marked: its.some((_, at) => marked.includes(first + at)) });
  }
  const drawColumns = (chart) => {
    const { svg, height } = chart, width = svg.clientWidth, floor = height - BOTTOM;
    const room = (width - LEFT - RIGHT) / columns.length, wide = Math.min(56, room * (room > 5 ? 0.76 : 1));
    const y = axis(0, Math.max(...values) * 1.08, floor, TOP, false), x = { at: (at) => LEFT + (at + 0.5) * room };
    const every = Math.ceil(columns.length / 12);
    const fits = columns.every(({ value }) => LETTER * short(value).length < room);
    frame(chart, x, y, "rank", columns.flatMap((column, at) => (at % every ? [] : [[at, column.first]])));
    columns.forEach(({ name, value, marked }, at) => {
      const top = y.at(value), look = { width: wide, height: floor - top, class: `column c${marked ? 3 : 0}` };
      tip(add(svg, "rect", { x: x.at(at) - wide / 2, y: top, ...look }), `${name}: ${short(value)} ${unit}`);
      if (fits) add(svg, "text", { x: x.at(at), y: top - 4, class: "mid strong" }, short(value));
    });
  };
  charts.push({ unit, draw: drawColumns, ...picture(place, title, 240) });
}

// --- maps: a row for each layer

// `rows`: (shade of 0 to 1, words) by column, of each layer of `layers`; `names`: of a column, in full and at the axis.
function heatMap(section, title, note, layers, rows, names, xName) {
  const place = card(section, title, true), holder = tag(place, "div", "scroll");
  const tall = layers.length > 24 ? 13 : 22, count = Math.max(...rows.map((row) => row.length));
  const left = 14 + LETTER * Math.max(...layers.map((layer) => layer.length));
  const drawCells = ({ svg, height }) => {
    const width = Math.max(540, holder.clientWidth), wide = (width - left - 10) / count, every = Math.ceil(count / 16);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.width = `${width}px`;
    svg.replaceChildren();
    rows.forEach((row, at) => {
      const top = at * tall, layer = layers[at];
      if (tall > 14 || at % 2 === 0) add(svg, "text", { x: left - 6, y: top + tall / 2 + 4, class: "end" }, layer);
      row.forEach(([shade, words], column) => {
        const size = { width: Math.max(wide - 1, 0.5), height: tall - 1, class: "heat", opacity: shade.toFixed(3) };
        const cell = add(svg, "rect", { x: left + column * wide, y: top, ...size });
        tip(cell, `${layer}, ${names(column)[0]}: ${words}`);
        if (wide > 52 && tall > 14)
          add(svg, "text", { x: left + (column + 0.5) * wide, y: top + 15, class: "mid strong" }, words);
      });
    });
    for (let column = 0; column < count; column += every)
      add(svg, "text", { x: left + (column + 0.5) * wide, y: height - 24, class: "mid" }, names(column)[1]);
    add(svg, "text", { x: left + (count * wide) / 2, y: height - 7, class: "mid" }, xName);
  };
  charts.push({ draw: drawCells, ...picture(holder, title, rows.length * tall + 40) });
  tag(tag(place, "p"), "small", "", note);
}

// Of more than `most` columns, neighbours share one, which shows the largest.
function gathered(row, most) {
  const together = Math.ceil(row.length / most), cells = [];
  for (let first = 0; first < row.length; first += together) cells.push(Math.max(...row.slice(first, first + together)));
  return cells;
}

// The step with which a column of `most` begins, in full and at the axis.
const stepNames = (steps, most) => (column) => {
  const step = Math.round(steps[column * Math.ceil(steps.length / most)]);
  return [`from step ${step}`, short(step)];
};

function layerMap(title, note, { names, steps, rows }) {
  if (!names.length) return;
  const cells = rows.map((row) => gathered(row, 90)), positive = cells.flat().filter((value) => value > 0);
  const low = Math.min(...positive), range = Math.log(Math.max(...positive) / low) || 1;
  const shade = (value) => (value > 0 ? 0.04 + (0.56 * Math.log(value / low)) / range : 0);
  const labels = names.map((name) => (isNaN(name) ? name.replace("_", " ") : `block ${name}`));
  const shaded = cells.map((row) => row.map((value) => [shade(value), short(value)]));
  heatMap("layers", title, note, labels, shaded, stepNames(steps, 90), "step");
}

function expertMaps({ layers, until, imbalance, all, newest }) {
  const percent = (share) => `${(100 * share).toFixed(1)}%`, count = all[0].length, even = 1 / count;
  const steps = imbalance[0].map((point) => point[0]), labels = layers.map((layer) => `layer ${layer}`);
  const worst = imbalance.map((row) => gathered(row.map((point) => point[3] ?? point[1]), 90));
  const uneven = Math.max(2, ...worst.flat()) - 1;
  const loads = worst.map((row) => row.map((value) => [0.04 + (0.56 * (value - 1)) / uneven, value.toFixed(2)]));
  heatMap("experts", "Load of each layer, over the run",
    "Tokens of a layer's busiest expert over those of its mean expert: 1 is even and has the lightest colour.",
    labels, loads, stepNames(steps, 90), "step");
  const together = Math.ceil(count / 64);
  const name = (column) => {
    const first = column * together, last = Math.min(first + together, count) - 1;
    return [first === last ? `expert ${first}` : `experts ${first} to ${last}`, first];
  };
  const shared = together > 1 ? ` A cell stands for ${together} neighbours, and shows the largest.` : "";
  for (const [when, counts] of [["in all steps", all], ["in the newest steps", newest]]) {
    const sums = counts.map((row) => row.reduce((sum, tokens) => sum + tokens, 0));
    const shares = counts.map((row, at) => gathered(row, 64).map((tokens) => tokens / sums[at]));
    const largest = Math.max(2 * even, ...shares.flat());
    heatMap("experts", `Tokens of each expert, ${when}`,
      `Each expert's share of the choices of a layer's tokens, until step ${until}; even would be ${percent(even)}.` +
        shared,
      labels, shares.map((row) => row.map((share) => [share / largest / 2, percent(share)])), name, "expert");
  }
}

// --- the loss over a setting in which the runs differ: a dot for each run

// The least validation loss where any run has one, else the newest training loss.
const tested = page.runs.some((run) => run.series.val_loss?.length);
const least = ({ val_loss }) => (val_loss?.length ? Math.min(...val_loss.map((point) => point[2] ?? point[1])) : null);
const result = ({ series }) => (tested ? least(series) : series.loss?.at(-1)[1] ?? null);

function settingChart({ name, values }) {
  const dots = page.runs
    .map((run, at) => ({ run, value: values[at], loss: result(run), colour: at % 10 }))
    .filter((dot) => dot.loss !== null);
  const place = dots.length > 1 && card("loss-over", name);
  if (!place) return;
  const kinds = [...new Set(dots.map((dot) => dot.value))], numbers = kinds.every((kind) => typeof kind === "number");
  const [low, high] = numbers ? [Math.min(...kinds), Math.max(...kinds)] : [0, kinds.length - 1];
  const logarithmic = low > 0 && high / low >= 8, room = (high - low) * 0.08 || 0.5;
  const ends = logarithmic ? [low / 1.2, high * 1.2] : [low - room, high + room];
  const at = (value) => (numbers ? value : kinds.indexOf(value));
  const losses = dots.map((dot) => dot.loss), margin = 0.08 * (Math.max(...losses) - Math.min(...losses)) || 0.1;
  const drawDots = (chart) => {
    const x = axis(...ends, LEFT, chart.svg.clientWidth - RIGHT, logarithmic);
    const y = axis(Math.min(...losses) - margin, Math.max(...losses) + margin, chart.height - BOTTOM, TOP, false);
    const words = (value) => (numbers ? short(value) : String(value).slice(0, 12));
    const few = kinds.map((value) => [at(value), words(value)]);
    const ticks = ticksOf(...ends, 5, logarithmic).map((tick) => [tick, short(tick)]);
    frame(chart, x, y, name, kinds.length <= 6 ? few : numbers ? ticks : []);
    for (const { run, value, loss, colour } of dots) {
      const dot = { cx: x.at(at(value)), cy: y.at(loss), r: 5, class: `dot c${colour}` };
      tip(add(chart.svg, "circle", dot), `${run.name}: ${short(loss)}`);
    }
  };
  charts.push({ unit: tested ? "least validation loss" : "training loss at the end", draw: drawDots, ...picture(place, `loss over ${name}`, 240) });
}

// --- the switches

const form = document.querySelector("form.look");
const redraw = () => charts.forEach((chart) => { chart.drawn = null; chart.draw(chart); });

function choose(range) {
  if (range && look.over === "step") range = [Math.floor(range[0]), Math.ceil(range[1])];
  if (range) look.ranges[look.over] = range; else delete look.ranges[look.over];
  [form.from.value, form.to.value] = range ? range.map((end) => +end.toPrecision(6)) : ["", ""];
  redraw();
}

form.addEventListener("input", () => {
  [look.logValues, look.logSteps, look.smooth] = [form.values.checked, form.steps.checked, +form.smooth.value];
  if (look.over !== form.over.value) [form.from.value, form.to.value] = ["", ""];
  look.over = form.over.value;
  const lines = charts.flatMap((chart) => chart.lines || []).map(placed);
  const ends = lines.flatMap((line) => [line.points[0][0], line.points.at(-1)[0]]);
  const from = +form.from.value || Math.min(...ends), to = +form.to.value || Math.max(...ends);
  if (from < to && (form.from.value || form.to.value)) look.ranges[look.over] = [from, to];
  else delete look.ranges[look.over];
  redraw();
});
form.addEventListener("reset", () => setTimeout(() => {
  look.ranges = {};
  form.over.value = usual;
  form.dispatchEvent(new Event("input"));
}));
form.addEventListener("submit", (event) => event.preventDefault());

for (const section in SECTIONS) for (const each of SECTIONS[section]) lineCharts(section, each);
if (many) page.settings.forEach(settingChart);
else {
  const [run] = page.runs;
  shareChart(page.runs);
  rankChart("Peak memory by rank", "GiB", run.memory_gib);
  rankChart("Computing time by rank", "seconds of a step, without waiting", run.compute_s, run.slow);
  layerMap("Update over weights, by layer", "Root mean square of a step's update over that of the layer's weights. The " +
    "largest of neighbouring steps; shades are logarithmic.", run.layers.relative_update);
  layerMap("Largest attention logit, by layer", "Before softmax. Shades are logarithmic.",
    run.layers.layer_attention_logit);
  layerMap("Output, by layer", "Root mean square. Shades are logarithmic.", run.layers.activation_rms);
  layerMap("Gradient, by layer", "Root mean square before clipping. Shades are logarithmic.", run.layers.gradient_rms);
  if (run.experts) expertMaps(run.experts);
}
form.over.value = usual;
form.hidden = !charts.some((chart) => chart.lines);
charts.filter((chart) => chart.lines).forEach((chart) => listen(chart, choose));
addEventListener("resize", redraw);
redraw();
