"use strict";
// Curves with uPlot. Every string of a run goes into the page as a text node or a canvas text.

const COLORS = ["#3b7ddd", "#e07b00", "#2a9d5c", "#c2408f", "#8a6de0", "#b59b00", "#00a2b8", "#d1495b"];
const OTHER_KEY_DASH = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5];
const sync = uPlot.sync("curves");
const drawn = [];

const color = (index) => COLORS[index % COLORS.length];
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function add(parent, tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
}

function short(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

const SMOOTH_FROM = 20;

// A mean over the step and its neighbours. It follows a sudden fall within a few steps, on both sides of it:
// an exponential mean lags behind.
function smoothed(values) {
  const reach = Math.max(1, Math.round(values.length / 50));
  return values.map((value, k) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, k - reach), k + reach + 1).filter((v) => v !== null);
    return near.reduce((sum, v) => sum + v, 0) / near.length;
  });
}

// One value, or equal ones, lie in the middle of an axis of this width.
function around(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
  const pad = (high - low) / 10;
  return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
}

// uPlot gives a single step an axis from it to 100 steps later.
function aroundSteps(u, low, high) {
  const [first] = u.data[0];
  return u.data[0].length === 1 ? [first - 1, first + 1] : [low, high];
}

// One x axis for curves of several runs: the union of their steps.
function aligned(curves) {
  const xs = [...new Set(curves.flatMap((c) => c.x))].sort((a, b) => a - b);
  const row = new Map(xs.map((x, i) => [x, i]));
  return [xs, ...curves.map((c) => {
    const column = new Array(xs.length).fill(null);
    c.x.forEach((x, i) => { column[row.get(x)] = c.y[i]; });
    return column;
  })];
}

function curvesOf(plot, runs) {
  const curves = [];
  runs.forEach((run, number) => plot.keys.forEach((key, k) => {
    const name = (runs.length > 1 ? run.label + " " : "") + (plot.keys.length > 1 ? key : "");
    const look = { name: name.trim() || plot.title, color: color(runs.length > 1 ? number : k),
      dash: OTHER_KEY_DASH[(runs.length > 1 ? k : 0) % OTHER_KEY_DASH.length] };
    if (key === "held-out") {
      if (run.held_out.length === 0) return;
      const x = run.held_out.map((h) => h.version);
      curves.push({ ...look, x, y: run.held_out.map((h) => h.mean), points: true });
      curves.push({ ...look, name: look.name + " high", x, y: run.held_out.map((h) => h.high), edge: true });
      curves.push({ ...look, name: look.name + " low", x, y: run.held_out.map((h) => h.low), edge: true });
    } else if (run.metrics[key]) {
      const usable = (v) => v !== null && !(plot.log && v <= 0);
      curves.push({ ...look, x: run.metrics.step, y: run.metrics[key].map((v) => usable(v) ? v / plot.divisor : null) });
    }
  }));
  return curves;
}

function drawPlot(parent, plot, runs, smooth) {
  const curves = curvesOf(plot, runs);
  if (curves.length === 0) return;
  const figure = add(parent, "figure", null, "card");
  const caption = add(figure, "figcaption");
  add(caption, "h3", plot.title + (plot.unit ? ` (${plot.unit})` : plot.percent ? " (%)" : ""));
  add(caption, "p", plot.help, "hint");
  const series = [{ label: "step" }], bands = [], data = [];
  for (const curve of curves) {
    const scaled = { ...curve, y: curve.y.map((v) => v === null ? null : plot.percent ? 100 * v : v) };
    const value = (u, v) => short(v);
    const many = !curve.edge && !curve.points && smooth && plot.noisy && scaled.y.length >= SMOOTH_FROM;
    if (many) {
      data.push(scaled);
      series.push({ label: curve.name, stroke: curve.color + "99", width: 1, dash: curve.dash, value, points: { show: false }, inLegend: false });
    }
    data.push(many ? { ...scaled, y: smoothed(scaled.y) } : scaled);
    series.push({ label: curve.name, inLegend: !curve.edge, stroke: curve.edge ? curve.color + "44" : curve.color,
      width: curve.edge ? 1 : 2, dash: curve.dash, value, spanGaps: true,
      points: { show: Boolean(curve.points) || scaled.y.length < 3 } });
    if (curve.edge && bands.length * 3 + 2 < series.length && series.length % 3 === 1) {
      bands.push({ series: [series.length - 2, series.length - 1], fill: curve.color + "22" });
    }
  }
  const axis = { stroke: () => theme("--dim"), grid: { stroke: () => theme("--line"), width: 1 },
    ticks: { stroke: () => theme("--line") }, font: "11px system-ui" };
  const width = figure.clientWidth - 32;
  const options = { width, height: 210, series, bands, cursor: { sync: { key: sync.key }, y: false },
    scales: { x: { time: false, range: aroundSteps },
      y: plot.log ? { distr: 3 } : { range: (u, low, high) => around(low, high) } },
    axes: [{ ...axis, size: 28, incrs: WHOLE_STEPS }, { ...axis, size: 54, values: (u, ticks) => ticks.map((t) => t === null ? "" : plot.log ? short(t) : String(Number(t.toPrecision(7)))) }],
    legend: { live: true } };
  const chart = new uPlot(options, aligned(data), figure);
  // The raw curve behind a smooth one and the edges of a band need no entry of their own.
  series.forEach((one, k) => {
    if (one.inLegend === false) chart.root.querySelectorAll(".u-series")[k].classList.add("hidden");
  });
  drawn.push({ chart, figure });
}

function drawPlots(data, smooth, extra) {
  const parent = document.getElementById("plots");
  drawn.splice(0).forEach(({ chart }) => chart.destroy());
  parent.replaceChildren();
  const added = extra.map((key) => ({ title: key, keys: [key], help: "", unit: "", percent: false, log: false, noisy: true, divisor: 1 }));
  for (const plot of [...added, ...data.plots]) drawPlot(parent, plot, data.runs, smooth);
}

function fitPlots() {
  for (const { chart, figure } of drawn) chart.setSize({ width: figure.clientWidth - 32, height: 210 });
}
