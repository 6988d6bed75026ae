// The page: reads the data once, draws every section, redraws on a change of axis, smoothing, width or visible runs.

const DATA = JSON.parse(document.getElementById("data").textContent), RUNS = DATA.runs;
const COLORS = ["#1f6fb2", "#d9622b", "#2f8f5b", "#8a56b0", "#b8860b", "#c23b6b", "#2a9aa8", "#6b7684"];
const DIVERGING = [[33, 84, 143], [103, 160, 207], [246, 246, 244], [228, 134, 94], [165, 38, 42]];
const SEQUENTIAL = [[247, 248, 250], [189, 211, 232], [105, 163, 209], [38, 103, 166], [9, 46, 97]];
const AXES = { s: "step", tokens: "tokens", flops: "FLOPs", hours: "hours" };
const EVENT_COLORS = { skip: "#c28a00", rollback: "#b3261e", hang: "#b3261e", error: "#b3261e", checkpoint: "#c28a00",
  resume: "#2f8f5b", restart: "#2f8f5b", preempt: "#8a56b0", config: "#8a56b0" };
const state = { axis: "s", log: false, smooth: 8, hidden: new Set(), run: 0 };
RUNS.forEach((run, i) => {
  run.color = COLORS[i % COLORS.length];
  for (const key in run.heat) {
    const raw = atob(run.heat[key].data), bytes = new Uint8Array(raw.length);
    for (let k = 0; k < raw.length; k++) bytes[k] = raw.charCodeAt(k);
    run.heat[key].bytes = bytes;
  }
});
const byId = id => document.getElementById(id);
const last = a => a && a.length ? a[a.length - 1] : null;
const finite = a => a.filter(v => v !== null && isFinite(v));
const lastOf = (run, key) => run.series[key] ? last(finite(run.series[key].y)) : null;
const visible = () => RUNS.filter((_, i) => !state.hidden.has(i));

function toAxis(run, steps) {
  const table = run.axes[state.axis];
  if (state.axis === "s" || !table) return steps;
  const xs = run.axes.s;
  let j = 0;
  return steps.map(s => {
    while (j + 1 < xs.length && xs[j + 1] < s) j++;
    if (j + 1 >= xs.length || s <= xs[j]) return s <= xs[0] ? table[0] * (state.axis === "hours" ? 1 : s / xs[0]) : last(table);
    return table[j] + (s - xs[j]) / (xs[j + 1] - xs[j]) * (table[j + 1] - table[j]);
  });
}
function smoothed(y, width) {
  if (width < 1 || y.length < 5) return y;
  const sigma = width * y.length / 900 + width / 12, reach = Math.ceil(2.5 * sigma), kernel = [];
  for (let k = -reach; k <= reach; k++) kernel.push(Math.exp(-.5 * (k / sigma) ** 2));
  return y.map((_, i) => {
    let total = 0, weight = 0;
    for (let k = -reach; k <= reach; k++) {
      const v = y[i + k];
      if (v !== undefined && v !== null) { total += v * kernel[k + reach]; weight += kernel[k + reach]; }
    }
    return weight ? total / weight : null;
  });
}
function scalarLines(key, options) {
  return visible().filter(r => r.series[key]).map(r => {
    const s = r.series[key];
    const soft = options && options.smooth ? smoothed(s.y, state.smooth) : s.y;
    return Object.assign({ name: RUNS.length > 1 ? r.name : (options && options.name) || key, color: r.color, x: toAxis(r, s.s), y: soft,
      raw: soft !== s.y && !s.lo ? s.y : null, lo: s.lo, hi: s.hi }, options && options.line);
  });
}

