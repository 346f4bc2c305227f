// The browser of episodes.
const episodes = data.episodes, PAGE = 200;
const keyOf = (one) => one.kind === 'train' ? `${one.step}/${one.group}` : `${one.problem_id}/${one.sample}`;
const siblings = new Map();
episodes.forEach((one, index) => siblings.set(keyOf(one), [...siblings.get(keyOf(one)) ?? [], index]));
const firstEvaluation = new Map();
episodes.forEach((one) => { if (one.kind === 'eval' && !firstEvaluation.has(keyOf(one))) firstEvaluation.set(keyOf(one), one); });
const browser = {matches: [], current: -1, sideBySide: false};
const when = (one) => one.kind === 'baseline' ? one.name : `step ${one.step}`;

function verdict(one) {
  if (one.reward === null) return el('span', {class: 'pill'}, 'not graded');
  return el('span', {class: `pill ${one.reward === 1 ? 'good' : one.reward > 0 ? 'mid' : 'bad'}`}, number(one.reward));
}

function message(one) {
  const name = one.name ? `${one.role} \u00b7 ${one.name}` : one.role;
  const look = ['system', 'user', 'assistant', 'tool'].includes(one.role) ? one.role : 'tool';
  return el('div', {class: `message ${look}`}, el('b', {}, visible(name)), el('pre', {}, visible(one.content) || '\u2205'),
    one.cut ? el('small', {}, `${one.cut.toLocaleString('en-US')} more characters are in the run's files`) : null);
}

