"use strict";
// Summary, time and settings; starts the page.

const PAGE_DATA = JSON.parse(document.getElementById("data").textContent);
const extraMetrics = [];
const byId = (id) => document.getElementById(id);

function duration(seconds) {
  const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}

function when(date) {
  const time = new Date(date);
  if (!date || Number.isNaN(time.getTime())) return "-";
  return `${time.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short", timeZone: "UTC" })} UTC`;
}

function heldOut(found) {
  if (!found) return "-";
  const form = (x) => found.is_binary ? (100 * x).toFixed(1) : short(x);
  const interval = found.low === null ? "" : ` (${form(found.low)} to ${form(found.high)})`;
  return `${form(found.mean)}${found.is_binary ? " %" : ""}${interval}`;
}

function gib(bytes) {
  return bytes === null ? "-" : `${(bytes / 2 ** 30).toFixed(1)} GiB`;
}

function drawRun(run, number) {
  const card = add(byId("runs"), "article", null, "card");
  const name = add(card, "h3", run.label);
  if (PAGE_DATA.runs.length > 1) name.style.setProperty("border-left", `.35rem solid ${color(number)}`);
  if (PAGE_DATA.runs.length > 1) name.style.setProperty("padding-left", ".5rem");
  for (const found of run.alarms) {
    add(card, "p", `${found.is_alarm ? "Alarm" : "Warning"}: ${found.text} (since about step ${found.since})`,
      found.is_alarm ? "finding alarm" : "finding");
  }
  if (run.error && run.phase === "failed") add(card, "p", `The run failed: ${run.error}`, "finding alarm");
  else if (run.error) add(card, "p", `Stopped: ${run.error}`, "finding");
  if (!run.is_judged) add(card, "p", `${run.steps} steps are too few for most alarms.`, "hint");
  else if (run.alarms.length === 0) add(card, "p", "No alarm.", "finding fine");
  if (run.held_out.length < 2) add(card, "p", "Reward hacking cannot be seen: fewer than two held-out evaluations (eval.limit, eval.every).", "hint");
  for (const text of run.unreadable) add(card, "p", text, "finding");
  const tiles = add(card, "dl", null, "tiles");
  const tile = (label, value) => { const box = add(tiles, "div"); add(box, "dt", label); add(box, "dd", value); };
  tile("state", run.phase);
  tile("steps", `${run.steps} of ${run.num_steps}`);
  tile("reward, first and last fifth", `${short(run.reward_first)} to ${short(run.reward_last)}`);
  const score = run.held_out_first ? run.held_out_first.name : "score";
  tile(`held-out ${score}, before`, heldOut(run.held_out_first));
  tile(`held-out ${score}, after`, heldOut(run.held_out_last));
  tile("time of steps", duration(run.step_seconds || 0));
  tile("tokens/s", short(run.tokens_per_second));
  tile("memory", gib(run.peak_memory_bytes));
  if (run.peak_gpu_memory_bytes !== null) tile("GPU memory", gib(run.peak_gpu_memory_bytes));
  tile("model", run.model);
  tile("algorithm", `${run.algorithm}, rank ${run.rank}, seed ${run.seed}`);
  tile("last write", when(run.updated_at));
}

function drawTime() {
  for (const run of PAGE_DATA.runs) {
    const box = add(byId("split"), "div"), parts = Object.entries(run.time);
    const total = parts.reduce((sum, [, s]) => sum + s, 0);
    if (PAGE_DATA.runs.length > 1) add(box, "h3", run.label);
    if (!(total > 0)) { add(box, "p", "No step has recorded its time.", "hint"); continue; }
    const bar = add(box, "div", null, "bar"), legend = add(box, "div", null, "chips");
    parts.forEach(([name, seconds], k) => {
      const part = add(bar, "span");
      part.style.setProperty("width", `${100 * seconds / total}%`);
      part.style.setProperty("background", color(k));
      const chip = add(legend, "span", `${name} ${(100 * seconds / total).toFixed(0)} %, ${duration(seconds)}`, "chip");
      chip.style.setProperty("border-left", `.8rem solid ${color(k)}`);
    });
  }
}

function drawTable(parent, title, names, columns, isChanged, open) {
  const details = add(parent, "details"), scroll = (add(details, "summary", title), add(details, "div", null, "scroll"));
  details.open = open;
  const table = add(scroll, "table", null, "facts"), head = add(table, "tr");
  add(head, "th", "");
  for (const run of PAGE_DATA.runs) add(head, "th", run.label);
  for (const name of names) {
    const row = add(table, "tr");
    add(row, "th", name);
    columns.forEach((values, k) => {
      const value = values[name];
      add(row, "td", value === undefined ? "-" : typeof value === "string" ? value : JSON.stringify(value),
        isChanged(name, k) ? "changed" : "");
    });
  }
}

function drawSettings() {
  const runs = PAGE_DATA.runs, box = byId("facts"), settings = runs.map((r) => r.settings);
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const names = [...new Set(settings.flatMap(Object.keys))];
  const changed = (name, k) => !same(settings[k][name], runs[k].defaults[name]);
  const differing = names.filter((n) => settings.some((s) => !same(s[n], settings[0][n])));
  const chosen = names.filter((n) => settings.some((s, k) => changed(n, k)));
  if (runs.length > 1) drawTable(box, `Settings that differ (${differing.length})`, differing, settings, changed, true);
  drawTable(box, `Settings other than the defaults (${chosen.length})`, chosen, settings, changed, runs.length === 1);
  drawTable(box, `All settings (${names.length})`, names, settings, changed, false);
  const machines = runs.map((r) => ({ "run made by skylite": r.skylite_version, ...r.machine }));
  drawTable(box, "Versions and hardware", [...new Set(machines.flatMap(Object.keys))], machines, () => false, true);
  if (runs.some((r) => Object.keys(r.machine).length === 0)) add(box, "p", "A run without machine.json did not record its versions and hardware.", "hint");
  for (const run of runs) {
    const details = add(box, "details"), list = (add(details, "summary", `Automatic choices of ${run.label}`), add(details, "ul"));
    for (const text of run.choices) add(list, "li", text);
  }
}

function start() {
  byId("made").textContent = `made ${when(PAGE_DATA.made)} by skylite ${PAGE_DATA.version}`;
  PAGE_DATA.runs.forEach(drawRun);
  if (PAGE_DATA.runs.length > 1) PAGE_DATA.runs.forEach((run, k) => add(byId("legend"), "span", run.label).style.setProperty("--series", color(k)));
  const redraw = () => drawPlots(PAGE_DATA, byId("smooth").checked, extraMetrics);
  const metrics = [...new Set(PAGE_DATA.runs.flatMap((r) => Object.keys(r.metrics)))].filter((m) => m !== "step").sort();
  fill(byId("metric"), metrics.map((m) => [m, m]), "choose");
  byId("metric").addEventListener("input", (event) => { if (event.target.value) extraMetrics.unshift(event.target.value); redraw(); });
  byId("smooth").addEventListener("input", redraw);
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = getComputedStyle(root).getPropertyValue("color-scheme").trim();
    const isDark = dark === "dark" || (dark !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
    root.dataset.theme = isDark ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", fitPlots);
  redraw();
  drawTime();
  startSamples(PAGE_DATA);
  drawSettings();
}

start();
