// Curves of metrics, as SVG.
const MARGIN = {left: 48, right: 12, top: 8, bottom: 20};
const color = (index) => `var(--c${index % 9})`;
const ramp = (share) => `color-mix(in oklab, var(--ramp0), var(--ramp1) ${Math.round(100 * share)}%)`;
let smoothing = Object.values(data.curves.series).some(([, values]) => values.length > 100) ? 0.6 : 0;

function curve(key) {
  const found = data.curves.series[key];
  return found && {x: data.curves.axes[found[0]], y: found[1]};
}

// A line of a chart: [key, label] or [key, label, key of the lower end, key of the upper end].
function linesOf(entries, colorOf = color) {
  const lines = entries.filter(([key]) => curve(key)).map(([key, label, low, high]) => ({...curve(key), label,
    low: low && curve(low)?.y, high: high && curve(high)?.y}));
  return lines.map((line, index) => ({...line, color: colorOf(index, lines.length)}));
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  return range(count + 3).map((k) => (Math.ceil(low / step) + k) * step).filter((value) => value <= high + 1e-9 * step);
}

function smooth(values) {
  let total = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = smoothing * total + value;
    weight = smoothing * weight + 1;
    return total / weight;
  });
}

// The path through points [x, y], with gaps where y is null.
const path = (xs, ys) => xs.map((x, k) => ys[k] === null ? ''
  : `${k === 0 || ys[k - 1] === null ? 'M' : 'L'}${x.toFixed(1)},${ys[k].toFixed(1)}`).join('');
const area = (xs, lows, highs) => `M${[...xs.map((x, k) => [x, highs[k]]), ...xs.map((x, k) => [x, lows[k]]).reverse()]
  .filter(([, y]) => y !== null).map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join('L')}Z`;

function chart(spec) {
  const {title, unit = '', lines, marks = [], stacked = false, share = false} = spec;
  const format = share ? percent : number;
  const steps = unique(lines.flatMap((line) => line.x)).sort((a, b) => a - b);
  const at = lines.map((line) => new Map(line.x.map((step, k) => [step, line.y[k]])));
  if (stacked) {
    let base = steps.map(() => 0);
    lines.forEach((line, k) => {
      line.base = base;
      base = line.top = steps.map((step, place) => base[place] + Math.max(at[k].get(step) ?? 0, 0));
    });
  }
  const values = stacked ? [0, ...lines.at(-1).top.slice(steps.length > 10 ? 1 : 0)]
    : [...lines.flatMap((line) => [line.y, line.low ?? [], line.high ?? []]).flat(), ...marks.map((mark) => mark.value)]
      .filter((value) => value !== null);
  let low = Math.min(...values), high = Math.max(...values);
  if (share && high <= 1) [low, high] = [Math.min(low, 0), high > 0.5 ? 1 : Math.max(high * 1.1, 0.01)];
  else if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  else if (!stacked) [low, high] = [low >= 0 && low < 0.4 * high ? 0 : low - 0.05 * (high - low), high + 0.05 * (high - low)];
  const first = steps[0], last = steps.at(-1) === first ? first + 1 : steps.at(-1);
  const plot = el('div', {class: 'plot', role: 'img', 'aria-label': `${title} by step`});
  const named = lines.length + marks.length > 1 ? [...lines, ...marks] : [];
  const legend = named.map((line) => el('span', {style: `--of: ${line.color}`}, visible(line.label)));

  function draw() {
    const width = plot.clientWidth, height = plot.clientHeight;
    const x = (step) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * (step - first) / (last - first);
    const y = (value) => height - MARGIN.bottom - (height - MARGIN.top - MARGIN.bottom) * (value - low) / (high - low);
    const ys = (some) => some.map((value) => value === null ? null : y(value));
    const across = (value, look) => svg('line', {x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value), ...look});
    const shapes = [
      ...ticks(low, high, 4).flatMap((value) => [across(value, {stroke: 'var(--line)'}), svg('text',
        {x: MARGIN.left - 6, y: y(value) + 4, 'text-anchor': 'end'}, share ? `${number(100 * value)} %` : number(value))]),
      ...ticks(first, last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger).map((step) => svg('text',
        {x: x(step), y: height - 4, 'text-anchor': 'middle'}, step.toLocaleString('en-US'))),
      ...marks.map((mark) => across(mark.value, {stroke: mark.color, 'stroke-width': 1.5, 'stroke-dasharray': '5 4'}))];
    for (const line of lines) {
      const xs = line.x.map(x), stroke = {fill: 'none', stroke: line.color, 'stroke-width': 1.8, 'stroke-linejoin': 'round'};
      if (stacked) {
        shapes.push(svg('path', {d: area(steps.map(x), ys(line.base), ys(line.top)), fill: line.color, 'fill-opacity': .75}));
        continue;
      }
      const hasBand = line.low && line.high;
      if (hasBand) shapes.push(svg('path', {d: area(xs, ys(line.low), ys(line.high)), fill: line.color, 'fill-opacity': .16}));
      const isSmoothed = smoothing > 0 && line.y.length > 10 && !hasBand;
      if (isSmoothed) shapes.push(svg('path', {d: path(xs, ys(smooth(line.y))), ...stroke}));
      shapes.push(svg('path', {d: path(xs, ys(line.y)), ...stroke, 'stroke-opacity': isSmoothed ? .28 : 1}));
      if (line.x.length <= 30) {
        shapes.push(...line.y.map((value, k) => value === null ? '' : svg('circle', {cx: xs[k], cy: y(value), r: 2.4, fill: line.color})));
      }
    }
    const guide = svg('line', {y1: MARGIN.top, y2: height - MARGIN.bottom, stroke: 'var(--muted)', visibility: 'hidden'});
    const tip = el('div', {class: 'tip', hidden: ''});
    const pointed = (event) => {
      const inside = event.clientX - plot.getBoundingClientRect().left - MARGIN.left;
      const wanted = first + inside / (width - MARGIN.left - MARGIN.right) * (last - first);
      const step = steps.reduce((best, one) => Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best);
      build(guide, {x1: x(step), x2: x(step), visibility: 'visible'}, []);
      tip.replaceChildren(`step ${step.toLocaleString('en-US')}`, ...lines.flatMap((line, k) => {
        const value = at[k].get(step), place = line.x.indexOf(step);
        if (value === undefined || value === null) return [];
        const interval = line.low && line.high ? ` (${format(line.low[place])} to ${format(line.high[place])})` : '';
        return [el('div', {style: `--of: ${line.color}`}, `${visible(line.label)} ${format(value)}${interval}`)];
      }), ...marks.map((mark) => el('div', {style: `--of: ${mark.color}`}, `${visible(mark.label)} ${format(mark.value)}`)));
      tip.hidden = false;
      // On the side of the guide with more room, and never beyond the plot.
      const left = x(step) > width / 2 ? x(step) - tip.offsetWidth - 8 : x(step) + 8;
      tip.style.left = `${Math.max(0, Math.min(left, width - tip.offsetWidth))}px`;
    };
    const drawing = svg('svg', {viewBox: `0 0 ${width} ${height}`}, shapes, guide);
    plot.replaceChildren(drawing, tip);
    plot.onpointermove = plot.onpointerdown = pointed;
    plot.onpointerleave = () => { tip.hidden = true; guide.setAttribute('visibility', 'hidden'); };
  }
  new ResizeObserver(draw).observe(plot);
  const node = el('figure', {class: 'panel'}, el('figcaption', {}, visible(title), ' ', el('small', {}, unit)),
    el('div', {class: 'legend'}, legend), plot);
  node.draw = draw;
  return node;
}

