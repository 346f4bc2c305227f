'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const main = document.querySelector('main');

// Elements. Strings become text nodes, so nothing that a model wrote is ever read as HTML.
function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}
const el = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => build(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
const range = (count) => [...Array(count).keys()];
const unique = (values) => [...new Set(values)];

let openSiblings = null;  // Set by the browser of episodes.

function section(id, title) {
  document.querySelector('nav div').append(el('a', {href: `#${id}`}, title));
  const node = el('section', {id}, el('h2', {}, title));
  main.append(node);
  return node;
}

// Characters that would hide or reorder text are spelled out.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;
const visible = (text) => text.replace(HIDDEN, (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, '0')}`);

function number(value) {
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size < 1e-3) return Number(value.toPrecision(3)).toExponential();
  if (size < 1e4) return String(Number(value.toPrecision(4)));
  const power = Math.min(Math.floor(Math.log10(size) / 3), 5);
  return `${Number((value / 1000 ** power).toPrecision(4))} ${'kMGTP'[power - 1]}`;
}
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const points = (value) => `${value < 0 ? '\u2212' : '+'}${Math.abs(100 * value).toFixed(1)}`;

function table(heads, rows, attributes = {}) {
  const cell = (value) => typeof value === 'number' ? el('td', {class: 'number'}, value.toLocaleString('en-US'))
    : el('td', {class: 'free'}, visible(String(value)));
  const head = (name, column) => el('th', {class: rows.length && typeof rows[0][column] === 'number' ? 'number' : null}, visible(name));
  return el('div', {class: 'scroll'}, el('table', attributes, el('thead', {}, el('tr', {}, heads.map(head))),
    el('tbody', {}, rows.map((row) => row instanceof Node ? row : el('tr', {}, row.map(cell))))));
}

// Head.
document.title = `Run ${data.name}`;
document.querySelector('h1').append(visible(`Run ${data.name}`));
document.querySelector('.facts').append(...data.facts.map(([name, value]) =>
  el('div', {}, el('dt', {}, name), el('dd', {}, visible(value)))));
document.getElementById('notes').append(...data.notes.map((note) => el('p', {class: 'panel note'}, visible(note))));

// Before and after.
function whisker(rate) {
  const x = (share) => 5 + 80 * share;
  return svg('svg', {width: 90, height: 12, 'aria-hidden': 'true'},
    svg('line', {x1: x(0), x2: x(1), y1: 6, y2: 6, stroke: 'var(--line)', 'stroke-width': 2}),
    svg('line', {x1: x(rate.low), x2: x(rate.high), y1: 6, y2: 6, stroke: 'var(--c0)', 'stroke-width': 5, 'stroke-opacity': .45}),
    svg('circle', {cx: x(rate.value), cy: 6, r: 4, fill: 'var(--c0)'}));
}

function showResults() {
  if (!data.rows.length && (curve('heldout/loss_nats') || curve('heldout/loss'))) return;  // An offline run, whose curves say it.
  const node = section('results', 'Before and after');
  if (!data.rows.length) {
    node.append(el('p', {}, 'This run has no evaluations on held-out problems.'));
    return;
  }
  const names = data.evaluations, last = names.length - 1;
  const changes = [...range(last).map((k) => [`${names[k]} \u2192 ${names[k + 1]}`, (row) => row.changes[k]]),
    ...(last > 1 ? [[`${names[0]} \u2192 ${names[last]}`, (row) => row.total]] : [])];
  const rate = (one) => one === null ? el('td', {}, '\u2013') : el('td', {}, percent(one.value), whisker(one),
    el('small', {}, `${(100 * one.low).toFixed(1)} to ${percent(one.high)}`), el('small', {}, `${one.solved} of ${one.graded}`));
  const change = (one) => one === null ? el('td', {}, '\u2013') : el('td', {}, points(one.value),
    el('small', {}, `${points(one.low)} to ${points(one.high)}`), el('small', {}, `+${one.gained} \u2212${one.lost} of ${one.pairs}`));
  node.append(
    el('p', {class: 'muted'}, 'Share of held-out problems solved with one sample each (pass@1), with 95 % intervals. Changes are in ',
      'points, over the problems that both evaluations graded, with how many were gained and lost.'),
    el('div', {class: 'panel'}, table(['', ...names, ...changes.map(([name]) => name)], data.rows.map((row) => el('tr',
      {class: row.domain === null ? 'all' : row.level === null ? 'domain' : 'level'},
      el('th', {scope: 'row'}, row.domain === null ? 'all' : row.level === null ? visible(row.domain) : `level ${row.level}`),
      row.rates.map(rate), changes.map(([, of]) => change(of(row))))), {class: 'results'})));
  if (data.highlights.length) {
    const open = (index) => { openSiblings(index); document.getElementById('episodes').scrollIntoView(); };
    node.append(el('h3', {}, 'Failed before, solved after'), el('p', {class: 'controls'}, data.highlights.map((index) => el('button',
      {onclick: () => open(index)}, visible(data.episodes[index].problem_id)))));
  }
}

// Accuracy by position of the evidence and by length, drawn by launch/report_evidence.py.
function showEvidence() {
  const drawing = document.getElementById('evidence-picture').content;
  if (!drawing.childElementCount) return;
  section('evidence', 'Long texts').append(
    el('p', {class: 'muted'}, 'Share of held-out problems solved, by where in the text their evidence lies and by its length. A problem counts ',
      'once at each position where a piece of its evidence lies.'), el('div', {class: 'panel scroll'}, drawing));
}

// Drawn by launch/report_reward.py.
function showRewards() {
  const pictures = ['over-optimization', 'reliability'].map((name) => document.getElementById(`${name}-picture`).content)
    .filter((drawing) => drawing.childElementCount);
  if (pictures.length) section('rewards', 'Rewards').append(...pictures.map((drawing) => el('div', {class: 'panel scroll'}, drawing)));
}

// Outcomes and ledger.
function showOutcomes() {
  if (!data.outcomes.length && !Object.keys(data.ledger).length) return;
  const node = section('outcomes', 'Outcomes');
  if (data.outcomes.length) {
    node.append(el('div', {class: 'panel'}, table(['Outcome', 'Reason', 'Not trained on', 'Training', 'Evaluations'], data.outcomes)));
  }
  const {issued, trained, ...others} = data.ledger;
  if (issued === undefined) return;
  const dropped = Object.entries(others), total = dropped.reduce((sum, [, count]) => sum + count, 0);
  node.append(el('h3', {}, 'Ledger'), el('p', {class: 'muted'}, 'Every sample that was issued is trained on or dropped for a named cause.'),
    el('div', {class: 'panel'}, table(['', 'Samples'], [['issued', issued], ['trained', trained],
      ...dropped.map(([key, count]) => [key.replace('/', ': '), count]), ['in flight', issued - trained - total]])));
}

// Configuration.
function showConfiguration() {
  const node = section('configuration', 'Configuration'), json = (value) => typeof value === 'string' ? value : JSON.stringify(value) ?? '';
  if (data.objective) node.append(el('h3', {}, 'Objective'), el('pre', {class: 'panel'}, visible(data.objective)));
  node.append(el('div', {class: 'panel'}, data.difference.length ? table(['Setting', 'Default', 'This run'],
    data.difference.map(([key, before, after]) => [key, json(before), json(after)])) : el('p', {}, 'Every setting has its default value.')),
  el('details', {}, el('summary', {}, 'The whole configuration'), el('pre', {class: 'panel'}, visible(data.config))));
}