function header() {
  byId("title").textContent = DATA.title;
  const when = Math.max(...RUNS.map(r => r.last_time || 0));
  const names = RUNS.length > 1 ? RUNS.map(r => r.name).join(", ") + " · " : "";
  byId("subtitle").textContent = names + (when ? "last logged " + new Date(when * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "");
  for (const section of document.querySelectorAll("section[data-name]"))
    if (section.childElementCount) tag("a", { href: "#" + section.id }, byId("nav"), section.dataset.name);
}

function summary() {
  const host = byId("summary"), facts = RUNS.map(r => {
    const loss = r.series["train/loss"], tail = loss ? finite(loss.y).slice(-Math.max(1, Math.round(loss.y.length / 25))) : [];
    return {
      run: r, steps: loss ? last(loss.s) : null, loss: tail.length ? tail.reduce((a, b) => a + b) / tail.length : null,
      valid: lastOf(r, "valid/loss"), bits: lastOf(r, "valid/bits_per_byte"), tokens: lastOf(r, "train/consumed_tokens"),
      speed: r.series["train/tokens_per_second"] ? quantile(r.series["train/tokens_per_second"].y, .5) : null,
      mfu: lastOf(r, "train/mfu"), vio: lastOf(r, "moe/max_vio"),
    };
  });
  const two = v => v === null ? "–" : v.toFixed(2);
  const columns = [["steps", f => f.steps === null ? "–" : f.steps.toLocaleString("en")], ["training loss", f => two(f.loss)], ["validation loss", f => two(f.valid)],
    ["bits per byte", f => two(f.bits)], ["tokens", f => number(f.tokens)], ["tokens/s (median)", f => number(f.speed)],
    ["MFU", f => f.mfu === null ? "–" : (100 * f.mfu).toFixed(1) + "%"], ["MaxVio", f => two(f.vio)]]
    .filter(([_, get]) => facts.some(f => get(f) !== "–"));
  if (RUNS.length === 1) {
    const tiles = tag("div", { class: "tiles" }, host);
    for (const [name, get] of columns) { const t = tag("div", { class: "tile" }, tiles); tag("b", {}, t, get(facts[0])); tag("span", {}, t, name); }
    return;
  }
  const table = tag("table", {}, tag("div", { class: "scroll" }, host)), head = tag("tr", {}, tag("thead", {}, table)), body = tag("tbody", {}, table);
  tag("th", {}, head, "run");
  for (const [name] of columns) tag("th", {}, head, name);
  for (const f of facts) {
    const row = tag("tr", {}, body), cell = tag("td", {}, row);
    tag("span", { class: "swatch", style: "background:" + f.run.color }, cell);
    cell.appendChild(document.createTextNode(f.run.name));
    for (const [_, get] of columns) tag("td", {}, row, get(f));
  }
}

function controls() {
  const axis = byId("axis");
  for (const key in AXES) {
    if (key !== "s" && !RUNS.every(r => r.axes[key])) continue;
    const button = tag("button", { type: "button", "aria-pressed": key === state.axis, "data-axis": key }, axis, AXES[key]);
    button.addEventListener("click", () => {
      state.axis = key;
      for (const b of axis.children) b.setAttribute("aria-pressed", b === button);
      draw();
    });
  }
  byId("log").addEventListener("change", e => { state.log = e.target.checked; draw(); });
  byId("smooth").addEventListener("input", e => { state.smooth = +e.target.value; draw(); });
  const legend = byId("legend");
  if (RUNS.length < 2) { legend.remove(); return; }
  RUNS.forEach((run, i) => {
    const button = tag("button", { type: "button", "aria-pressed": true }, legend);
    tag("span", { class: "swatch", style: "background:" + run.color }, button);
    button.appendChild(document.createTextNode(run.name));
    button.addEventListener("click", () => {
      state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i);
      button.setAttribute("aria-pressed", !state.hidden.has(i));
      draw();
    });
  });
}

