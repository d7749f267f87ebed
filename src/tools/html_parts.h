// html_parts.h: the style and the script of the plan's picture.  Stage: tools.  Text only; html.cc draws what they move.
// The script reads what it says from the table of paths on the page, and where things stand from the picture's data attributes.
#pragma once

namespace kvloom {

inline constexpr const char* kPictureStyle = R"css(
:root { color-scheme: light dark; --paper: #fbfaf8; --ink: #1d2129; --soft: #667080; --line: #d9dce2; --panel: #ffffff; --heat: 230;
  --l: 64%; --c: .145; --stripe: #aab3c2; --past: #e3e6eb; --ring: #1d2129; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --ink: #e9ecf1; --soft: #97a1b0; --line: #2d333d; --panel: #1b1f26;
  --l: 70%; --c: .135; --stripe: #5a6577; --past: #262b34; --ring: #ffffff; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 26px 32px 40px; background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { margin: 0 0 2px; font-size: 21px; font-weight: 650; letter-spacing: -.01em; }
h1 .words { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .84em; font-weight: 600; background: color-mix(in srgb, var(--ink) 7%, transparent);
  padding: 1px 7px; border-radius: 5px; }
.facts { margin: 4px 0 18px; color: var(--soft); }
.facts b { color: var(--ink); font-weight: 600; }
code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .92em; overflow-wrap: anywhere; }
.sheet { position: relative; overflow-x: auto; }
svg { display: block; }
svg text { fill: var(--soft); font-size: 12px; font-family: inherit; }
svg .head { fill: var(--ink); font-weight: 600; font-size: 13px; }
svg .big { fill: var(--ink); font-weight: 600; font-size: 13px; }
svg .small { font-size: 11px; }
.rank { fill: oklch(var(--l) var(--c) var(--h)); }
.lane { fill: color-mix(in srgb, var(--line) 45%, transparent); }
.cell rect { fill: oklch(var(--l) var(--c) var(--heat)); stroke: none; }
.cell.none rect { fill: var(--line); fill-opacity: .35; }
.cell { cursor: pointer; outline: none; }
.cell text { pointer-events: none; }
.cell:focus-visible rect { stroke: var(--ring); stroke-width: 2; }
.stripe { fill: var(--stripe); }
.past { fill: var(--past); }
.axis { stroke: var(--line); stroke-width: 1; }
.prefix { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 3; }
.lit .band, .lit .stripe { opacity: .32; }
.lit .cell:not(.on) { opacity: .5; }
.thread { fill-opacity: .2; }
.on rect { stroke: var(--ring); stroke-width: 2; }
.panel { position: absolute; background: var(--panel); border: 1px solid var(--line); border-radius: 9px; padding: 14px 18px; overflow: auto; }
.panel h2 { margin: 0 0 8px; font-size: 15px; font-weight: 650; }
.panel h2 i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; background: oklch(var(--l) var(--c) var(--h)); }
.panel p { margin: 0 0 8px; color: var(--soft); }
.panel dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; margin: 0; }
.panel dt { color: var(--soft); }
.panel dd { margin: 0; overflow-wrap: anywhere; }
details { margin-top: 22px; }
summary { cursor: pointer; color: var(--soft); }
table { border-collapse: collapse; margin-top: 10px; font-size: 13px; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; }
.panel table { width: 100%; } .panel tr:last-child td { border: none; font-weight: 600; } .panel th { font-weight: 400; color: var(--soft); }
.panel td:last-child, .panel th:last-child { padding-right: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
@media print { .panel { border: none; } details { display: none; } }
)css";

inline constexpr const char* kPictureScript = R"js(
'use strict';
const svg = document.getElementById('loom'), panel = document.getElementById('panel'), litGroup = document.getElementById('lit');
const at = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, Number(v)]));
const idle = panel.innerHTML, rows = new Map(), cells = new Map();
for (const tr of document.querySelectorAll('#paths tbody tr')) rows.set(tr.dataset.path, tr);
for (const g of svg.querySelectorAll('.cell')) cells.set(g.dataset.path, g);
let pinned = null, shown = null;

// '0-2,6-74/4' as [first, last] stretches of neighbours.
function stretches(text) {
  const out = [];
  for (const word of text === 'none' ? [] : text.split(',')) {
    const [ends, step] = word.split('/'), [a, b = a] = ends.split('-').map(Number);
    if (!step) out.push([a, b]);
    else for (let i = a; i <= b; i += Number(step)) out.push([i, i]);
  }
  return out;
}

// Segments of 'start+length/stride*count|...' within [from, to).
function segments(text, from, to) {
  const out = [], number = (w) => (w === 'inf' ? Infinity : Number(w));
  const walk = (start, length, levels) => {
    if (levels.length === 0) {
      const a = Math.max(start, from), b = Math.min(start + length, to);
      if (a < b) out.push([a, b]);
      return;
    }
    const [stride, count] = levels[levels.length - 1], inner = levels.slice(0, -1);
    if (Math.min(count, (to - from) / stride) > 1024) {  // too fine to be seen
      out.push([Math.max(start, from), Math.min(start + stride * count, to)]);
      return;
    }
    const reach = inner.length ? inner[0][0] * (inner[0][1] - 1) + length : length;
    for (let k = Math.max(0, Math.floor((from - start - reach) / stride)); k < count && start + k * stride < to; ++k)
      walk(start + k * stride, length, inner);
  };
  for (const family of text.split('|')) {
    if (family === 'none' || family === '') continue;
    const [first, ...levels] = family.split('/'), [start, length] = first.split('+').map(number);
    walk(start, length, levels.map((l) => l.split('*').map(number)));
  }
  return out;
}

