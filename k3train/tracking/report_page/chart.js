"use strict";
// Line charts in SVG: axes with round ticks, min-max bands, direct labels at the line's end, a crosshair with a reading.

const NS = "http://www.w3.org/2000/svg";
function el(name, attrs, parent, text) {
  const node = document.createElementNS(NS, name);
  for (const k in attrs || {}) node.setAttribute(k, attrs[k]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}
function tag(name, attrs, parent, text) {
  const node = document.createElement(name);
  for (const k in attrs || {}) node.setAttribute(k, attrs[k]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function number(v, digits) {
  if (v === null || v === undefined || !isFinite(v)) return "–";
  const a = Math.abs(v);
  if (a >= 1e15) return v.toExponential(1).replace("e+", "e");
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (a >= size) return +(v / (unit === "k" ? 1e3 : size)).toPrecision(digits || 3) + unit;
  if (a >= 1000) return Math.round(v).toLocaleString("en");
  if (a !== 0 && a < 1e-3) return v.toExponential(1).replace("e-0", "e-");
  return String(+v.toPrecision(digits || 3));
}

function niceTicks(lo, hi, count) {
  if (!(hi > lo)) return [lo];
  const raw = (hi - lo) / count, power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= raw * 0.999);
  const out = [];
  for (let t = Math.ceil(lo / step - 1e-9) * step; t <= hi + step * 1e-6; t += step) out.push(Math.abs(t) < step * 1e-6 ? 0 : t);
  return out;
}
function logTicks(lo, hi) {
  const out = [];
  for (let e = Math.floor(Math.log10(lo)); e <= Math.ceil(Math.log10(hi)); e++)
    for (const m of hi / lo > 300 ? [1] : [1, 2, 5]) { const t = m * Math.pow(10, e); if (t >= lo && t <= hi) out.push(t); }
  return out.length ? out : [lo, hi];
}
function spread(labels, gap, top, bottom) {
  labels.sort((a, b) => a.y - b.y);
  for (let n = 0; n < 60; n++) {
    for (let i = 0; i + 1 < labels.length; i++) {
      const lack = gap - (labels[i + 1].y - labels[i].y);
      if (lack > 0) { labels[i].y -= lack / 2; labels[i + 1].y += lack / 2; }
    }
    for (const l of labels) l.y = Math.min(Math.max(l.y, top), bottom);
  }
}
function quantile(values, q) {
  const sorted = values.filter(v => v !== null && isFinite(v)).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : 0;
}

const tip = document.getElementById("tip");
function showTip(event, rows, title) {
  tip.replaceChildren();
  if (title) tag("div", { style: "opacity:.7" }, tip, title);
  for (const row of rows) {
    const line = tag("div", {}, tip);
    if (row.color) tag("span", { class: "swatch", style: "background:" + row.color }, line);
    line.appendChild(document.createTextNode(row.text));
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
}
const hideTip = () => { tip.hidden = true; };

// spec: { lines: [{ name, color, x, y, lo, hi, points, thin, dash, label, plain }], height, xName, yName, logX, zero, marks, cursor }
function lineChart(host, spec) {
  host.replaceChildren();
  const lines = spec.lines.filter(l => l.x.length);
  if (!lines.length) return null;
  const W = Math.max(host.clientWidth, 260), H = spec.height || 190;
  const labelled = lines.filter(l => l.label);
  const right = labelled.length ? Math.min(170, 14 + 6.6 * Math.max(...labelled.map(l => l.label.length))) : 10;
  const box = { l: 52, t: 12, r: W - right, b: H - 36 };
  let xs = [], ys = [];
  for (const l of lines) {
    for (let i = 0; i < l.x.length; i++) {
      if (spec.logX && !(l.x[i] > 0)) continue;
      xs.push(l.x[i]);
      if (l.y[i] !== null && isFinite(l.y[i])) ys.push(l.y[i]);
    }
    if (l.raw) ys.push(...l.raw.filter(v => v !== null));
    if (l.lo && !l.plain) ys.push(quantile(l.lo, 0.01), quantile(l.hi, 0.98));
  }
  if (!xs.length || !ys.length) return null;
  let x0 = xs.reduce((a, b) => Math.min(a, b)), x1 = xs.reduce((a, b) => Math.max(a, b));
  if (!spec.logX) x0 = x0 < 0.05 * x1 || x0 === x1 ? 0 : x0;
  if (!(x1 > x0)) x1 = x0 + 1;
  let y0 = spec.zero ? 0 : ys.reduce((a, b) => Math.min(a, b)), y1 = ys.reduce((a, b) => Math.max(a, b));
  if (spec.clip && ys.length > 20) y1 = Math.min(y1, y0 + (quantile(ys, 0.98) - y0) * 2.5);  // one spike must not flatten the rest
  const air = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
  if (!spec.zero) y0 -= air;
  y1 += air;
  const lx = v => spec.logX ? Math.log(v) : v, X = v => box.l + (lx(v) - lx(x0)) / (lx(x1) - lx(x0)) * (box.r - box.l);
  const Y = v => box.b - (v - y0) / (y1 - y0) * (box.b - box.t);
  const clampY = v => Math.min(Math.max(Y(v), box.t - 4), box.b);
  const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, height: H, role: "img", "aria-label": spec.yName || "" }, host);

  for (const t of niceTicks(y0, y1, Math.max(3, Math.round(H / 52)))) {
    el("line", { x1: box.l, x2: box.r, y1: Y(t), y2: Y(t), stroke: "var(--grid)" }, svg);
    el("text", { x: box.l - 8, y: Y(t) + 4, "text-anchor": "end" }, svg, number(t));
  }
  let lastText = -1e9;
  for (const t of spec.logX ? logTicks(x0, x1) : niceTicks(x0, x1, Math.max(3, Math.round(W / 130)))) {
    if (X(t) - lastText < 44) continue;
    lastText = X(t);
    el("line", { x1: X(t), x2: X(t), y1: box.b, y2: box.b + 4, stroke: "var(--faint)" }, svg);
    el("text", { x: X(t), y: box.b + 17, "text-anchor": "middle" }, svg, number(t));
  }
  el("line", { x1: box.l, x2: box.r, y1: box.b, y2: box.b, stroke: "var(--faint)" }, svg);
  el("text", { x: box.r, y: box.b + 32, "text-anchor": "end" }, svg, spec.xName || "step");

  for (const mark of spec.marks || []) {
    if (!(mark.x >= x0 && mark.x <= x1)) continue;
    el("line", { x1: X(mark.x), x2: X(mark.x), y1: box.t, y2: box.b, stroke: mark.color, "stroke-dasharray": "2 3", opacity: .75 }, svg);
    const dot = el("circle", { cx: X(mark.x), cy: box.t, r: 4, fill: mark.color, class: "mark" }, svg);
    dot.addEventListener("pointerenter", e => showTip(e, [{ text: mark.text }], mark.title));
    dot.addEventListener("pointerleave", hideTip);
  }
  const path = (l, get) => {
    let d = "", pen = false;
    for (let i = 0; i < l.x.length; i++) {
      const v = get(i);
      if (v === null || v === undefined || !isFinite(v) || (spec.logX && !(l.x[i] > 0))) { pen = false; continue; }
      d += (pen ? "L" : "M") + X(l.x[i]).toFixed(1) + " " + clampY(v).toFixed(1);
      pen = true;
    }
    return d;
  };
  for (const l of lines) {
    if (l.lo) {
      let up = "", down = "";
      for (let i = 0; i < l.x.length; i++) {
        if (l.lo[i] === null || l.hi[i] === null || (spec.logX && !(l.x[i] > 0))) continue;
        const px = X(l.x[i]).toFixed(1);
        up += (up ? "L" : "M") + px + " " + clampY(l.hi[i]).toFixed(1);
        down = "L" + px + " " + clampY(l.lo[i]).toFixed(1) + down;
      }
      el("path", { d: up + down + "Z", fill: l.color, opacity: .16 }, svg);
    }
    if (l.raw) el("path", { d: path(l, i => l.raw[i]), fill: "none", stroke: l.color, "stroke-width": 1, opacity: .28 }, svg);
    el("path", {
      d: path(l, i => l.y[i]), fill: "none", stroke: l.color, "stroke-width": l.thin ? 1.1 : 2, "stroke-linejoin": "round",
      "stroke-linecap": "round", "stroke-dasharray": l.dash || "none", opacity: l.thin ? .8 : 1,
    }, svg);
    if (l.points || l.x.length < 3) for (let i = 0; i < l.x.length; i++)
      if (l.y[i] !== null && (!spec.logX || l.x[i] > 0))
        el("circle", { cx: X(l.x[i]), cy: clampY(l.y[i]), r: 4, fill: l.color, stroke: "var(--card)", "stroke-width": 1.5 }, svg);
  }
  const ends = labelled.map(l => {
    let i = l.y.length - 1;
    while (i > 0 && (l.y[i] === null || !isFinite(l.y[i]))) i--;
    return { y: clampY(l.y[i]), text: l.label, color: l.color };
  });
  spread(ends, 15, box.t, box.b);
  for (const e of ends) el("text", { x: box.r + 8, y: e.y + 4, class: "label", style: `fill:${e.color}` }, svg, e.text);

  if (spec.cursor !== undefined && spec.cursor >= x0 && spec.cursor <= x1)
    el("line", { x1: X(spec.cursor), x2: X(spec.cursor), y1: box.t, y2: box.b, stroke: "var(--ink)", "stroke-width": 1.2 }, svg);
  const cross = el("line", { y1: box.t, y2: box.b, stroke: "var(--faint)", visibility: "hidden" }, svg);
  svg.addEventListener("pointermove", event => {
    if (event.target.classList.contains("mark")) return;
    const rect = svg.getBoundingClientRect(), px = (event.clientX - rect.left) * W / rect.width;
    if (px < box.l - 4 || px > box.r + 4) { cross.setAttribute("visibility", "hidden"); hideTip(); return; }
    const part = (px - box.l) / (box.r - box.l);
    const at = spec.logX ? Math.exp(lx(x0) + part * (lx(x1) - lx(x0))) : x0 + part * (x1 - x0);
    const rows = [];
    let snapped = at;
    for (const l of lines) {
      if (l.quietTip) continue;
      let lo = 0, hi = l.x.length - 1;
      while (lo < hi) { const mid = (lo + hi) >> 1; if (l.x[mid] < at) lo = mid + 1; else hi = mid; }
      if (lo > 0 && at - l.x[lo - 1] < l.x[lo] - at) lo--;
      if (!rows.length) snapped = l.x[lo];
      if (l.y[lo] !== null) rows.push({ color: l.color, text: `${l.name}  ${number(l.y[lo], 4)}`, v: l.y[lo] });
    }
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", X(snapped)); cross.setAttribute("x2", X(snapped));
    showTip(event, rows.slice(0, 14), `${spec.xName || "step"} ${number(snapped, 4)}`);
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
  return svg;
}

// Heatmap: one byte a cell, painted at the screen's own resolution; seams between cells while they are large enough.
function drawHeat(canvas, heat, frame, stops) {
  const small = document.createElement("canvas"), size = heat.rows * heat.columns, start = frame * size;
  small.width = heat.columns; small.height = heat.rows;
  const pen = small.getContext("2d"), image = pen.createImageData(heat.columns, heat.rows);
  for (let i = 0; i < size; i++) {
    const v = heat.bytes[start + i];
    if (v !== 255) image.data.set([...ramp(v / 254, stops), 255], 4 * i);
  }
  pen.putImageData(image, 0, 0);
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
  canvas.height = Math.max(1, Math.round(canvas.clientHeight * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  const w = canvas.width / heat.columns, h = canvas.height / heat.rows;
  if (w < 7 * scale || h < 7 * scale) return;
  const line = Math.max(1, Math.round(scale));
  for (let c = 1; c < heat.columns; c++) context.clearRect(Math.round(c * w - line / 2), 0, line, canvas.height);
  for (let r = 1; r < heat.rows; r++) context.clearRect(0, Math.round(r * h - line / 2), canvas.width, line);
}
function ramp(t, stops) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2), f = at - i;
  return [0, 1, 2].map(c => Math.round(stops[i][c] + f * (stops[i + 1][c] - stops[i][c])));
}
