// The rollout browser: a filtered list, and one rollout with its rewards and coloured tokens.

const FIRST_CHARS = 20000, FIRST_TOKENS = 3000, fetched = {}, opened = new Set();
const keyOf = rollout => `${rollout.step}/${rollout.ordinal}/${rollout.sample_index}`;

// A page from disk has the rollouts of some steps; the live page can fetch any step in full.
function rolloutsNow() {
  if (ui.step && fetched[ui.step]) return fetched[ui.step].rollouts;
  return ui.step ? data.rollouts.filter(rollout => String(rollout.step) === ui.step) : data.rollouts;
}
async function fetchStep(step) {
  if (!data.live || !step || fetched[step]) return;
  try {
    const answer = await fetch(`rollouts/${step}`);
    if (answer.ok) { fetched[step] = await answer.json(); drawRollouts(byId("rollouts-body")); }
  } catch { /* the server is gone; the page keeps what it has */ }
}
const pieceOf = (rollout, id) => (fetched[rollout.step] || data).pieces[id] ?? data.pieces[id] ?? `⟨${id}⟩`;

function passes(rollout) {
  const number = text => text === "" ? null : +text;
  if (ui.verifier && !(ui.verifier in rollout.reward_parts)) return false;
  const value = ui.verifier ? rollout.reward_parts[ui.verifier] : rollout.reward;
  if (number(ui.low) !== null && !(value !== null && value >= number(ui.low))) return false;
  if (number(ui.high) !== null && !(value !== null && value <= number(ui.high))) return false;
  if (ui.finish && rollout.finish_reason !== ui.finish) return false;
  if (ui.trained && String(rollout.trained) !== ui.trained) return false;
  return !ui.search || ((rollout.turns || [[0, rollout.text]]).map(turn => turn[1]).join("\n") + "\n" + rollout.prompt).toLowerCase().includes(ui.search.toLowerCase());
}
const ORDERS = {
  newest: (a, b) => b.step - a.step || b.reward - a.reward, oldest: (a, b) => a.step - b.step || b.reward - a.reward,
  best: (a, b) => b.reward - a.reward, worst: (a, b) => a.reward - b.reward, longest: (a, b) => b.num_tokens - a.num_tokens,
  gap: (a, b) => widest(b) - widest(a),
};
const widest = rollout => (rollout.logprob_gaps || []).reduce((most, gap) => Math.max(most, Math.abs(gap)), 0);

function drawBrowser(parent) {
  const every = data.rollouts, redraw = () => { ui.shown = 60; drawRollouts(byId("rollouts-body")); fetchStep(ui.step); };
  const controls = make(parent, "div", undefined, "controls");
  const known = [...new Set(every.map(rollout => rollout.step))];
  if (ui.step && !known.includes(+ui.step)) known.push(+ui.step);
  if (data.live) {
    field(controls, `step, 1 to ${data.rollout_steps}; empty: a selection of all steps`, "step", "number", redraw, {min: 1, max: data.rollout_steps});
  } else choice(controls, "step", "step", [["", "all on this page"], ...known.sort((a, b) => b - a).map(step => [String(step), String(step)])], redraw);
  choice(controls, "verifier", "verifier", [["", "total reward"], ...[...new Set(every.flatMap(rollout => Object.keys(rollout.reward_parts)))].sort().map(name => [name, name])], redraw);
  field(controls, "reward from", "low", "number", redraw, {step: "any"});
  field(controls, "to", "high", "number", redraw, {step: "any"});
  choice(controls, "finish reason", "finish", [["", "any"], ...[...new Set(every.map(rollout => rollout.finish_reason))].sort().map(name => [name, name])], redraw);
  choice(controls, "trained", "trained", [["", "yes or no"], ["true", "yes"], ["false", "no"]], redraw);
  choice(controls, "order", "sort", [["newest", "newest"], ["oldest", "oldest"], ["best", "highest reward"], ["worst", "lowest reward"], ["longest", "longest"], ["gap", "largest sampler–trainer difference"]], redraw);
  field(controls, "text", "search", "search", redraw, {placeholder: "find in prompt and answer"});
  drawRollouts(make(parent, "div", undefined, "", {id: "rollouts-body"}));
  fetchStep(ui.step);
}

function found() { return rolloutsNow().filter(passes).sort(ORDERS[ui.sort]); }