function box(x, y, width, height, hue, extra) {
  const r = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
  for (const [k, v] of Object.entries({x, y, width, height})) r.setAttribute(k, Math.max(0, v));
  r.setAttribute('class', 'rank ' + (extra || ''));
  r.style.setProperty('--h', hue);
  litGroup.append(r);
}

function light(path) {
  if (path === shown) return;
  if (shown) cells.get(shown).classList.remove('on');
  shown = path;
  litGroup.replaceChildren();
  svg.classList.toggle('lit', path !== null);
  if (path === null) { panel.innerHTML = idle; return; }
  const [s, t] = path.split('-').map(Number), row = rows.get(path), cell = cells.get(path), hue = (25 + s * 360 / at.sources) % 360;
  cell.classList.add('on');
  const y = at.top + s * at.high, x = at.left + t * at.wide;
  box(at.bands, y, x - at.bands, at.high - 1, hue, 'thread');
  box(x, y + at.high, at.wide - 1, at.stripes - y - at.high + at.tall, hue, 'thread');
  row.dataset.layers.split(';').forEach((lane, i) => {
    for (const [a, b] of stretches(lane))
      box(at.bands + a * at.layer, y + i * at.row / at.lanes, Math.max(1.5, (b - a + 1) * at.layer - (at.layer > 3 ? 1 : 0)),
          at.row / at.lanes - (at.lanes > 1 ? 1 : 0), hue);
  });
  const scale = at.tall / (at.to - at.from);
  for (const [a, b] of segments(row.dataset.tokens, Math.max(at.from, at.prefix), at.to))
    box(x + 1, at.stripes + (a - at.from) * scale, at.wide - 3, Math.max(1, (b - a) * scale - (scale * (b - a) > 3 ? 1 : 0)), hue);
  const head = [...document.querySelectorAll('#paths thead th')].map((th) => th.textContent);
  const grouped = row.dataset.groups !== '', inTable = ['layers', 'bytes', 'bytes a token', 'runs', 'a run'];
  const facts = [...row.cells].map((td, i) => [head[i], td.innerHTML]).slice(2).filter(([k]) => !grouped || !inTable.includes(k));
  const lines = row.dataset.groups.split(';').map((line) => '<tr>' + line.split('|').map((w, i) => `<td${i > 1 ? ' class="n"' : ''}>${w}</td>`).join('') + '</tr>');
  const names = ['group', 'layers', ...head.filter((k) => k !== 'layers' && inTable.includes(k))];
  panel.innerHTML = `<h2 style="--h:${hue}"><i></i>Prefill rank ${s} sends to decode rank ${t}</h2><dl>` +
    facts.map(([k, v]) => `<dt>${k}</dt><dd>${v}</dd>`).join('') + '</dl>' +
    (grouped ? `<table><tr>${names.map((k, i) => `<th${i > 1 ? ' class="n"' : ''}>${k}</th>`).join('')}</tr>${lines.join('')}</table>` : '');
}

function settle() { light(pinned); }
function pin(path) {
  pinned = path;
  history.replaceState(null, '', path ? '#path=' + path : location.pathname + location.search);
  settle();
}
function focus(g) {
  for (const c of cells.values()) c.setAttribute('tabindex', '-1');
  g.setAttribute('tabindex', '0');
  g.focus();
}
for (const [path, g] of cells) {
  if (!rows.has(path)) continue;
  g.addEventListener('pointerenter', () => light(path));
  g.addEventListener('pointerleave', settle);
  g.addEventListener('focus', () => light(path));
  g.addEventListener('blur', settle);
  g.addEventListener('click', () => pin(pinned === path ? null : path));
}
svg.addEventListener('keydown', (event) => {
  const g = event.target.closest('.cell');
  if (!g) return;
  if (event.key === 'Escape') return pin(null);
  if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); return pin(g.dataset.path); }
  const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (!step) return;
  event.preventDefault();
  let [s, t] = g.dataset.path.split('-').map(Number);
  for (;;) {  // over pairs that have no path
    s += step[0]; t += step[1];
    const next = cells.get(s + '-' + t);
    if (!next) return;
    if (rows.has(s + '-' + t)) return focus(next);
  }
});
function fromAddress() {
  const wanted = /#path=(\d+-\d+)/.exec(location.hash);
  pinned = wanted && rows.has(wanted[1]) && cells.has(wanted[1]) ? wanted[1] : null;
  settle();
}
addEventListener('hashchange', fromAddress);
fromAddress();
)js";

}  // namespace kvloom