function eventMarks() {
  const marks = [];
  for (const run of visible()) {
    const shown = run.events.filter(e => e.kind in EVENT_COLORS).slice(-60), xs = toAxis(run, shown.map(e => e.step));
    shown.forEach((e, i) => marks.push({ x: xs[i], color: EVENT_COLORS[e.kind], title: `${e.kind}, step ${e.step.toLocaleString("en")}` + (RUNS.length > 1 ? `, ${run.name}` : ""), text: e.message }));
  }
  return marks;
}
function drawLoss() {
  const train = scalarLines("train/loss", { smooth: true, name: "training" });
  const valid = scalarLines("valid/loss", { name: "validation", line: { points: true, thin: true } });
  train.forEach(l => { const end = last(finite(l.y)); if (end !== null) l.label = RUNS.length > 1 ? end.toFixed(2) : `training ${end.toFixed(2)}`; });
  if (RUNS.length === 1 && valid.length) { valid[0].color = COLORS[1]; valid[0].label = `validation ${last(finite(valid[0].y)).toFixed(2)}`; }
  else valid.forEach(l => { l.name += " validation"; });
  const lines = [...train, ...valid], floor = visible().map(r => lastOf(r, "valid/unigram_loss")).find(v => v !== null && v !== undefined);
  if (floor !== undefined && train.length) {
    const ends = [Math.min(...train.map(l => l.x[0])), Math.max(...train.map(l => last(l.x)))];
    lines.push({ name: "unigram model", color: "var(--quiet)", x: ends, y: [floor, floor], dash: "5 4", thin: true, label: `unigram ${floor.toFixed(2)}`, quietTip: true });
  }
  lineChart(byId("loss-chart"), { lines, height: 400, xName: AXES[state.axis], yName: "loss, nats per token", logX: state.log, marks: eventMarks(), clip: true });
}
function panels(host, list) {
  host.replaceChildren();
  const drawings = []; // all boxes first, because a lone box is as wide as the row
  for (const p of list) {
    const lines = p.lines ? p.lines() : scalarLines(p.key, { smooth: p.smooth, name: p.title });
    if (!lines.length || (p.rare && !lines.some(l => l.y.some(v => v)))) continue;
    drawings.push([panel(host, p.title), { lines, xName: AXES[state.axis], yName: p.title, logX: state.log, zero: p.zero !== false, clip: p.clip }]);
  }
  for (const [box, spec] of drawings) lineChart(box, spec);
}
function panel(host, title) {
  const box = tag("div", {}, host);
  tag("h3", {}, box, title);
  return tag("div", { class: "chart" }, box);
}
function drawOptim() {
  panels(byId("optim"), [{ key: "train/lr", title: "Learning rate" }, { key: "train/grad_norm", title: "Gradient norm", clip: true, smooth: true },
    { key: "train/update_norm", title: "Update norm", clip: true, smooth: true }]);
}