function drawRollouts(parent) {
  const some = found();
  parent.textContent = "";
  const count = new Set(some.map(rollout => rollout.step)).size, whole = ui.step && data.live;
  const summary = `${some.length} rollouts` + (whole ? "" : ` of ${count} step${count === 1 ? "" : "s"}; every rollout is in rollouts/`);
  make(parent, "p", some.length ? summary : "No rollout matches.", "small soft", {id: "rollouts-count"});
  if (!some.length) return;
  if (!some.some(rollout => keyOf(rollout) === ui.selected)) ui.selected = keyOf(some[0]);
  const browser = make(parent, "div", undefined, "browser"), list = make(browser, "div", undefined, "card list", {"aria-label": "rollouts"});
  for (const rollout of some.slice(0, ui.shown)) {
    const item = button(list, "", () => select(keyOf(rollout)), "", {"aria-current": String(keyOf(rollout) === ui.selected), "data-key": keyOf(rollout)});
    make(item, "span", show(rollout.reward), "pill " + (rollout.correct === null ? "" : rollout.correct ? "right" : "wrong"));
    make(item, "span", `step ${rollout.step} · ${rollout.num_tokens} tokens · ${rollout.finish_reason}`, "small");
    make(make(item, "span", undefined, "snippet"), "bdi", visible(rollout.prompt.slice(0, 120)).replace(/\s+/g, " "));
  }
  if (some.length > ui.shown) button(list, `${some.length - ui.shown} more`, () => { ui.shown += 200; drawRollouts(parent); });
  const detail = make(browser, "div", undefined, "card", {id: "detail"});
  drawDetail(detail, some.find(rollout => keyOf(rollout) === ui.selected));
}

function select(key) {
  ui.selected = key;
  keep();
  for (const item of document.querySelectorAll(".list button[data-key]")) item.setAttribute("aria-current", String(item.dataset.key === key));
  const rollout = found().find(each => keyOf(each) === key);
  if (rollout) drawDetail(byId("detail"), rollout);
}

function move(by) {
  const keys = found().slice(0, ui.shown).map(keyOf), place = Math.max(0, Math.min(keys.length - 1, keys.indexOf(ui.selected) + by));
  if (!keys.length) return;
  select(keys[place]);
  const item = document.querySelector(".list button[aria-current=true]");
  if (item) item.scrollIntoView({block: "nearest"});
}

function drawDetail(parent, rollout) {
  parent.textContent = "";
  const verdict = rollout.correct === null ? "" : rollout.correct ? " · correct" : " · not correct";
  make(parent, "p", `step ${rollout.step} · prompt ${rollout.ordinal}, rollout ${rollout.sample_index}` + (rollout.source ? ` of ${visible(rollout.source)}` : "") + ` · written by policy version ${[...new Set([rollout.policy_version].flat())].join("–")} · ${rollout.trained ? "trained" : "not trained"}`, "small soft");
  make(parent, "h3", `reward ${show(rollout.reward)} · advantage ${show(rollout.advantage)} · finish reason ${rollout.finish_reason} after ${rollout.num_tokens} tokens${verdict}`);
  const parts = make(parent, "div", undefined, "parts"), most = Math.max(1e-9, ...Object.values(rollout.reward_parts).map(value => Math.abs(value || 0)));
  for (const [name, value] of Object.entries(rollout.reward_parts)) {
    make(parts, "span", visible(name)); make(make(parts, "span", undefined, "track"), "i").style.width = 100 * Math.abs(value || 0) / most + "%"; make(parts, "span", value === null ? "abstained" : show(value));
  }
  make(parent, "h3", "prompt");
  longText(parent, rollout.prompt, "prompt-text");
  if (rollout.answer !== "None") { make(parent, "h3", "expected"); longText(parent, rollout.answer, "expected-text"); }
  const head = make(parent, "div", undefined, "controls", {style: "margin:0"});
  make(head, "h3", rollout.turns ? "conversation" : "answer");
  const modes = [["text", "as text"], ["logprob", "tokens by logprob"], ["advantage", "tokens by advantage"], ...(rollout.logprob_gaps ? [["gap", "tokens by sampler–trainer difference"]] : [])];
  const colour = modes.some(([mode]) => mode === ui.colour) ? ui.colour : "text";
  const picker = make(head, "select", undefined, "", {id: "pick-colour", "aria-label": "colour of the tokens"});
  for (const [mode, label] of modes) make(picker, "option", label, "", {value: mode});
  picker.value = colour;
  picker.addEventListener("change", () => {
    const hasFocus = document.activeElement === picker;
    ui.colour = picker.value;
    keep();
    drawDetail(parent, rollout);
    if (hasFocus) byId("pick-colour").focus();
  });
  if (rollout.failure) make(parent, "p", `The environment failed: ${visible(rollout.failure)}. The rollout has no reward and is not trained.`, "small");
  if (colour !== "text") tokens(parent, rollout, colour);
  else if (rollout.turns) conversation(parent, rollout);
  else longText(parent, rollout.text, "answer-text", rollout.num_chars);
}