function showEpisodes() {
  if (!episodes.length) return;
  const node = section('episodes', 'Episodes');
  const choice = (label, options) => el('label', {}, label, el('select', {onchange: filter}, el('option', {value: ''}, 'any'),
    options.map(([value, text]) => el('option', {value}, visible(String(text))))));
  const several = (label, of) => choice(label, unique(episodes.map(of)).sort((a, b) => a < b ? -1 : 1).map((value) => [value, value]));
  const limit = (label) => el('label', {}, label, el('input', {type: 'number', min: 0, oninput: filter}));
  const controls = {
    kind: several('Kind', (one) => one.kind), from: limit('From step'), to: limit('To step'),
    domain: several('Domain', (one) => one.domain),
    level: several('Level', (one) => one.level), outcome: several('Outcome', (one) => one.outcome),
    reward: choice('Reward', [['solved', '1'], ['partial', 'between 0 and 1'], ['failed', '0'], ['none', 'not graded']]),
    change: choice('Since the first evaluation', [['gained', 'newly solved'], ['lost', 'newly failed']]),
    text: el('label', {}, 'Text', el('input', {type: 'search', placeholder: 'in any message or id', oninput: filter}))};
  const value = (name) => controls[name].querySelector('select, input').value;
  const list = el('div', {class: 'list panel'}), detail = el('div', {class: 'detail panel'}), count = el('span', {class: 'muted'});
  const rewardKind = (one) => one.reward === null ? 'none' : one.reward === 1 ? 'solved' : one.reward > 0 ? 'partial' : 'failed';

  function changed(one) {
    const before = one.kind === 'eval' ? firstEvaluation.get(keyOf(one)).reward : null;
    return before === null || one.reward === null || (before === 1) === (one.reward === 1) ? '' : one.reward === 1 ? 'gained' : 'lost';
  }

  function filter() {
    const wanted = Object.fromEntries(Object.keys(controls).map((name) => [name, value(name)])), text = wanted.text.toLowerCase();
    browser.matches = range(episodes.length).filter((index) => {
      const one = episodes[index];
      return ['kind', 'domain', 'level', 'outcome'].every((name) => !wanted[name] || String(one[name]) === wanted[name])
        && (!wanted.from || one.step >= Number(wanted.from)) && (!wanted.to || (one.step !== null && one.step <= Number(wanted.to)))
        && (!wanted.reward || rewardKind(one) === wanted.reward) && (!wanted.change || changed(one) === wanted.change)
        && (!text || one.problem_id.toLowerCase().includes(text) || one.messages.some((each) => each.content.toLowerCase().includes(text)));
    });
    if (!browser.matches.includes(browser.current)) browser.current = browser.matches[0] ?? -1;
    showList();
    showDetail();
  }

  function showList() {
    const page = Math.max(0, Math.floor(browser.matches.indexOf(browser.current) / PAGE)), start = page * PAGE;
    count.textContent = `${browser.matches.length.toLocaleString('en-US')} of ${episodes.length.toLocaleString('en-US')} episodes`;
    const line = (index) => {
      const one = episodes[index], reply = one.messages.findLast((each) => each.role === 'assistant');
      const what = one.kind === 'train' ? `group ${one.group}, sample ${one.sample}` : one.kind;
      return el('button', {'aria-current': String(index === browser.current), onclick: () => choose(index)},
        el('span', {class: 'line'}, el('small', {}, visible(`${when(one)} \u00b7 ${what}`)), verdict(one)),
        el('span', {class: 'cut'}, visible(one.problem_id)),
        el('small', {class: 'cut'}, visible((reply?.content ?? one.reason).slice(0, 90))));
    };
    const turn = (to, text) => browser.matches[to] === undefined ? []
      : [el('button', {onclick: () => choose(browser.matches[to])}, text)];
    list.replaceChildren(...turn(start - 1, '\u2190 Earlier ones'), ...browser.matches.slice(start, start + PAGE).map(line),
      ...turn(start + PAGE, 'Later ones \u2192'));
  }

  function choose(index) {
    browser.current = index;
    const kept = list.scrollTop;
    showList();
    list.scrollTop = kept;
    const current = list.querySelector('[aria-current=true]');
    if (current) {
      // Within the list only: the page must not jump.
      if (current.offsetTop - list.offsetTop < list.scrollTop) list.scrollTop = current.offsetTop - list.offsetTop;
      const below = current.offsetTop - list.offsetTop + current.offsetHeight - list.clientHeight;
      if (below > list.scrollTop) list.scrollTop = below;
    }
    showDetail();
    history.replaceState(null, '', `#episode=${index}`);
  }

  function step(by) {
    const place = browser.matches.indexOf(browser.current) + by;
    if (place >= 0 && place < browser.matches.length) choose(browser.matches[place]);
  }

  // The samples of a group; of a problem of evaluations, those of the evaluations compared above and this one.
  function siblingsOf(index) {
    const all = siblings.get(keyOf(episodes[index]));
    const isShown = (other) => other === index || data.evaluations.includes(when(episodes[other]));
    return episodes[index].kind === 'train' ? all : all.filter(isShown);
  }

  function facts(one, isBrief = false) {
    const place = [['', when(one)], ['kind', one.kind], ['domain', one.domain], ['level', one.level],
      ['group', one.kind === 'train' ? `${one.group}.${one.sample}` : null]];
    const entries = [...(isBrief ? [] : place), ['advantage', one.advantage === null ? null : number(one.advantage)],
      ['outcome', one.outcome], ['reason', one.reason || null], ['not trained on', one.dropped || null],
      ['tokens', `${one.num_sampled} sampled of ${one.num_tokens}`],
      ['mean logprob', one.mean_logprob === null ? null : number(one.mean_logprob)], ['versions', one.versions.join(', ') || null],
      ['turns', one.num_turns], ['tool calls', one.num_tool_calls ? `${one.num_tool_calls}, ${one.num_tool_errors} with an error` : null],
      ['seconds', one.timing_s.total === undefined ? null : number(one.timing_s.total)], ['line', one.line]];
    return el('div', {class: 'meta'}, verdict(one), entries.filter(([, value]) => value !== null).map(([name, value]) => el('span', {},
      el('b', {}, name ? `${name} ` : ''), visible(String(value)))));
  }

  function showDetail() {
    if (browser.current < 0) {
      detail.replaceChildren(el('p', {class: 'muted'}, 'No episode fits the filters.'));
      return;
    }
    const one = episodes[browser.current], others = siblingsOf(browser.current), place = browser.matches.indexOf(browser.current);
    const what = one.kind === 'train' ? `Whole group (${others.length})` : `Before and after (${others.length})`;
    const toggle = () => { browser.sideBySide = !browser.sideBySide; showDetail(); };
    const bar = el('div', {class: 'controls'},
      el('button', {onclick: () => step(-1), title: 'key k', disabled: place <= 0 ? '' : null}, '\u2190 Previous'),
      el('button', {onclick: () => step(1), title: 'key j', disabled: place + 1 >= browser.matches.length ? '' : null}, 'Next \u2192'),
      others.length > 1 ? el('button', {'aria-pressed': String(browser.sideBySide), onclick: toggle}, what) : null);
    const isShared = (k) => others.every((index) => {
      const other = episodes[index].messages[k];
      return other && other.role !== 'assistant' && other.content === one.messages[k].content && other.role === one.messages[k].role;
    });
    let body;
    if (browser.sideBySide && others.length > 1) {
      let shared = 0;
      while (shared < one.messages.length && isShared(shared)) shared++;
      const column = (index) => el('div', {class: index === browser.current ? 'current' : ''},
        el('div', {class: 'controls'}, el('button', {onclick: () => choose(index)},
          one.kind === 'train' ? `sample ${episodes[index].sample}` : visible(when(episodes[index])))),
        facts(episodes[index], true), episodes[index].messages.slice(shared).map(message));
      body = [one.messages.slice(0, shared).map(message), el('div', {class: 'siblings'}, others.map(column))];
    } else {
      body = [facts(one), one.messages.map(message)];
    }
    detail.replaceChildren(bar, el('h3', {}, visible(one.problem_id)), ...body.flat());
    const columns = detail.querySelector('.siblings'), current = detail.querySelector('.siblings > .current');
    if (columns) columns.scrollLeft = current.offsetLeft + current.offsetWidth - columns.offsetLeft - columns.clientWidth;
  }

  function setFilters(settings) {
    for (const [name, label] of Object.entries(controls)) label.querySelector('select, input').value = settings[name] ?? '';
    filter();
  }

  openSiblings = (index) => {
    browser.sideBySide = true;
    browser.current = index;
    setFilters({kind: 'eval', from: episodes[index].step, to: episodes[index].step, change: 'gained'});
    choose(index);
  };
  const clear = el('button', {onclick: () => setFilters({})}, 'Clear');
  node.append(el('div', {class: 'controls'}, Object.values(controls), clear), el('p', {}, count),
    el('div', {class: 'browser'}, list, detail));
  document.addEventListener('keydown', (event) => {
    if (event.target.closest('input, select') || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === 'j' || event.key === 'k') step(event.key === 'j' ? 1 : -1);
  });
  const linked = /^#episode=(\d+)$/.exec(location.hash);
  filter();
  if (linked && episodes[linked[1]]) choose(Number(linked[1]));
}