// A section with a heatmap per step: run chooser, slider, play, the map, its key, and whatever charts go beneath.
function heatSection(id, key, text) {
  const host = byId(id), having = RUNS.filter(r => r.heat[key]);
  if (!having.length) return null;
  let run = having[0], frame = run.heat[key].steps.length - 1, timer = 0;
  const head = tag("div", { class: "head" }, host), words = tag("div", {}, head);
  tag("h2", {}, words, text.title);
  tag("p", { class: "note" }, words, text.note);
  if (having.length > 1) {
    const select = tag("select", { "aria-label": "run" }, tag("div", { class: "controls" }, head));
    having.forEach((r, i) => tag("option", { value: i }, select, r.name));
    select.addEventListener("change", () => { run = having[+select.value]; frame = run.heat[key].steps.length - 1; setUp(); });
  }
  const player = tag("div", { class: "player" }, host);
  const play = tag("button", { type: "button" }, player, "Play");
  const slider = tag("input", { type: "range", min: 0, "aria-label": "step", class: "step" }, player), out = tag("output", {}, player);
  const heat = tag("div", { class: "heat" }, host), field = tag("div", { class: "field" }, heat);
  const rows = tag("div", { class: "rows" }, field), canvas = tag("canvas", {}, field), cols = tag("div", { class: "cols" }, field);
  const legend = tag("div", { class: "key" }, heat);
  tag("i", { style: "background:linear-gradient(to top," + text.colors.map(c => `rgb(${c})`).join(",") + ")" }, legend);
  const labels = tag("div", {}, legend);
  for (const l of text.legend) tag("span", {}, labels, l);
  const below = tag("div", { class: "two" }, host);
  function ticks(parent, count, place, every, name) { // numbers of cells, or names of the edges between them
    parent.replaceChildren();
    for (let i = 0; name ? i <= count : i < count; i += every)
      tag("span", { style: `${place}:${100 * (i + (name ? 0 : .5)) / count}%` }, parent, name ? name(i, count) : String(i));
  }
  function setUp() {
    const h = run.heat[key];
    slider.max = h.steps.length - 1;
    canvas.style.height = Math.min(520, Math.max(120, h.rows * (h.rows > 40 ? 6 : 20))) + "px";
    ticks(rows, h.rows, "top", Math.max(1, Math.ceil(h.rows / 14)));
    ticks(cols, h.columns, "left", Math.max(1, Math.ceil(h.columns / 16)), text.columnLabel);
    tag("span", { style: "right:0;left:auto;top:15px;transform:none" }, cols, text.caption || `${text.column} across, ${text.row} down`);
    show();
  }
  function show() {
    const h = run.heat[key];
    slider.value = frame;
    out.textContent = `step ${h.steps[frame].toLocaleString("en")}`;
    drawHeat(canvas, h, frame, text.colors);
    if (text.below) text.below(below, run, h.steps[frame]);
  }
  slider.addEventListener("input", () => { frame = +slider.value; show(); });
  play.addEventListener("click", () => {
    if (timer) { clearInterval(timer); timer = 0; play.textContent = "Play"; return; }
    if (frame >= +slider.max) frame = 0;
    play.textContent = "Pause";
    timer = setInterval(() => {
      if (frame >= +slider.max) { clearInterval(timer); timer = 0; play.textContent = "Play"; } else { frame++; show(); }
    }, Math.max(60, 6000 / (+slider.max + 1)));
  });
  canvas.addEventListener("pointermove", event => {
    const h = run.heat[key], rect = canvas.getBoundingClientRect();
    const c = Math.min(h.columns - 1, Math.max(0, Math.floor((event.clientX - rect.left) / rect.width * h.columns)));
    const r = Math.min(h.rows - 1, Math.max(0, Math.floor((event.clientY - rect.top) / rect.height * h.rows)));
    const v = h.bytes[(frame * h.rows + r) * h.columns + c];
    showTip(event, [{ text: v === 255 ? "not there" : text.value(v / 254 * h.top, v === 254) }], `${text.row} ${r}, ${text.column} ${text.columnLabel ? text.columnLabel(c, h.columns) + " to " + text.columnLabel(c + 1, h.columns) : c}`);
  });
  canvas.addEventListener("pointerleave", hideTip);
  setUp();
  return show;
}
function layerLines(run, key) {
  const data = run.layers[key];
  if (!data) return [];
  return data.y.map((y, i) => {
    const c = ramp(.35 + .65 * (data.y.length > 1 ? i / (data.y.length - 1) : 1), SEQUENTIAL);
    return { name: `layer ${i}`, color: `rgb(${c})`, x: toAxis(run, data.s), y, thin: true };
  });
}
const redraws = [];
function expertSection() {
  const show = heatSection("experts", "moe/load", {
    title: "Expert load", row: "MoE layer", column: "expert", colors: DIVERGING, legend: ["double or more", "fair share", "idle"],
    note: "Tokens routed to each expert, relative to a fair share of its layer. MaxVio is the surplus of the most loaded expert; 0 is perfect balance.",
    value: (v, clipped) => (clipped ? "at least " : "") + v.toFixed(2) + " of a fair share",
    below: (host, run, step) => {
      host.replaceChildren();
      const drawings = [];
      const late = step === last(run.heat["moe/load"].steps), cursor = late ? undefined : toAxis(run, [step])[0];
      const worst = run.series["moe/max_vio"], bias = ["moe/bias_min", "moe/bias_max"].filter(k => run.series[k]);
      const charts = [["MaxVio of the worst layer", worst ? [{ name: "MaxVio", color: "#a5262a", x: toAxis(run, worst.s), y: worst.y, lo: worst.lo, hi: worst.hi }] : [], true],
        ["MaxVio of each layer (darker is deeper)", layerLines(run, "moe/max_vio_per_layer"), true],
        ["Router bias, least and greatest", bias.map((k, i) => ({ name: k, label: i ? "greatest" : "least", color: COLORS[i], x: toAxis(run, run.series[k].s), y: run.series[k].y })), false]];
      for (const [title, lines, zero] of charts) {
        if (!lines.length) continue;
        drawings.push([panel(host, title), { lines, xName: AXES[state.axis], yName: title, logX: state.log, zero, cursor, clip: true, height: 170 }]);
      }
      for (const [box, spec] of drawings) lineChart(box, spec);
    },
  });
  if (show) redraws.push(show);
}
function depthSection() {
  const show = heatSection("depth", "depth/attention", {
    title: "Depth attention", row: "sublayer", column: "block", colors: SEQUENTIAL, legend: ["all of it", "half", "none"],
    note: "Which earlier block each sublayer reads through its attention residual: weights over the block outputs, the embedding first; each row sums to 1.",
    value: v => (100 * v).toFixed(1) + "% of its input",
  });
  if (show) redraws.push(show);
}