// One box a turn: who wrote it, how long that took, and for the policy its version.
function conversation(parent, rollout) {
  const box = make(parent, "div", undefined, "turns", {id: "turns"});
  let written = 0;
  rollout.turns.forEach(([role, text, seconds], place) => {
    const isPolicys = role === "assistant", span = isPolicys ? rollout.spans[written++] : undefined, turn = make(box, "div", undefined, "turn " + (isPolicys ? "own" : "read"));
    const version = span ? ` · ${span[1]} tokens of policy version ${[...new Set(span.slice(3))].join("–")}` : "";
    make(turn, "p", `${isPolicys ? "policy" : visible(role)}${version}${seconds ? ` · ${show(seconds)} s` : ""}`, "small soft");
    longText(turn, text, `turn-${place}`);
  });
}

// A text that the user expanded stays expanded when the page is redrawn.
function longText(parent, text, id, whole) {
  const key = `${ui.selected} ${id}`, isShort = text.length > FIRST_CHARS && !opened.has(key);
  const box = make(parent, "pre", visible(isShort ? text.slice(0, FIRST_CHARS) : text), "", {id, dir: "auto", tabindex: 0});
  if (isShort) { const rest = button(parent, `show all ${text.length.toLocaleString("en")} characters`, () => { opened.add(key); box.textContent = visible(text); rest.remove(); }); }
  if (whole > text.length) make(parent, "p", `The first ${text.length.toLocaleString("en")} of ${whole.toLocaleString("en")} characters; all are in rollouts/ and on the live page.`, "small soft");
}

// How strongly each token is coloured, −1 … 1, and the legend.
const SHADES = {
  logprob: rollout => ({of: index => Math.min(1, -rollout.logprobs[index] / 4), colours: ["var(--c1)", "var(--c1)"], legend: ["certain", "p ≤ 2 %"]}),
  advantage: rollout => ({of: () => Math.max(-1, Math.min(1, rollout.advantage / 2)), colours: ["var(--bad)", "var(--good)"], legend: ["made less likely", "made more likely"]}),
  gap: rollout => { const most = Math.max(0.1, widest(rollout)); return {of: index => rollout.logprob_gaps[index] / most, colours: ["var(--c4)", "var(--c0)"], legend: [`trainer ${show(most)} nats below`, `${show(most)} above`]}; },
};

function tokens(parent, rollout, mode) {
  const shade = SHADES[mode](rollout), legend = make(parent, "p", shade.legend[0], "small soft");
  make(legend, "span", undefined, "key").style.background = mode === "logprob" ? `linear-gradient(90deg, transparent, ${shade.colours[1]})` : `linear-gradient(90deg, ${shade.colours[0]}, transparent, ${shade.colours[1]})`;
  legend.append(shade.legend[1] + (mode === "logprob" ? " (the sampler's probability)" : ""));
  const box = make(parent, "pre", undefined, "", {id: "answer-tokens", dir: "auto", tabindex: 0});
  const isWritten = index => !rollout.spans || rollout.spans.some(([start, length]) => index >= start && index < start + length);
  const add = (from, to) => rollout.token_ids.slice(from, to).forEach((id, offset) => {
    const index = from + offset, piece = visible(pieceOf(rollout, id)), strength = shade.of(index), token = make(box, "span", piece.replace(/\n/g, "↵\n"), "token");
    if (!isWritten(index)) { token.classList.add("read"); token.dataset.tip = `“${piece}”, id ${id}\nread by the policy, not written: not trained`; return; }
    if (Math.abs(strength) > 0.004) token.style.background = `color-mix(in srgb, ${shade.colours[strength > 0 ? 1 : 0]} ${Math.round(8 + 62 * Math.abs(strength))}%, transparent)`;
    const logprob = rollout.logprobs[index], gap = rollout.logprob_gaps ? `\ntrainer's logprob ${show(logprob + rollout.logprob_gaps[index])}, difference ${show(rollout.logprob_gaps[index])}` : "";
    token.dataset.tip = `“${piece}”, id ${id}\nsampler's logprob ${show(logprob)}, probability ${show(Math.exp(logprob))}${gap}\nadvantage ${show(rollout.advantage)}`;
  });
  add(0, FIRST_TOKENS);
  if (rollout.token_ids.length > FIRST_TOKENS) { const rest = button(parent, `show all ${rollout.token_ids.length} tokens`, () => { add(FIRST_TOKENS, rollout.token_ids.length); rest.remove(); }); }
  if (rollout.token_ids.length < rollout.num_tokens) make(parent, "p", `The first ${rollout.token_ids.length} of ${rollout.num_tokens} tokens; all are in rollouts/ and on the live page.`, "small soft");
}