function charts() {
  const keys = Object.keys(data.curves.series), baseline = data.evaluations.length > 2 ? data.rows[0].rates[0] : null;
  const under = (prefix, skip = []) => keys.filter((key) => key.startsWith(prefix)).map((key) => [key, key.slice(prefix.length)])
    .filter(([, label]) => !skip.includes(label));
  const isShaped = String(curve('critic/score/mean')?.y) !== String(curve('critic/rewards/mean')?.y);
  const order = ['decode', 'environment', 'score', 'train', 'sync', 'evaluate', 'checkpoint', 'log', 'idle'];
  const phases = under('timing_s/', ['total']).sort(([, a], [, b]) => order.indexOf(a) - order.indexOf(b));
  const shade = (k, count) => ramp(k / Math.max(count - 1, 1));
  const byLevel = (prefix, title) => data.places.filter(([, levels]) => levels.length > 1).map(([domain, levels]) => ({
    title: `${title}: ${domain}`, share: true,
    lines: linesOf(levels.map((level) => [`${prefix}${domain}/${level}`, `level ${level}`]), shade)}));
  const byDomain = data.places.length > 1 ? data.places.map(([domain]) => [`heldout/pass@1/${domain}`, domain]) : [];
  const shaped = isShaped ? [['critic/rewards/mean', 'trained on']] : [];
  return [
    {title: 'Held-out pass@1', unit: 'with 95 % interval', share: true, lines: linesOf([['heldout/pass@1', 'pass@1', 'heldout/pass@1_low',
      'heldout/pass@1_high']]), marks: baseline ? [{label: data.evaluations[0], value: baseline.value, color: 'var(--c7)'}] : []},
    {title: 'Reward', unit: 'mean of a step', lines: linesOf([['critic/score/mean', 'of the verifier'], ...shaped])},
    {title: 'Loss', unit: 'nats per token', lines: linesOf([['train/loss_nats', 'training'], ['heldout/loss_nats', 'held out']])},
    {title: 'Right about pairs', share: true, lines: linesOf([['preference/accuracy', 'training'], ['reward_model/accuracy', 'training'],
      ['heldout/accuracy', 'held out']])},
    {title: 'Reward of the proxy', lines: linesOf([['proxy/mean', 'mean'], ['proxy/disagreement', 'disagreement of members']])},
    {title: 'Proxy ranks samples as the truth does', unit: 'with 95 % interval; a half is chance', share: true,
      lines: linesOf([['drift/agreement', 'agreement', 'drift/agreement_low', 'drift/agreement_high']])},
    ...byLevel('heldout/pass@1/', 'Held-out pass@1'),
    ...byLevel('curriculum/pass_rate/', 'Training pass rate'),
    {title: 'Held-out pass@1 by domain', share: true, lines: linesOf(byDomain)},
    {title: 'Entropy', unit: 'nats per token', lines: linesOf([['policy/entropy', 'entropy']])},
    {title: 'Response length', unit: 'tokens', lines: linesOf([['response_length/mean', 'mean'], ['response_length/max', 'longest'],
      ['correct_seq_len/mean', 'right'], ['incorrect_seq_len/mean', 'wrong']])},
    {title: 'Gradient norm', lines: linesOf([['train/grad_norm', 'before clipping']])},
    {title: 'KL of the update', unit: 'nats per token, policy/ppo_kl', lines: linesOf([['policy/ppo_kl', 'ppo_kl']])},
    {title: 'KL to the reference', unit: 'nats per token', lines: linesOf(under('policy/reference_kl_'))},
    {title: 'KL in the reward', unit: 'nats of a reply', lines: linesOf([['objective/kl', 'KL']])},
    {title: 'Coefficient of the KL in the reward', lines: linesOf([['objective/kl_coef', 'coefficient']])},
    {title: 'Clipped tokens', share: true, lines: linesOf([['policy/pg_clipfrac_low', 'low'], ['policy/pg_clipfrac_high', 'high'],
      ['policy/pg_clipfrac_lower', 'dual'], ['mismatch/capped_fraction', 'capped weights']])},
    {title: 'Sampler against trainer', unit: 'nats per token', lines: linesOf([['mismatch/logprob_abs_diff', '|difference|'],
      ['mismatch/k3_kl', 'KL (k3)']])},
    {title: 'Groups by reward', share: true, lines: linesOf([['frac_reward_zero_std', 'all equal'], ['solve_none', 'none right'],
      ['solve_all', 'all right']])},
    {title: 'Cut off by length', share: true, lines: linesOf([['response_length/clip_ratio', 'cut off']])},
    {title: 'Failures', unit: 'share of samples', share: true,
      lines: linesOf(under('env/outcome/', ['ok', 'length'])).filter((line) => line.y.some(Boolean))},
    {title: 'Turns and tool calls', unit: 'mean', lines: linesOf([['num_turns/mean', 'turns'], ['tool_call_counts/mean', 'calls']])},
    {title: 'Tool calls answered by an error', share: true, lines: linesOf([['tool_error_rate', 'errors']])},
    {title: 'Time of a step', unit: 'seconds; the first step, which compiles, may be cut off', stacked: true, lines: linesOf(phases)},
    {title: 'Speed', unit: 'tokens per second', lines: linesOf([['rollout/tokens_per_s', 'sampled'],
      ['speed/tokens_per_s', 'of the whole step']])},
    {title: 'Learning rate', lines: linesOf([['train/learning_rate', 'learning rate']])},
  ].filter((spec) => spec.lines.length);
}

function showCurves() {
  const node = section('curves', 'Curves'), keys = Object.keys(data.curves.series);
  if (!keys.length) {
    node.append(el('p', {}, 'No step has been written yet.'));
    return;
  }
  const figures = charts().map(chart), grid = el('div', {class: 'charts'}, figures);
  const any = el('select', {onchange: () => {
    const made = chart({title: any.value, lines: linesOf([[any.value, any.value]])});
    figures.push(made);
    grid.append(made);
    made.scrollIntoView({block: 'center'});
  }}, el('option', {value: '', disabled: '', selected: ''}, 'choose'), keys.map((key) => el('option', {value: key}, visible(key))));
  node.append(el('div', {class: 'controls'},
    el('label', {}, 'Smoothing', el('input', {type: 'range', min: 0, max: 0.95, step: 0.05, value: smoothing, oninput: (event) => {
      smoothing = Number(event.target.value);
      figures.forEach((figure) => figure.draw());
    }})), el('label', {}, 'Add a chart of any metric', any)), grid);
}
