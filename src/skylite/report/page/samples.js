"use strict";
// The browser of completions: filters, pages, and one prompt at several steps side by side.

const PAGE = 12;
const samples = { page: 0, prompt: null };
const field = (name) => document.getElementById("s-" + name);

function fill(select, values, all) {
  const chosen = select.value;
  select.replaceChildren();
  if (all !== undefined) add(select, "option", all).value = "";
  for (const [value, text] of values) add(select, "option", text).value = value;
  select.value = chosen;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}

function matching(run) {
  const [source, step, prompt, text] = ["source", "step", "prompt", "text"].map((n) => field(n).value);
  const low = field("min").value === "" ? -Infinity : Number(field("min").value);
  const high = field("max").value === "" ? Infinity : Number(field("max").value);
  const has = (where, what) => where.toLowerCase().includes(what.toLowerCase());
  const limited = low > -Infinity || high < Infinity;
  const found = run.completions.filter((c) =>
    (!source || c.source === source) && (!step || c.step === Number(step)) &&
    (samples.prompt === null || c.prompt === samples.prompt) &&
    (!prompt || has(c.prompt, prompt) || has(c.question, prompt)) &&
    (!text || [...c.turns, ...c.observed].some((t) => has(t, text))) &&
    (!limited || (c.reward !== null && c.reward >= low && c.reward <= high)));
  const order = field("order").value;
  const worth = (c) => c.reward === null ? -Infinity : c.reward;
  if (order === "best") found.sort((a, b) => worth(b) - worth(a));
  if (order === "worst") found.sort((a, b) => worth(a) - worth(b));
  if (order === "longest") found.sort((a, b) => b.tokens - a.tokens);
  return found;
}

// Right and wrong have colors. A partial reward has none: it says how much, not whether.
function mark(reward) {
  if (PAGE_DATA.runs.some((run) => run.has_partial_rewards)) return "";
  return reward === 1 ? " good" : reward === 0 ? " bad" : "";
}

function drawCompletion(parent, c, withQuestion) {
  const card = add(parent, "article", null, "card sample");
  const chips = add(card, "div", null, "chips");
  add(chips, "span", c.source === "training" ? `step ${c.step}` : `held-out, version ${c.step}`, "chip");
  add(chips, "span", `reward ${short(c.reward)}`, "chip" + mark(c.reward));
  add(chips, "span", `${c.tokens} tokens`, "chip");
  if (c.truncated) add(chips, "span", c.end === "stop" ? "truncated" : `limit of ${c.end}`, "chip bad");
  if (c.turns.length > 1) add(chips, "span", `${c.turns.length} turns`, "chip");
  const parts = Object.entries(c.components);
  if (parts.length > 1) for (const [name, score] of parts) add(chips, "span", `${name} ${short(score)}`, "chip");
  if (withQuestion) {
    add(chips, "span", c.prompt, "chip");
    const all = add(chips, "button", "this prompt at every step");
    all.type = "button";
    all.addEventListener("click", () => { samples.prompt = c.prompt; samples.page = 0; field("step").value = ""; drawSamples(); });
    add(card, "p", c.question, "text question");
  }
  c.turns.forEach((turn, k) => {
    if (c.turns.length > 1) {
      if (k > 0 && c.observed[k]) add(card, "p", c.observed[k], "text question");
      const reward = c.turn_rewards.length > 0 ? `, reward ${short(c.turn_rewards[k])}` : "";
      add(card, "p", `turn ${k + 1}${reward}`, "hint");
    }
    add(card, "p", turn, "text");
  });
  if (withQuestion) add(card, "p", `answer ${c.answer}`, "hint");
}

function drawSideBySide(parent, found) {
  const back = add(parent, "button", "Back to all prompts");
  back.type = "button";
  back.addEventListener("click", () => { samples.prompt = null; drawSamples(); });
  add(parent, "p", samples.prompt, "hint");
  if (found.length === 0) return;
  add(parent, "p", found[0].question, "text question");
  add(parent, "p", `answer ${found[0].answer}`, "hint");
  const columns = add(parent, "div", null, "columns");
  const steps = new Map();
  for (const c of found) steps.set(`${c.step}`, [...(steps.get(`${c.step}`) || []), c]);
  for (const step of [...steps.keys()].sort((a, b) => a - b)) {
    const column = add(columns, "div");
    add(column, "h3", `step ${step}`);
    for (const c of steps.get(step)) drawCompletion(column, c, false);
  }
}

function drawSamples() {
  const run = PAGE_DATA.runs[Number(field("run").value) || 0];
  const steps = [...new Set(run.completions.map((c) => c.step))].sort((a, b) => a - b);
  fill(field("step"), steps.map((s) => [s, s]), "all");
  const found = matching(run), list = field("list");
  list.replaceChildren();
  const pages = samples.prompt === null ? Math.max(1, Math.ceil(found.length / PAGE)) : 1;
  samples.page = Math.min(Math.max(0, samples.page), pages - 1);
  const inPage = run.completions.length < run.num_completions
    ? ` This page holds ${run.completions.length} of ${run.num_completions} completions; skylite samples shows all.` : "";
  field("count").textContent = `${found.length} completions.${inPage}`;
  if (samples.prompt !== null) drawSideBySide(list, found);
  else for (const c of found.slice(samples.page * PAGE, (samples.page + 1) * PAGE)) drawCompletion(list, c, true);
  field("page").textContent = `${samples.page + 1} of ${pages}`;
  field("back").disabled = samples.page === 0;
  field("next").disabled = samples.page >= pages - 1;
}

function startSamples(data) {
  fill(field("run"), data.runs.map((run, k) => [k, run.label]));
  for (const name of ["run", "source", "step", "prompt", "text", "min", "max", "order"]) {
    field(name).addEventListener("input", () => { samples.page = 0; if (name === "run") samples.prompt = null; drawSamples(); });
  }
  field("back").addEventListener("click", () => { samples.page -= 1; drawSamples(); });
  field("next").addEventListener("click", () => { samples.page += 1; drawSamples(); });
  drawSamples();
}