function layerPanel(key, title, options) {
  return { title, zero: !(options && options.free), lines: () => {
    const scalar = scalarLines(key, { name: title });
    if (scalar.length) return scalar;
    const having = visible().filter(r => r.layers[key]);
    if (having.length === 1) return layerLines(having[0], key);
    return having.map(r => { // several runs: the mean over layers of each
      const d = r.layers[key];
      return { name: r.name, color: r.color, x: toAxis(r, d.s), y: d.s.map((_, i) => d.y.reduce((a, l) => a + l[i], 0) / d.y.length) };
    });
  } };
}
function decayLevels(key) { // quantiles of one run as three lines; one line a run when there are several
  const names = [["p95", "95 %"], ["p50", "median"], ["p05", "5 %"]].filter(([q]) => RUNS.some(r => r.series[key + q]));
  if (visible().length !== 1) return scalarLines(key + "p50", { name: "median" });
  return names.flatMap(([q, label]) => scalarLines(key + q, { name: label, line: { label, color: COLORS[q === "p50" ? 0 : 6], thin: q !== "p50" } }));
}
function decaySection() {
  const list = [
    Object.assign(layerPanel("kda/decay_mean", "Mean decay", { free: true }), { probe: "kda/decay_mean" }),
    Object.assign(layerPanel("kda/near_bound_share", "Share of channels near the bound"), { probe: "kda/near_bound_share" }),
    { title: "Log decay: quantiles over channels and tokens", probe: "kda/log_decay_p50", zero: false, lines: () => decayLevels("kda/log_decay_") },
  ].filter(p => RUNS.some(r => r.series[p.probe] || r.layers[p.probe]));
  const text = {
    title: "Decay", row: "KDA layer", column: "bin", colors: SEQUENTIAL, legend: ["most", "", "none"],
    note: "How much of its state a KDA channel keeps from one token to the next: the distribution over channels and tokens of every layer, from 0 (forgets all) on the left to 1 (keeps all) on the right.",
    value: v => (100 * v).toFixed(1) + "% of channels and tokens",
    columnLabel: (i, n) => String(+(i / n).toFixed(2)), caption: "decay across, KDA layer down",
  };
  const show = heatSection("decay", "kda/decay_histogram", text), host = byId("decay");
  if (show) redraws.push(show);
  else if (list.length) tag("h2", {}, tag("div", { class: "head" }, host), "Decay");
  if (list.length) { const grid = tag("div", { class: "two" }, host); redraws.push(() => panels(grid, list)); }
}
function plainSection(id, title, note, list) {
  const has = p => RUNS.some(r => p.key ? r.series[p.key] : (r.series[p.probe] || r.layers[p.probe]));
  const shown = list.filter(has);
  if (!shown.length) return;
  const host = byId(id), head = tag("div", { class: "head" }, host), words = tag("div", {}, head);
  tag("h2", {}, words, title);
  if (note) tag("p", { class: "note" }, words, note);
  const grid = tag("div", { class: "two" }, host);
  redraws.push(() => panels(grid, shown));
}
function eventSection() {
  const all = RUNS.flatMap(r => r.events.map(e => Object.assign({ run: r }, e))).sort((a, b) => (b.time || 0) - (a.time || 0) || b.step - a.step);
  if (!all.length) return;
  const host = byId("events"), hidden = RUNS.reduce((n, r) => n + r.events_left_out, 0);
  tag("h2", {}, tag("div", { class: "head" }, host), "Events");
  if (hidden) tag("p", { class: "note" }, host, `${hidden.toLocaleString("en")} earlier events are left out here; metrics.jsonl has them.`);
  const table = tag("table", {}, tag("div", { class: "more" }, tag("div", { class: "events" }, host)));
  for (const e of all) {
    const row = tag("tr", {}, table);
    tag("td", {}, row, e.time ? new Date(e.time * 1000).toISOString().slice(0, 16).replace("T", " ") : "");
    if (RUNS.length > 1) tag("td", {}, row, e.run.name);
    tag("td", {}, row, "step " + e.step.toLocaleString("en"));
    tag("span", { class: "kind", style: "color:" + (EVENT_COLORS[e.kind] || "var(--quiet)") }, tag("td", {}, row), e.kind);
    tag("td", {}, row, e.message);
  }
}
function draw() { drawLoss(); drawOptim(); for (const redraw of redraws) redraw(); }

summary();
controls();
expertSection();
depthSection();
decaySection();
plainSection("speed", "Throughput", "", [{ key: "train/tokens_per_second", title: "Tokens per second", clip: true }, { key: "train/step_seconds", title: "Seconds per step", clip: true },
  { key: "train/mfu", title: "MFU" }, { key: "train/tflops", title: "TFLOP/s a device", clip: true }, { key: "train/memory_gb", title: "Memory, GB" },
  { key: "checkpoint/save_seconds", title: "Seconds to write a checkpoint" }, { key: "train/skipped_steps", title: "Skipped steps, in all", rare: true }]);
eventSection();
header();
draw();
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(draw, 120); });
document.documentElement.dataset.ready = "true";
